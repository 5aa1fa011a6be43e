"""What hosts say as they end."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.cli import join, train
from skippipe_jax.config import Config, to_yaml
from skippipe_jax.config.run import TrainConfig, ValidationConfig
from skippipe_jax.training.trainer import RunResult

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
