"""A run that was stopped or cut in two goes on bit for bit as if it had not been."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skippipe_jax.storage.checkpoint import latest_step
from tests.harness.processes import Processes, started_processes
from tests.harness.training_runs import (
    SMALL_CASE,
    assert_same_run,
    settings,
    steps_done,
    virtual_devices,
    write_config,
)

# So many that a run is still on its way when something happens to it.
STEPS = 40
PATIENCE_S = 120.0
CASE = SMALL_CASE | {
    "nodes": 5,
    "locations": ["Belgium", "Iowa", "Oregon"],
    "stages": [2, 1, 2],
    "microbatches_per_data_node": 6,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("config"),
        plan={"case": CASE, "method": "balanced"},
        model={"width": 32, "layers": 3, "heads": 2, "kv_heads": 2, "ffn_width": 48, "context": 64},
        # Between two checkpoints, and before one, there is something to lose.
        checkpoint={"every": 4, "keep": 2},
        train={"steps": STEPS},
    )


class Run:
    """A run folder, and the processes that train in it one after the other."""

    def __init__(self, config: Path, processes: Processes):
        self.config = config
        self.processes = processes
        self.folder = processes.folder / "run"

    def start(self, *arguments: str, **changes: Any) -> int:
        """Begin to train; returns the number of the process."""
        self.processes.start(
            *("-m", "skippipe_jax.train", "--config", self.config, *arguments),
            *settings(run_dir=self.folder, **changes),
            **virtual_devices(2),
        )
        return len(self.processes.processes) - 1

    def train(self, *arguments: str, **changes: Any) -> tuple[int, str]:
        """Train, and return the exit code and what was printed."""
        number = self.start(*arguments, **changes)
        return self.processes.exit_code(number, PATIENCE_S), self.processes.output(number)


@pytest.fixture
def run(config: Path, tmp_path: Path) -> Iterator[Run]:
    with started_processes(tmp_path) as processes:
        yield Run(config, processes)


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that trained to its end without interruption."""
    with started_processes(tmp_path_factory.mktemp("finished")) as processes:
        run = Run(config, processes)
        code, output = run.train()
        assert code == 0, output
        yield run


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_a_run_that_was_told_to_stop_goes_on(run: Run, finished: Run, number: signal.Signals):
    run.processes.really = True
    run.start()
    run.processes.wait_until(lambda: steps_done(run.folder) >= 9, PATIENCE_S)
    run.processes.processes[0].send_signal(number)
    code, output = run.processes.exit_code(0, PATIENCE_S), run.processes.output(0)

    assert code == 128 + number, output
    step = latest_step(run.folder)
    assert step == steps_done(run.folder)
    assert f"stopped by {number.name} after step {step}. " in output
    assert f"--resume; last checkpoint: step {step} in {run.folder}." in output
    assert "Traceback" not in output
    run.processes.really = False
    assert run.train("--resume")[0] == 0
    assert_same_run(run.folder, finished.folder, STEPS)


def test_a_run_in_two_parts_is_one_run(run: Run, finished: Run):
    assert run.train(train__steps=STEPS // 2)[0] == 0
    assert latest_step(run.folder) == STEPS // 2
    assert run.train("--resume", train__steps=STEPS)[0] == 0
    assert_same_run(run.folder, finished.folder, STEPS)
