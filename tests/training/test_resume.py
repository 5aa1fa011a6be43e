"""A run that was stopped by a signal goes on bit for bit as if it had not been."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from skippipe_jax.config import load_config
from skippipe_jax.storage.checkpoint import latest_step
from skippipe_jax.storage.run_dir import RunDir
from tests.harness.processes import Processes, started_processes
from tests.harness.training_runs import (
    SMALL_CASE,
    assert_same_run,
    settings,
    steps_done,
    train_alone,
    virtual_devices,
    write_config,
)

PATIENCE_S = 180.0
PLAN = {"case": SMALL_CASE, "method": "balanced"}


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_a_run_that_was_told_to_stop_goes_on(number: signal.Signals, tmp_path: Path):
    # Between two checkpoints, and before one, there is something to lose.
    path = write_config(tmp_path, plan=PLAN, checkpoint={"every": 4, "keep": 2})
    run, whole = tmp_path / "run", tmp_path / "whole"

    def train(folder: Path, steps: int, *, resume: bool = False) -> None:
        changes = settings(run_dir=folder, train__steps=steps)
        train_alone(load_config(path, changes[1::2]), resume=resume)

    with started_processes(tmp_path, really=True) as processes:
        endless = settings(run_dir=run, train__steps=100_000)
        processes.start("-m", "skippipe_jax.train", "--config", path, *endless)
        processes.wait_until(lambda: steps_done(run) >= 5, PATIENCE_S)
        processes.processes[0].send_signal(number)
        code, output = processes.exit_code(0, PATIENCE_S), processes.output(0)
    assert code == 128 + number, output
    step = steps_done(run)
    assert latest_step(run) == step
    assert f"stopped by {number.name} after step {step}. " in output
    assert f"--resume; last checkpoint: step {step} in {run}." in output
    assert "Traceback" not in output
    train(run, step + 4, resume=True)
    train(whole, step + 4)
    assert_same_run(run, whole, step + 4)


# Killed at any moment, a run goes on from a whole checkpoint, to the same bits.


KILLS = 8
# So many that no process comes to the end before it is killed.
KILLED_STEPS = 160


@pytest.mark.nightly
def test_killed_at_random_moments(tmp_path: Path):
    config = write_config(tmp_path, plan=PLAN)
    chance = random.Random(0)

    def start(processes: Processes, run: Path, every: int, *arguments: str) -> None:
        words = settings(
            run_dir=run, train__steps=KILLED_STEPS, checkpoint__every=every, checkpoint__keep=2
        )
        command = ("-m", "skippipe_jax.train", "--config", config, *words, *arguments)
        processes.start(*command, **virtual_devices(1))

    def finish(run: Path, *arguments: str) -> None:
        with started_processes(tmp_path / "output") as processes:
            start(processes, run, KILLED_STEPS, *arguments)
            assert processes.exit_code(0, PATIENCE_S) == 0, processes.output(0)

    finish(tmp_path / "undisturbed")

    run, saving = tmp_path / "run", 0
    for number in range(KILLS):
        saved = latest_step(run) or 0
        # The first is no fork.
        with started_processes(tmp_path / "output", really=number == 0) as processes:
            start(processes, run, 1, *(["--resume"] if RunDir(run).is_run else []))
            # Now and then while it starts, else when it is under way.
            if number % 4 == 3:
                time.sleep(chance.uniform(0.0, 2.0))
            else:
                processes.wait_until(lambda last=saved: (latest_step(run) or 0) > last, PATIENCE_S)
                time.sleep(chance.uniform(0.0, 0.4))
            processes.processes[0].kill()
            assert processes.exit_code(0, PATIENCE_S) == -signal.SIGKILL, processes.output(0)
        assert (latest_step(run) or 0) >= saved
        saving += any(
            not (folder / "COMMITTED").exists() for folder in (run / "checkpoints").glob("*")
        )
    # A run that does little else is mostly killed while it saves.
    assert saving >= KILLS // 4, saving

    finish(run, "--resume")
    assert_same_run(run, tmp_path / "undisturbed", KILLED_STEPS)
