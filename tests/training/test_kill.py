"""Killed at any moment, a run goes on from a whole checkpoint, to the same bits."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from skippipe_jax.storage.checkpoint import latest_step
from skippipe_jax.storage.run_dir import RunDir
from tests.harness.processes import Processes, started_processes
from tests.harness.training_runs import (
    SMALL_CASE,
    assert_same_run,
    settings,
    virtual_devices,
    write_config,
)

KILLS = 20
# So many that no process comes to the end before it is killed.
STEPS = 400
PATIENCE_S = 180.0


@pytest.mark.nightly
def test_killed_at_twenty_random_moments(tmp_path: Path):
    config = write_config(tmp_path, plan={"case": SMALL_CASE, "method": "balanced"})
    chance = random.Random(0)

    def start(processes: Processes, run: Path, every: int, *arguments: str) -> None:
        words = settings(
            run_dir=run, train__steps=STEPS, checkpoint__every=every, checkpoint__keep=2
        )
        command = ("-m", "skippipe_jax.train", "--config", config, *words, *arguments)
        processes.start(*command, **virtual_devices(1))

    def finish(run: Path, *arguments: str) -> None:
        with started_processes(tmp_path / "output") as processes:
            start(processes, run, STEPS, *arguments)
            assert processes.exit_code(0, PATIENCE_S) == 0, processes.output(0)

    finish(tmp_path / "undisturbed")

    run, saving = tmp_path / "run", 0
    for number in range(KILLS):
        saved = latest_step(run) or 0
        # The first is no fork.
        with started_processes(tmp_path / "output", really=number == 0) as processes:
            start(processes, run, 1, *(["--resume"] if RunDir(run).is_run else []))
            # Now and then while it starts, else when it is under way.
            if number % 5 == 4:
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
    assert_same_run(run, tmp_path / "undisturbed", STEPS)
