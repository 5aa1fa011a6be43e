"""What a signal means to a host, and what hosts say as they end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
from skippipe_sched.errors import Terminated

from skippipe_jax.cli import join, train
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.cluster.inbox import NOBODY
from skippipe_jax.config import Config, to_yaml
from skippipe_jax.config.run import TrainConfig, ValidationConfig
from skippipe_jax.training import preemption
from skippipe_jax.training.preemption import Preemption
from skippipe_jax.training.trainer import RunResult

GRACE_S = 7.0


class Hosts:
    """The others, who may go on without this host."""

    def __init__(self, count: int = 3, *, is_distributed: bool = False):
        self.index, self.count, self.is_distributed = 1, count, is_distributed
        self.generation_number = 4
        self.is_the_end = False
        self.told: list[tuple[float, Callable[[], None]]] = []
        self.resume_hint = lambda: "Resume from step 7."

    @property
    def control(self) -> Any:
        assert self.count > 1
        assert not self.is_distributed
        return SimpleNamespace(
            is_the_end=self.is_the_end, start_leaving=lambda *given: self.told.append(given)
        )


def preemption_of(hosts: Any) -> Preemption:
    return Preemption(hosts, GRACE_S)


@pytest.mark.parametrize("hosts", [Hosts(count=1), Hosts(is_distributed=True)])
def test_where_no_host_can_go_alone_any_signal_ends_the_run(hosts: Hosts):
    here = preemption_of(hosts)
    assert not here.votes_to_end()
    here.receive(SIGTERM)
    assert hosts.told == []
    assert here.votes_to_end()
    assert not here.has_left()


def test_a_host_among_others_leaves_unless_too_many_do():
    here = preemption_of(hosts := Hosts())
    here.receive(SIGINT)
    assert hosts.told == []
    assert here.votes_to_end()
    here = preemption_of(hosts)
    here.receive(SIGTERM)
    [(grace_s, _)] = hosts.told
    assert grace_s == GRACE_S
    assert not here.votes_to_end()
    assert not here.has_left()
    hosts.is_the_end = True
    assert here.votes_to_end()
    assert preemption_of(hosts).votes_to_end(), "whoever was told"


def test_a_host_has_left_once_others_go_on_without_it():
    here = preemption_of(hosts := Hosts())
    hosts.generation_number = NOBODY
    assert not here.has_left()  # It was left out, and comes back.
    here.receive(SIGTERM)
    assert here.has_left()
    assert here.must_stay, "no grace ends it now"


def test_a_host_goes_when_its_time_is_over_unless_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    codes: list[int] = []
    monkeypatch.setattr(preemption, "exit_at_once", codes.append)
    here = preemption_of(hosts := Hosts())
    here.receive(SIGTERM)
    [(_, late)] = hosts.told
    hosts.is_the_end = True
    late()
    hosts.is_the_end, here.must_stay = False, True
    late()
    assert codes == []
    here.must_stay = False
    late()
    assert codes == [LOST_HOST_EXIT_CODE]
    told = "".join(capfd.readouterr())
    assert "grace_s = 7 s; exiting, the others will see a failure. Resume from step 7.\n" in told


@pytest.mark.parametrize("first", [SIGINT, SIGTERM], ids=str)
@pytest.mark.parametrize("second", [SIGINT, SIGTERM], ids=str)
def test_a_second_signal_ends_the_program_at_once_as_that_signal_does(
    first: signal.Signals, second: signal.Signals
):
    """By SIGINT a user ends all hosts, by SIGTERM a scheduler this one, and it may send two."""
    here = preemption_of(Hosts(count=1))
    with here.handling():
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(second)
    assert here.received == first
    assert caught.type is (Terminated if second == SIGTERM else KeyboardInterrupt)


# What hosts say as they end.


PATIENT = ValidationConfig(every=1, patience=3)
INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({1: INT}, "host 1 received SIGINT"),
        ({0: TERM, 2: TERM}, "hosts 0 and 2 received SIGTERM"),
        (
            {4: INT, 0: INT, 2: INT, 3: TERM},
            "hosts 0, 2 and 4 received SIGINT and host 3 received SIGTERM",
        ),
        ({}, "a host that has since exited received a signal"),
    ],
)
def test_who_was_told_to_stop_is_said_with_the_signal(told: dict[int, signal.Signals], said: str):
    assert RunResult(5, TERM, stop_signals=told).stop_message == said


@pytest.mark.parametrize("leads", [True, False])
def test_every_host_says_who_stopped_the_run_and_how_to_go_on(
    leads: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = Config(run_dir=str(tmp_path))
    host: Any = SimpleNamespace(index=2, count=3, leads=leads)
    result = RunResult(52, TERM, stop_signals={1: INT})
    train._print_result(config, host, result)
    told = capsys.readouterr().out
    assert told.startswith("host 1 received SIGINT: all hosts stop after step 52. Restart ")
    assert told.count("\n") == 1
    host.count = 1
    train._print_result(config, host, RunResult(52, TERM, stop_signals={0: TERM}))
    assert capsys.readouterr().out.startswith("stopped by SIGTERM after step 52. Restart ")


@pytest.mark.parametrize(
    ("steps", "how"), [(52, "finished"), (60, "stopped early (validation.patience = 3) after")]
)
def test_a_host_that_does_not_lead_says_that_the_run_is_trained(
    steps: int, how: str, capsys: pytest.CaptureFixture[str]
):
    config = Config(run_dir="runs/a", train=TrainConfig(steps=steps), validation=PATIENT)
    host: Any = SimpleNamespace(index=2, count=3, leads=False)
    train._print_result(config, host, RunResult(52, None))
    told = capsys.readouterr().out
    assert told == f"host 2: {how} 52 steps; run directory runs/a\n"


def test_the_command_to_evaluate_a_run_can_be_copied_whatever_its_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = Config(run_dir=str(tmp_path / "my run"), train=TrainConfig(steps=52))
    host: Any = SimpleNamespace(index=0, count=1, leads=True)
    train._print_result(config, host, RunResult(52, None))
    assert f"Evaluate: skippipe evaluate --run '{config.run_dir}'\n" in capsys.readouterr().out


def test_a_host_that_had_joined_says_where_the_result_is(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(Config(run_dir="runs/far")))
    leader = "host 0 (10.0.0.1:8476)"
    trained = join.result_message(tmp_path, leader, RunResult(150, None))
    assert trained == f"finished 150 steps; the run is on {leader}, in runs/far"
    (tmp_path / "timelines").mkdir()
    result = RunResult(52, TERM, stop_signals={1: INT})
    assert join.result_message(tmp_path, leader, result) == (
        "host 1 received SIGINT: all hosts stop after step 52. The checkpoint is on "
        f"{leader}, in runs/far. After the run is resumed there, this host can join again. "
        f"Recorded by this host: {tmp_path / 'timelines'}"
    )
    assert "this host left; the run continues" in join.result_message(
        tmp_path, leader, RunResult(9, TERM, True)
    )
