"""What `churn` measures while it strikes a run at moments, and the run that it restarts beside."""

import json
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.churn import config, records
from experiments.benchmarks.churn.faults import KINDS, WHILE_JOINING, Fault, draw, moments
from experiments.benchmarks.churn.hosts import Hosts
from experiments.benchmarks.churn.restart import Restarted
from experiments.benchmarks.harness import launching

CALM = {"descriptors": 30, "threads": 40, "resident_bytes": 400_000_000}


def test_a_host_that_is_spared_is_never_struck():
    faults = draw(0, 6, 64, [*KINDS], spared=5)
    for fault in faults:
        assert 5 not in fault.struck(5, range(6))
        assert 5 not in fault.struck(1, range(6))
        assert (fault.struck(1, range(6))[0] == 1) == fault.hits_leader
        if fault.kind in WHILE_JOINING:
            assert fault.joining in WHILE_JOINING[fault.kind]
    assert {fault.joining for fault in faults if fault.kind == "giver"} == {*WHILE_JOINING["giver"]}
    assert 0 < sum(fault.comes_by_join for fault in faults) < 64


def test_no_more_hosts_are_cut_off_at_once_than_a_run_can_spare():
    fault = Fault(1, "partition", "start", "before", hits_leader=False, order=(0, 1, 2, 3, 4))
    assert fault.struck(4, range(6)) == (0, 1)
    assert fault.struck(4, range(6), lambda lost: {*lost} != {0, 1}) == (0, 2)
    assert fault.struck(4, range(6), lambda _: False) == (0,)


def test_moments_come_so_often_on_average():
    drawn = moments(3, 1000, 60.0)
    assert drawn == sorted(drawn) == moments(3, 1000, 60.0) != moments(4, 1000, 60.0)
    assert 58_000 < drawn[-1] <= 60_000
    # Of gaps that are exponential a share of 1/e is longer than the mean.
    longer = sum(after - before > 60.0 for before, after in pairwise(drawn))
    assert 300 < longer < 440


def test_what_grows_in_a_spared_host_is_told():
    assert not records.grown([CALM] * 100)
    assert not records.grown([CALM] * 9)
    more = {"descriptors": 4, "threads": 4, "resident_bytes": 49_000_000}
    assert not records.grown([*[CALM] * 99, {k: v + more[k] for k, v in CALM.items()}])
    for key, by, word in (
        ("descriptors", 5, "descriptors"),
        ("threads", 5, "threads"),
        ("resident_bytes", 51_000_000, "memory"),
    ):
        [told] = records.grown([*[CALM] * 99, CALM | {key: CALM[key] + by}])
        assert word in told


def test_goodput_is_what_counts_in_the_end_over_what_a_calm_run_makes():
    found = records.goodput((0.0, 10), (60.0, 70), (3660.0, 2770), 4)
    assert found["goodput"] == 0.75
    assert found["calm_iteration_s"] == 1.0
    assert found["microbatches_per_hour"] == 4 * 2700
    assert found["hours"] == 1.0
    notes: list[dict[str, Any]] = [
        {"what": "counted", "at": at_s, "step": step} for at_s, step in ((1.0, 7), (2.0, 8))
    ]
    # Then all have gone back to a checkpoint.
    notes += [{"what": "counted", "at": 3.0, "step": 6}, {"what": "missed", "at": 3.5}]
    assert [records.step_at(notes, at_s) for at_s in (0.5, 2.5, 9.0)] == [0, 8, 6]


def test_goodput_below_what_is_asked_is_told():
    own = {"goodput": 0.8, "microbatches_per_hour": 1600.0}
    assert not records.too_little(own)
    assert not records.too_little(own | {"restarted": {"microbatches_per_hour": 1000.0}})
    assert records.too_little(own | {"goodput": 0.79})
    assert records.too_little(own | {"restarted": {"microbatches_per_hour": 1001.0}})


class Hurried:
    """A host that makes 50 steps a second, and that a signal ends, with all others at once."""

    all: list["Hurried"]
    pid = 1

    def __init__(self, run: Path, leads: bool):
        self.code: int | None = None
        self._metrics, self._leads = run / "metrics.jsonl", leads
        run.mkdir(parents=True, exist_ok=True)
        # The last checkpoint has every tenth step.
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        self._done = len(lines) // 10 * 10
        if leads:
            self._write()
        self._since_s, self._first = time.monotonic(), self._done

    def poll(self) -> int | None:
        if self._leads and self.code is None:
            self._done = self._first + int(50 * (time.monotonic() - self._since_s))
            self._done += self._done % 10 == 0  # Some steps come after the last checkpoint.
            self._write()
        return self.code

    def send_signal(self, number: int) -> None:
        if self.code is None and number != signal.SIGCONT:
            for host in Hurried.all:
                host.code = 75

    def kill(self) -> None:
        self.code = self.code or -9

    def wait(self) -> int | None:
        return self.code

    def _write(self) -> None:
        lines = (json.dumps({"step": step}) for step in range(1, self._done + 1))
        self._metrics.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of all that is started, each a `Hurried` host."""
    words: list[list[str]] = []
    Hurried.all = []

    def started(own: Sequence[str], output: Path, *_: object) -> Hurried:
        words.append([*own])
        Hurried.all.append(Hurried(output.parent / "run", own[-1] == "0"))
        return Hurried.all[-1]

    monkeypatch.setattr(launching, "started", started)
    return words


def test_a_run_that_is_restarted_counts_no_step_twice(tmp_path: Path, hurried: list[list[str]]):
    restarted = Restarted(tmp_path, tmp_path / "config.yaml", 2, 1.0, None, calm_s=0.4)
    faults = draw(0, 2, 3, ["kill"])
    found = restarted.happen(faults, [0.0, 0.55, 0.6], 1.0)
    assert found["starts"] == len(hurried) / 2 == 4
    assert ["--resume" in words for words in hurried] == [False] * 2 + [True] * 6
    assert 0 < found["steps_made_again"] < 30
    assert 0 < found["goodput"] < 1.2
    assert found["hours"] == pytest.approx(1.0 / 3600, rel=2)
    assert all(host.code is not None for host in Hurried.all)


def test_a_host_comes_back_by_join_where_no_place_but_its_own_is_free(
    tmp_path: Path, hurried: list[list[str]]
):
    hosts = Hosts(tmp_path, config.write_config(tmp_path, 4, 1.0, []), 4, 1.0, None)
    assert hosts.start_again(1, by_join=True) == "join"
    assert hurried[-1][4] == "join"
    Hurried.all[2].code = -9
    assert hosts.start_again(3, by_join=True) == "resume"
    assert hosts.start_again(2, by_join=True) == "join"
    # With two of them apart there would be too few that can read a checkpoint.
    assert hosts.start_again(0, by_join=True) == "resume"
    assert hosts.start_again(2, by_join=False) == "resume"
    assert hosts.apart == {1}
