"""A run that was stopped by a signal goes on bit for bit as if it had not been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from skippipe_jax.config import Config, load_config
from skippipe_jax.storage.checkpoint import latest_step
from tests.harness.processes import started_processes
from tests.harness.training_runs import (
    SMALL_CASE,
    assert_same_run,
    settings,
    steps_done,
    train_alone,
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


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_a_run_that_was_told_to_stop_goes_on(number: signal.Signals, tmp_path: Path):
    path = write_config(
        tmp_path,
        plan={"case": CASE, "method": "balanced"},
        model={"width": 32, "layers": 3, "heads": 2, "kv_heads": 2, "ffn_width": 48, "context": 64},
        # Between two checkpoints, and before one, there is something to lose.
        checkpoint={"every": 4, "keep": 2},
        train={"steps": STEPS},
    )

    def load(folder: Path) -> Config:
        return load_config(path, settings(run_dir=folder)[1::2])

    run, whole = tmp_path / "run", tmp_path / "whole"
    with started_processes(tmp_path, really=True) as processes:
        processes.start("-m", "skippipe_jax.train", "--config", path, *settings(run_dir=run))
        processes.wait_until(lambda: steps_done(run) >= 9, PATIENCE_S)
        processes.processes[0].send_signal(number)
        code, output = processes.exit_code(0, PATIENCE_S), processes.output(0)
    assert code == 128 + number, output
    step = latest_step(run)
    assert step == steps_done(run)
    assert f"stopped by {number.name} after step {step}. " in output
    assert f"--resume; last checkpoint: step {step} in {run}." in output
    assert "Traceback" not in output
    train_alone(load(run), resume=True)
    train_alone(load(whole))
    assert_same_run(run, whole, STEPS)
