"""Killed at any moment, a run goes on from a whole checkpoint, to the same bits."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from skippipe_jax import train
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import latest_step
from tests.training_runs import (
    SMALL_CASE,
    arrays_of_checkpoint,
    assert_same_bits,
    settings,
    virtual_devices,
    write_config,
)

KILLS = 20
# So many that no process comes to the end before it is killed.
STEPS = 400
PATIENCE_S = 60.0
# Processes are forked from one that has imported the program already.
FORKS = multiprocessing.get_context("forkserver")


def run_command(arguments: list[str], output: Path) -> None:
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= virtual_devices(1)
    sys.argv = ["train", *arguments]
    sys.exit(train.main())


def test_killed_at_twenty_random_moments(tmp_path: Path):
    FORKS.set_forkserver_preload(["skippipe_jax.train"])
    config = write_config(tmp_path, plan={"case": SMALL_CASE, "method": "balanced"})
    output, chance = tmp_path / "output", random.Random(0)

    def start(run: Path, every: int, *arguments: str) -> BaseProcess:
        words = settings(
            run_dir=run, train__steps=STEPS, checkpoint__every=every, checkpoint__keep=2
        )
        process = FORKS.Process(
            target=run_command, args=(["--config", str(config), *words, *arguments], output)
        )
        process.start()
        return process

    def finish(process: BaseProcess) -> None:
        process.join(PATIENCE_S)
        assert process.exitcode == 0, output.read_text()

    finish(start(tmp_path / "undisturbed", STEPS))

    run, process, saving = tmp_path / "run", None, 0
    for number in range(KILLS):
        began, saved = time.monotonic(), latest_step(run) or 0
        process = start(run, 1, *(["--resume"] if run_folder.is_run(run) else []))
        try:
            # Now and then while it starts, else when it is under way.
            if number % 5 == 4:
                time.sleep(chance.uniform(0.0, 2.0))
            else:
                while (latest_step(run) or 0) <= saved:
                    assert process.is_alive(), output.read_text()
                    assert time.monotonic() - began < PATIENCE_S, output.read_text()
                    time.sleep(0.002)
                time.sleep(chance.uniform(0.0, 0.4))
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL, output.read_text()
        assert (latest_step(run) or 0) >= saved
        saving += any(
            not (folder / "COMMITTED").exists() for folder in (run / "checkpoints").glob("*")
        )
    # A run that does little else is mostly killed while it saves.
    assert saving >= KILLS // 4, saving

    finish(start(run, STEPS, "--resume"))
    for found, expected in zip(
        arrays_of_checkpoint(run, STEPS),
        arrays_of_checkpoint(tmp_path / "undisturbed", STEPS),
        strict=True,
    ):
        assert_same_bits(found, expected)
    lines, others = (run_folder.read_metrics(each) for each in (run, tmp_path / "undisturbed"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
