"""What a run has left in its folder: configuration, plan, metrics, and the models that it saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import Config
from skippipe_jax.data.batches import Batch, held_out_batches
from skippipe_jax.inference.scaling import Scale, Scaling, scaling_of
from skippipe_jax.inference.staged_model import StagedModel, read_run
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.kept_tokenizer import with_tokenizer_of_run
from skippipe_jax.storage.layout import saved_steps


class Run:
    """The folder of a run, which may still be training: everything is read when it is asked for."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Look at a folder.

        Raises:
            InputError: if it holds no run.
        """
        self.folder = Path(folder).absolute()
        run_folder.saved_config(self.folder, "folder")

    @property
    def config(self) -> Config:
        """The configuration in full."""
        return run_folder.saved_config(self.folder, "folder")

    @property
    def plan(self) -> Plan:
        """The run's own plan; a recipe may have others beside it."""
        return run_folder.saved_plan(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A line for each iteration so far; docs/metrics.md tells what is in them."""
        return run_folder.read_metrics(self.folder)

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are there, in order."""
        return saved_steps(self.folder)

    def model(
        self, step: int | None = None, *, scale: Scale | None = None, kept: int | None = None
    ) -> StagedModel:
        """The model in a checkpoint, by default the latest, scaled as `scaling` says.

        Raises:
            InputError: if there is no such checkpoint, or it cannot be read or scaled so.
        """
        if scale is None:
            return read_run(self.folder, step)[0]
        return self.scaling(scale, step).scaled(kept)

    def scaling(self, scale: Scale, step: int | None = None) -> Scaling:
        """How the model in a checkpoint is scaled, for every number of stages that may run.

        What residual branches of inner stages add is multiplied by a number, by the "share" of the
        run's microbatches that visited the stage, or as they "fit" training text best.

        Raises:
            InputError: if there is no such checkpoint, or it cannot be read or scaled so.
        """
        model, config, step = read_run(self.folder, step)
        return scaling_of(scale, model, config.data, self.folder, step)

    def held_out(self, sequences: int) -> Iterator[Batch]:
        """At most so many sequences of the text that is never trained on, in batches of the run."""
        data = with_tokenizer_of_run(self.config.data, self.folder)
        size = data.microbatch_size
        return held_out_batches(data, size, -(-sequences // size))
