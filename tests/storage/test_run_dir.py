"""Files of a run folder stay whole after interrupted writes, and its lock has one holder."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from skippipe_sched.errors import TemporaryError
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.config import parse_config
from skippipe_jax.consensus.generations import Generation, RebuiltStage
from skippipe_jax.storage import records, run_lock
from skippipe_jax.storage.files import atomic_write
from skippipe_jax.storage.records import (
    RecordWriter,
    ValidationMetrics,
    append_record,
    lines_from_end,
    read_records,
)
from skippipe_jax.storage.run_dir import MEMBERSHIP, METRICS, VALIDATION, RunDir
from skippipe_jax.storage.run_lock import LEASE, RunLock
from skippipe_jax.training.callbacks.metrics_log import MetricsTail
from skippipe_jax.training.setup import _warn_of_missing_links
from tests.harness.step_metrics import metrics_of
from tests.sched.examples import plan_of

PLAN = plan_of([[0], [1]], [[0, 1]])
MEMBERS = [
    {"host": host, "pid": 700 + host, "address": f"10.0.0.{host}:1", "nodes": [host]}
    for host in (1, 3)
]


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_host_that_was_stopped_adds_nothing_where_others_go_on(tmp_path: Path):
    config = parse_config({"run_dir": str(tmp_path)})
    with closing(RecordWriter(tmp_path / METRICS)) as stopped:
        stopped.append({"step": 1})
        stopped.append({"step": 2})
        RunDir(tmp_path).truncate_after(1, config)
        with closing(RecordWriter(tmp_path / METRICS)) as going_on:
            going_on.append({"step": 2})
            stopped.append({"step": 3})
            going_on.append({"step": 3})
    assert steps_of(tmp_path / METRICS) == [1, 2, 3]


def test_who_cannot_find_out_which_of_two_hosts_goes_on_is_warned_and_may_try_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    two = Generation(2, (0, 1), (7, 8), 0, 20, placement=((0,), (1,)))
    _warn_of_missing_links(tmp_path)
    assert capsys.readouterr().err == ""
    assert RunDir(tmp_path).propose(two) == two

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    _warn_of_missing_links(tmp_path)
    assert "a file system without hard links" in "".join(capsys.readouterr())
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
    with pytest.raises(TemporaryError, match=r"run_dir = .*Operation not permitted"):
        RunDir(tmp_path).propose(replace(two, number=3))


@pytest.mark.parametrize("goes_on", [False, True])
def test_metrics_whose_file_has_gone_stale_are_opened_again_unless_others_go_on(
    tmp_path: Path, goes_on: bool, monkeypatch: pytest.MonkeyPatch
):
    """A server that was restarted, or another file in the place of this one, look the same."""
    add_line, stale = records.add_line, []

    def add(descriptor: int, line: dict[str, object]) -> None:
        if descriptor in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        add_line(descriptor, line)

    monkeypatch.setattr(records, "add_line", add)
    with closing(RecordWriter(tmp_path / METRICS)) as metrics:
        metrics.append({"step": 1})
        stale.append(metrics._file.fileno())
        if goes_on:
            RunDir(tmp_path).truncate_after(1, parse_config({"run_dir": str(tmp_path)}))
        metrics.append({"step": 2})
    steps = steps_of(tmp_path / METRICS)
    assert steps == ([1] if goes_on else [1, 2])


def test_validation_losses_of_an_earlier_version_are_kept(tmp_path: Path):
    """They stood among the metrics, and the run continues with a file for them."""
    for step in (1, 2, 3, 4):
        loss = {"validation_loss": 4.0 - step} if step % 2 == 0 else {"validation_loss": None}
        line = {"step": step, "loss": 2.0, "seconds_per_iteration": 1.0, "compilations": 0}
        append_record(tmp_path / METRICS, line | {"tokens_per_second": 10.0} | loss)
    run = RunDir(tmp_path)
    assert run.validation_losses() == {2: 2.0, 4: 0.0}
    run.truncate_after(3, parse_config({"run_dir": str(tmp_path)}))
    append_record(tmp_path / VALIDATION, ValidationMetrics(step=4, validation_loss=1.5))
    assert run.validation_losses() == {2: 2.0, 4: 1.5}
    assert [line.validation_loss for line in run.metrics()] == [None, 2.0, None]


def test_a_line_tells_all_of_a_generation(tmp_path: Path):
    RunDir(tmp_path).append_generation(Generation(1, (0, 1, 3), (7, 8, 9), 0, 0), PLAN, MEMBERS)
    made = RebuiltStage(1, "average", 40, (1, 3))
    told: dict[str, Any] = {"cause": "host 0 was lost", "lost": (1,), "remade": (made,)}
    second = Generation(2, (1, 3), (8, 9), 3, 40, **told)
    RunDir(tmp_path).append_generation(second, PLAN, MEMBERS)
    line = json.loads((tmp_path / MEMBERSHIP).read_text().splitlines()[1])
    at = line.pop("at")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", at)
    assert line == {
        "generation": 2,
        "step": 40,
        "cause": "host 0 was lost",
        "leader": 3,
        "rewound": False,
        "plan": PLAN.method,
        "predicted_seconds": PLAN.predicted.iteration_s,
        "members": MEMBERS,
        "lost": [1],
        "remade": [json.loads(msgspec.json.encode(made))],
    }
    read = RunDir(tmp_path).generations()[1]
    assert json.loads(msgspec.json.encode(read)) == line | {"at": at}
    assert read.remade == [made]
    assert load_plan(tmp_path / "generations" / "plan-2.json").to_json() == PLAN.to_json()
    assert RunDir(tmp_path).last_addresses() == ["10.0.0.1:1", "10.0.0.3:1"]


# Writing a file that breaks off leaves what was there.


@pytest.mark.parametrize("durably", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, durably: bool):
    path = tmp_path / "plan.json"
    for text in ("old", "new, ž"):
        atomic_write(path, text, durably=durably)
        assert path.read_text(encoding="utf-8") == text
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "no text \ud800", durably=durably)
    assert path.read_text(encoding="utf-8") == "new, ž"
    atomic_write(path, "again", durably=durably)
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


# Who holds a folder, while a run begins and once its hosts lead one after the other.


START = 7


@pytest.fixture(params=["locks", "no locks"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a file system whose locks exclude others, or nobody."""
    if request.param == "no locks":
        monkeypatch.setattr(run_lock.fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(run_lock, "RENEWED_S", 0.02)
    monkeypatch.setattr(run_lock, "EXPIRED_S", 2.0)
    monkeypatch.setattr(run_lock, "SETTLED_S", 0.05)
    return tmp_path / "run"


def assert_is_held(folder: Path) -> None:
    with RunLock(folder) as other, pytest.raises(TemporaryError, match="another training"):
        other.acquire()


def test_a_folder_is_held_by_one_training_until_it_is_released(folder: Path):
    with RunLock(folder) as lock:
        lock.share(START)
        assert not folder.exists(), "a hold that is not taken is not shared"
    with RunLock(folder) as first, RunLock(folder) as late:
        first.acquire()
        assert_is_held(folder)
        with pytest.raises(TemporaryError, match="another training"):
            late.acquire(START)  # A leader of a run that began before.
    assert not folder.exists(), "it was made for the hold, and is empty"
    with RunLock(folder) as second:
        second.acquire()


def test_a_run_holds_its_folder_whoever_of_its_hosts_leads(folder: Path):
    """Also where the first leader is stopped, and keeps what it has."""
    with RunLock(folder) as first, RunLock(folder) as next_leader:
        first.acquire()
        (folder / "config.yaml").touch()
        first.share(START)
        assert_is_held(folder)
        next_leader.acquire(START)
        first.release()
        assert_is_held(folder)
        next_leader.acquire(START)  # As it leads once more.
        assert_is_held(folder)
    with RunLock(folder) as another:
        another.acquire()


@pytest.mark.parametrize("folder", ["no locks"], indirect=True)
@pytest.mark.parametrize("left", ['{"start": 1, "holder": "dead", "renewed": 3}', "garbage", "[]"])
def test_a_lease_that_nobody_renews_expires(
    folder: Path, left: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_lock, "EXPIRED_S", 0.1)
    folder.mkdir()
    (folder / LEASE).write_text(left)
    with RunLock(folder) as lock:
        lock.acquire()
        assert json.loads((folder / LEASE).read_text())["holder"] != "dead"
    assert not (folder / LEASE).exists()


@pytest.mark.parametrize("folder", ["no locks"], indirect=True)
def test_who_has_lost_its_lease_renews_it_no_more(folder: Path, capsys: pytest.CaptureFixture[str]):
    with RunLock(folder) as stopped:
        stopped.acquire()
        theirs = '{"start": 1, "holder": "other", "renewed": 1}'
        (folder / LEASE).write_text(theirs)
        [thread] = [own for own in threading.enumerate() if own.name == "lease"]
        thread.join(10)
        assert not thread.is_alive()
        assert "another training run took over the folder" in capsys.readouterr().err
    assert (folder / LEASE).read_text() == theirs


# Files of JSON lines: what a crash leaves of them, and that their length costs nothing.


def test_what_is_added_after_a_torn_line_is_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    append_record(tmp_path / METRICS, {"step": 1})
    RunDir(tmp_path).append_generation(Generation(1, (0, 1), (7, 8), 0, 0), PLAN, MEMBERS)
    for name in ("metrics.jsonl", "membership.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"generation": 2, "st')
    append_record(tmp_path / METRICS, {"step": 2})
    RunDir(tmp_path).append_generation(Generation(3, (0, 1), (7, 8), 0, 9), PLAN, MEMBERS)
    assert [line.step for line in read_records(tmp_path / METRICS, ValidationMetrics)] == [1, 2]
    assert [line.step for line in RunDir(tmp_path).generations()] == [0, 9]
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(" = ")[0] for line in told] == [
        f"{tmp_path}/metrics.jsonl, line 2",
        f"{tmp_path}/membership.jsonl, line 2",
    ]
    assert all(line.endswith("This line is skipped.") for line in told)


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(records.os, "write", lambda to, content: write(to, content[:3]))
    append_record(tmp_path / METRICS, {"step": 12345})
    assert [line.step for line in read_records(tmp_path / METRICS, ValidationMetrics)] == [12345]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_lines_from_the_end_are_those_of_the_file(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "BLOCK_BYTES", block)
    path = tmp_path / "lines"
    for content in (b"", b"\n", b"a", b"a\n", b"ab\n\ncde\nf", b"\nab\ncde\n" * 5):
        path.write_bytes(content)
        lines = content.split(b"\n")[:-1]
        found = [*lines_from_end(path)]
        assert [line for _, line in found] == lines[::-1]
        assert [end for end, _ in found] == [
            len(b"\n".join(lines[:number])) + 1 for number in range(len(lines), 0, -1)
        ]


def test_a_step_is_found_among_lines_that_cannot_be_read(tmp_path: Path):
    path = tmp_path / METRICS
    assert records.end_of_step(add(path, []), 3) == (0, 0)
    add(path, [f'{{"step": {step}, "x": "{"-" * (step % 7)}"}}' for step in range(2, 40, 2)])
    add(path, ["", "torn", "\0\0\0", '{"step": true}', '{"step": 40}', '{"step": 41'])
    assert RunDir(tmp_path).last_step() == 40
    end, last = records.end_of_step(path, 13)
    assert last == 12
    assert json.loads(path.read_bytes()[:end].splitlines()[-1])["step"] == 12


def add(path: Path, lines: list[str]) -> Path:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def test_a_long_file_is_truncated_by_reading_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All hosts wait while the leader finds what is written, and removes what comes again."""
    steps, path, run = 100_000, tmp_path / METRICS, RunDir(tmp_path)
    add(path, [f'{{"step": {n}}}' for n in range(1, steps + 1)])
    (tmp_path / VALIDATION).touch()
    config = parse_config({"run_dir": str(tmp_path)})
    read, pread = [0], os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(records.os, "pread", counted)
    for is_own in (False, True):
        steps -= 5
        before = path.stat().st_ino
        read.clear()
        run.truncate_after(steps, config, is_own=is_own)
        assert sum(read) == records.BLOCK_BYTES
        # A new file for a new leader: a host that was stopped still writes the old one.
        assert (path.stat().st_ino == before) == is_own
        assert run.last_step() == steps
    lines = MetricsTail()
    lines.lines.extend(metrics_of(n) for n in range(steps - 1, steps + 3))
    read.clear()
    lines.flush_to(tmp_path)
    assert sum(read) < 2 * records.BLOCK_BYTES
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[-3:]] == [
        steps + n for n in range(3)
    ]


GOOD = {"step": 1, "loss": 5.0, "tokens_per_second": 1, "seconds_per_iteration": 60.0}


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ("{", ""),
        ("[]", ""),
        ("\udcff", ""),
        (f'{{"step": 1, "x": [{"[" * 100_000}', ""),
        (f'{{"step": 1, "x": [NaN, {"[" * 100_000}', ""),
        ('{"step": 1}', "loss"),
        ({"loss": "low"}, "loss"),
        ({"seconds_per_iteration": 0.0}, "seconds_per_iteration"),
        ({"predicted_seconds": -1}, "predicted_seconds"),
        ({"idle_share": ["x"]}, "idle_share"),
    ],
    ids=range(10),
)
def test_a_damaged_line_is_named_and_left_out(
    tmp_path: Path, damage: Any, field: str, capsys: pytest.CaptureFixture[str]
):
    good, path = GOOD | {"compilations": 0}, tmp_path / METRICS
    line = damage if isinstance(damage, str) else json.dumps(good | damage)
    path.write_bytes(f"{line}\n{json.dumps(good)}\n".encode(errors="surrogateescape"))
    assert [(read.step, read.loss) for read in RunDir(tmp_path).metrics()] == [(1, 5.0)]
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {path}, line 1 = ")
    assert field in error


def test_numbers_that_json_does_not_know_are_read_as_none(tmp_path: Path):
    """Earlier versions wrote some of them."""
    add(tmp_path / VALIDATION, ['{"step": 1, "validation_loss": NaN, "more": [Infinity]}'])
    [line] = read_records(tmp_path / VALIDATION, ValidationMetrics)
    assert line == ValidationMetrics(step=1, validation_loss=None)
