"""Tasks with a DAG between them: when they run, how they fail, and what interruptions leave."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.campaign import restart_policy, running
from skippipe_jax.campaign.running import ordered, run_all
from skippipe_jax.config.resume import json_digest

# A task's process: it notes when it begins and ends, and does between as its words say.
WORKER = """
import os, signal, sys, time
from pathlib import Path
name, *words = sys.argv[1:]
def note(what):
    with open("notes", "a") as notes:
        notes.write(f"{what} {name}\\n")
def stop(*_):
    note("stopped")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
note("began")
for word in words:
    kind, _, value = word.partition("=")
    if kind == "until":
        while not Path(value).exists():
            time.sleep(0.01)
    elif kind == "make":
        Path(value).touch()
    elif kind == "unless" and Path(value).exists():
        break
    elif kind == "exit":
        print("error: field = 1: is wrong. Write 2.")
        sys.exit(int(value))
note("ended")
Path(f"{name}.done").touch()
"""


@dataclass(frozen=True)
class Worker:
    """A task that is done when its file is there."""

    folder: Path
    name: str
    needs: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    work: float = 1.0

    def is_done(self) -> bool:
        return (self.folder / f"{self.name}.done").exists()

    def commands(self) -> Sequence[Callable[[], running.Command]]:
        return [lambda: ["worker", self.name, *self.words]]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder)}

    def found(self) -> str:
        return "something"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(running, "POLL_S", 0.02)
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restart_policy, "LONGEST_PAUSE_S", 0.2)
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def run(folder: Path, *tasks: Worker, at_once: int = 2) -> list[str]:
    """What the tasks have noted, after they have run."""
    run_all(tasks, folder / "logs", at_once, folder)
    return notes(folder)


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@given(st.data())
def test_every_task_comes_after_what_it_needs(data: st.DataObject):
    names = [f"t{number}" for number in range(data.draw(st.integers(1, 8)))]
    needs = {name: data.draw(st.sets(st.sampled_from(names[:i] or ["t0"]))) - {name}
             for i, name in enumerate(names)}  # fmt: skip
    given_order = data.draw(st.permutations(names))
    tasks = [Worker(Path(), name, tuple(sorted(needs[name]))) for name in given_order]
    found = [task.name for task in ordered(tasks)]
    assert sorted(found) == names
    for name in names:
        assert all(found.index(need) < found.index(name) for need in needs[name])
    # Whoever needs nothing comes in the order that was given.
    free = [name for name in given_order if not needs[name]]
    assert [name for name in found if name in free] == free


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"a": ("b",), "b": ("a",), "c": ()}, "needs = 'a, b': these tasks need each other"),
        ({"a": ("a",)}, "needs = 'a': these tasks need each other"),
        ({"a": ("elsewhere",)}, "needs = 'elsewhere': does not exist, but a needs it"),
    ],
)
def test_circles_and_needs_that_are_not_there_are_refused(folder, needs, message):
    with pytest.raises(InputError) as refusal:
        run(folder, *(Worker(folder, name, own) for name, own in needs.items()))
    assert message in str(refusal.value)
    assert not notes(folder)


def test_tasks_run_once_after_what_they_need(folder, capsys):
    tasks = [Worker(folder, "b", ("a",)), Worker(folder, "a"), Worker(folder, "c", ("a", "b"))]
    assert run(folder, *tasks) == [
        f"{what} {name}" for name in "abc" for what in ("began", "ended")
    ]
    assert "0 of 3 runs have been trained" in capsys.readouterr().out
    (folder / "b.done").unlink()
    assert run(folder, *tasks)[6:] == ["began b", "ended b"]
    out = capsys.readouterr().out
    assert "2 of 3 runs have been trained" in out
    assert "b: something; " in out
    assert "0 runs left, about 0.0 h" in out
    run(folder, *tasks)
    assert len(notes(folder)) == 8


def test_as_many_run_at_once_as_may(folder):
    """Two wait for each other, and a third is not there until one has ended."""
    tasks = [
        Worker(folder, "a", words=("make=a", "until=b")),
        Worker(folder, "b", words=("make=b", "until=a")),
        Worker(folder, "c"),
    ]
    found = run(folder, *tasks)
    assert found.index("began c") > min(found.index("ended a"), found.index("ended b"))
    running_now = most = 0
    for line in found:
        running_now += 1 if line.startswith("began") else -1
        most = max(most, running_now)
    assert most == 2


def test_others_go_on_when_one_fails(folder):
    tasks = [
        Worker(folder, "wrong", words=("exit=2",)),
        Worker(folder, "child", ("wrong",)),
        Worker(folder, "first"),
        Worker(folder, "last", ("first",)),
    ]
    with pytest.raises(InputError) as failure:
        run(folder, *tasks)
    assert failure.value.exit_code == 2
    assert failure.value.value == "wrong"
    log = folder / "logs" / "wrong.log"
    expected = f"Its last line is: error: field = 1: is wrong. Write 2. Read {log}."
    assert str(failure.value).endswith(expected)
    assert "ended last" in notes(folder)
    assert "began child" not in notes(folder)


def test_who_dies_without_a_word_has_failed_too(folder):
    (folder / "worker.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(InputError, match=r"run = 'a': failed.* Read .*a\.log") as failure:
        run(folder, Worker(folder, "a"))
    assert "Its last line" not in str(failure.value)


def test_what_found_something_in_use_tries_again(folder, capsys):
    words = ("unless=tried", "make=tried", "exit=75")
    assert run(folder, Worker(folder, "a", words=words)) == ["began a", "began a", "ended a"]
    assert (
        "a failed; retry in 0.01 s. Its last line is: error: field = 1" in capsys.readouterr().out
    )


def test_what_is_in_use_for_long_is_tried_ever_less_often_and_not_for_ever(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(running, "MOST_TRIES", 6)
    with pytest.raises(InputError, match=r"run = 'a': failed.*Its last line is: error: field = 1"):
        run(folder, Worker(folder, "a", words=("exit=75",)))
    pauses = [float(line.split()[4]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(pauses) == running.MOST_TRIES == len(notes(folder)) - 1
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.08]
    assert max(pauses) == 0.2


def test_ctrl_c_lets_all_processes_end_and_the_next_call_goes_on(folder):
    tasks = [Worker(folder, name, words=("until=go",)) for name in "ab"]

    def interrupt() -> None:
        wait_for(lambda: sum(line.startswith("began") for line in notes(folder)) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        run(folder, *tasks)
    interrupting.join()
    assert sorted(notes(folder)) == ["began a", "began b", "stopped a", "stopped b"]
    (folder / "go").touch()
    assert sorted(run(folder, *tasks)[4:]) == ["began a", "began b", "ended a", "ended b"]


@pytest.mark.parametrize("ends_well", [True, False])
def test_what_a_killed_one_left_behind_is_waited_for(folder, ends_well):
    """No second process of a task begins beside one that goes on without its parent."""
    words = ("until=go",) if ends_well else ("unless=go", "make=again", "until=go", "exit=3")
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.campaign.test_running import Worker, run
run(Path({str(folder)!r}), Worker(Path({str(folder)!r}), "a", words={words!r}))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], env=os.environ)
    wait_for(lambda: "began a" in notes(folder))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    task = Worker(folder, "a", words=words)
    looks = 0

    async def look(_: float) -> None:
        nonlocal looks
        looks += 1
        await sleep(0.02)
        if looks == 5:
            assert notes(folder) == ["began a"]
            (folder / "go").touch()

    sleep = asyncio.sleep
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running.asyncio, "sleep", look)
        run(folder, task)
    again = [] if ends_well else ["began a"]
    assert notes(folder) == ["began a", *again, "ended a"]


def test_digests_tell_what_differs_and_take_days():
    day = datetime.date(2026, 11, 22)
    assert json_digest({"today": day}) == json_digest({"today": "2026-11-22"})
    whole = json.loads('{"a": [1, 2.5, null], "b": {"c": "text"}}')
    assert json_digest(whole) == json_digest(json.loads(json.dumps(whole)))
    assert json_digest(whole) != json_digest(whole | {"a": [1, 2.5, 0]})
    assert len(json_digest(whole)) == 16


def test_processes_share_the_cores_and_keep_the_flags_of_the_user(monkeypatch):
    monkeypatch.setattr(running.os, "cpu_count", lambda: 4)
    assert running.thread_environment(2)["PJRT_NPROC"] == "2"
    assert "XLA_FLAGS" not in running.thread_environment(2)
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_mine=1")
    alone = running.thread_environment(3)
    assert alone["PJRT_NPROC"] == "1"
    assert alone["XLA_FLAGS"].split() == ["--xla_of_mine=1", running.ONE_THREAD["XLA_FLAGS"]]
    assert "JAX_PLATFORMS" not in alone
