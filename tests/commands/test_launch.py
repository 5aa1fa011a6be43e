"""The hosts of one machine: which of them are started again, when, and how it all ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, TEMPORARY_EXIT_CODE

from skippipe_jax.campaign import restart_policy
from skippipe_jax.campaign.restart_policy import (
    FORGOTTEN_S,
    LONGEST_PAUSE_S,
    MOST_FAULTS,
    SETTLED_S,
    RestartPolicy,
)
from skippipe_jax.local import hosts
from skippipe_jax.local.hosts import LocalHosts
from tests.commands.examples import Command

LOST = "kill -9 $$"
FOR_EVER = "exec sleep 1000"
PATIENCE_S = 30.0
LONG_S = 1000.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "POLL_S", 0.005)
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)


class Shells:
    """Hosts that are shells, each of which runs the next of its scripts when it is started."""

    def __init__(self, folder: Path, scripts: Mapping[int, Sequence[str]]):
        self.started: list[int] = []
        self._folder, self._scripts = folder, scripts

    def words(self, host: int) -> list[str]:
        script = self._scripts[host][self.started.count(host)]
        self.started.append(host)
        return ["sh", "-c", f"cd {self._folder}\n{script}"]

    def hosts(
        self, *, restarts: int | None = MOST_FAULTS, outlives: bool = True, grace_s: float = LONG_S
    ) -> LocalHosts:
        return LocalHosts(
            range(len(self._scripts)), self.words, grace_s, lambda: outlives, restarts
        )


@pytest.fixture
def shells(tmp_path: Path) -> Callable[..., Shells]:
    return lambda *scripts: Shells(tmp_path, dict(enumerate(scripts)))


def once(condition: str) -> str:
    """What waits for something, and ends as one does that has trained to the end."""
    return f"until {condition}; do sleep 0.01; done"


def test_a_host_that_a_signal_has_ended_is_started_again_alone(
    shells: Callable[..., Shells], capfd: pytest.CaptureFixture[str]
):
    machine = shells([LOST, "echo here; touch back"], [once("[ -e back ]")])
    assert machine.hosts().run() == 0
    assert machine.started == [0, 1, 0]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("host 0 was killed by SIGKILL; restart in 0.01 s, at ")
    assert lines[1:] == ["[host 0] here"]


def test_all_that_end_with_75_are_started_again(shells: Callable[..., Shells]):
    again = f"exit {TEMPORARY_EXIT_CODE}"
    last = f"{once('[ -e there ]')}; touch back"
    machine = shells([again, again, last], [again, f"touch there; {once('[ -e back ]')}"])
    assert machine.hosts(outlives=False).run() == 0
    assert sorted(machine.started) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("code", [INPUT_ERROR_EXIT_CODE, 130, 143])
def test_who_ends_for_good_before_the_run_has_begun_ends_all(
    code: int, shells: Callable[..., Shells]
):
    machine = shells([FOR_EVER], [f"exit {code}"])
    assert machine.hosts(outlives=False, grace_s=0.0).run() == code
    assert machine.started == [0, 1]


def test_the_others_go_on_without_one_that_has_too_many_faults(
    shells: Callable[..., Shells], capfd: pytest.CaptureFixture[str]
):
    faults = MOST_FAULTS + 1
    # The last one is seen to have ended before the others end.
    is_seen = "! kill -0 $(tail -n 1 faults) 2> /dev/null"
    others = once(f"[ $(wc -l < faults) = {faults} ] && {is_seen}")
    machine = shells(["echo $$ >> faults; exit 1"] * faults, [others])
    assert machine.hosts(grace_s=0.0).run() == 0
    assert machine.started.count(0) == faults
    assert "host 0 exited with code 1; not restarted" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("script", "outlives", "code"),
    [(LOST, True, 0), (LOST, False, 128 + signal.SIGKILL), ("exit 143", True, 0)],
    ids=["lost", "lost as all began", "told to leave"],
)
def test_without_respawn_nobody_is_started_again(
    script: str, outlives: bool, code: int, shells: Callable[..., Shells], capfd: Any
):
    machine = shells([once("sleep 0.1")], [script])
    assert machine.hosts(restarts=None, outlives=outlives, grace_s=0.0).run() == code
    assert machine.started == [0, 1]
    assert capfd.readouterr().out == ""


def test_nobody_is_started_again_once_the_run_is_trained(
    shells: Callable[..., Shells], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", LONG_S)
    machine = shells([once("sleep 0.1; [ -e end ]")], ["touch end; kill -9 $$"])
    assert machine.hosts().run() == 0
    assert machine.started == [0, 1]


def test_nobody_is_started_again_once_all_were_told_to_stop(
    shells: Callable[..., Shells], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_lost = threading.Event()

    def pause_s(*_: object, **__: object) -> float:
        is_lost.set()
        return LONG_S

    monkeypatch.setattr(RestartPolicy, "pause_s", pause_s)
    stops = "trap 'exit 143' TERM; touch ready; while :; do sleep 0.01; done"
    machine = shells([stops], [LOST])
    launched = machine.hosts()

    def tell() -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        is_lost.wait(PATIENCE_S)
        launched.told(signal.SIGTERM)

    threading.Thread(target=tell).start()
    assert launched.run() == 128 + signal.SIGTERM
    assert machine.started == [0, 1]


def test_no_host_is_left_where_the_launcher_fails_itself(
    shells: Callable[..., Shells], tmp_path: Path
):
    there = "[ -s told ] && [ -s deaf ]"
    deaf = "trap '' TERM; echo $$ > deaf; while :; do sleep 0.01; done"
    # Host 0 is lost, and how to start it again cannot be found out.
    machine = shells([f"{once(there)}; {LOST}"], [f"echo $$ > told; {FOR_EVER}"], [deaf])
    with pytest.raises(IndexError):
        machine.hosts(grace_s=0.5).run()
    for name in ("told", "deaf"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_a_process_of_another_user_is_no_host(monkeypatch: pytest.MonkeyPatch):
    """Numbers of processes are used again."""

    def kill(process: int, number: int) -> None:
        raise PermissionError(f"{number} to {process}")

    monkeypatch.setattr(os, "kill", kill)
    assert not hosts._lives(1)


def test_pauses_grow_until_a_host_has_lived_for_a_minute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    policy = RestartPolicy()

    def pause_s(code: int, lived_s: float) -> float | None:
        return policy.pause_s(code, lived_s, misses_others=False)

    quickly = [pause_s(-signal.SIGKILL, 5.0) for _ in range(9)]
    assert quickly == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert [pause_s(TEMPORARY_EXIT_CODE, SETTLED_S), pause_s(1, 5.0)] == [1, 2]


@pytest.mark.parametrize(
    ("code", "misses_others", "most"),
    [
        (1, False, MOST_FAULTS),
        (TEMPORARY_EXIT_CODE, True, MOST_FAULTS),
        (TEMPORARY_EXIT_CODE, False, 100),
        (-signal.SIGABRT, True, 100),
        (-signal.SIGTERM, False, 0),
        (-signal.SIGINT, False, 0),
        (0, False, 0),
    ],
)
def test_how_often_a_host_is_started_again(code: int, misses_others: bool, most: int):
    policy = RestartPolicy()
    pauses = [policy.pause_s(code, SETTLED_S, misses_others=misses_others) for _ in range(100)]
    assert [pause_s is not None for pause_s in pauses] == [True] * most + [False] * (100 - most)


def test_a_fault_is_forgotten_by_the_hour():
    policy = RestartPolicy()
    for _ in range(10):
        for _ in range(MOST_FAULTS):
            assert policy.pause_s(1, 60.0, misses_others=False) is not None
        # It lives for long enough to make up for all of them before it ends once more.
        assert policy.pause_s(-signal.SIGKILL, MOST_FAULTS * FORGOTTEN_S, misses_others=False)
    for _ in range(MOST_FAULTS):
        assert policy.pause_s(1, FORGOTTEN_S - 1, misses_others=False) is not None
    assert policy.pause_s(1, FORGOTTEN_S - 1, misses_others=False) is None


@pytest.fixture
def signals() -> Iterator[None]:
    """What these signals do here is put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def fake_python(folder: Path, monkeypatch: pytest.MonkeyPatch, begin: str) -> None:
    """Have hosts note their words in `started`; the first begins the run and dies, others end."""
    (folder / "python").write_text(
        '#!/bin/sh\necho "$*" >> started\n[ $(wc -l < started) = 1 ] || exit 0\n'
        f"mkdir -p run\ntouch run/config.yaml\n{begin}\nkill -9 $$\n"
    )
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("lives", [False, True])
def test_a_host_joins_those_that_live_where_it_is_told_to(
    lives: bool, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """If none does, the run goes on as it has begun."""
    process = os.getpid() if lives else 1 << 30
    member = {"host": 1, "pid": process, "address": "127.0.0.1:8477"}
    generation = {"generation": 1, "step": 0, "leader": 1, "at": "now", "cause": ""}
    line = generation | {"rewound": False, "members": [member]}
    (folder / "told").write_text(json.dumps(line) + "\n")
    fake_python(folder, monkeypatch, "cp told run/membership.jsonl")
    given = ("--config", "config.yaml", "--hosts", "1", "--set", "cluster.secret=secret")
    (folder / "secret").write_text("thisIsTheSecretOfThisRunAndOfNoOther\n")
    result = command("launch", *given, "--restart=join", "--log-level=warning")
    assert result.code == 0, result.out
    first, again = (folder / "started").read_text().splitlines()
    joins = "-m skippipe_jax join 127.0.0.1:8477 --run-dir run-joined-0 --set cluster.secret=secret"
    level = "--log-level warning"
    assert level in first
    assert (again == f"{joins} {level}") == lives
    assert ("skippipe_jax.train" in again and " --resume " in again) != lives


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("is_there", [False, True])
def test_a_host_goes_on_with_the_run_that_was_begun_here(
    is_there: bool, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """And not with one that was there before, which nobody has asked for."""
    if is_there:
        (folder / "run").mkdir()
        (folder / "run" / "config.yaml").touch()
    fake_python(folder, monkeypatch, "true")
    result = command("launch", "--config", "config.yaml", "--hosts", "1", "--restart=resume")
    assert result.code == 0, result.out
    started = (folder / "started").read_text().splitlines()
    assert [" --resume " in line for line in started] == [False, not is_there]
    assert all(line.endswith("--host-id 0") for line in started)
