"""Contents of a run's folder: configuration, plan, metrics, and saved models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import Config
from skippipe_jax.data.batches import Batch, held_out_batches
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.scaling import Scale, Scaling, create_scaling
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.reporting.line_chart import Chart
from skippipe_jax.reporting.page import curves
from skippipe_jax.storage.checkpoint import committed_steps
from skippipe_jax.storage.run_dir import RunDir


class Run:
    """The folder of a run, which may still be training: everything is read when it is asked for."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Look at a folder.

        Raises:
            InputError: if it holds no run.
        """
        self.folder = Path(folder).absolute()
        RunDir(self.folder).config("folder")

    def __repr__(self) -> str:
        """Tell where it is, how far, and by which checkpoints it can be read."""
        last = RunDir(self.folder).last_step()
        return f"Run({str(self.folder)!r}, step={last}, checkpoints={self.steps})"

    def _repr_svg_(self) -> str | None:
        """Draw the loss, for notebooks."""
        return self.plot().svg if RunDir(self.folder).last_step() else None

    def plot(self, figure: str = "loss") -> Chart:
        """Draw a figure over the steps: `loss`, `validation_loss` or `seconds`.

        Raises:
            InputError: if the run has no such figure yet.
        """
        charts = curves(RunDir(self.folder).metrics()) if RunDir(self.folder).last_step() else {}
        if figure not in charts:
            remedy = f"Choose one of {[*charts]}" if charts else "Wait for the first step"
            raise InputError("figure", figure, "does not exist in this run", remedy)
        return Chart(charts[figure])

    @property
    def config(self) -> Config:
        """The configuration in full."""
        return RunDir(self.folder).config("folder")

    @property
    def plan(self) -> Plan:
        """The run's own plan; a recipe may have others beside it."""
        return RunDir(self.folder).plan()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A line for each iteration so far; docs/metrics.md tells what is in them."""
        return msgspec.to_builtins(RunDir(self.folder).metrics())

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are there, in order."""
        return committed_steps(self.folder)

    @property
    def best(self) -> int | None:
        """The step of the checkpoint with the lowest validation loss; None if there is none."""
        best = RunDir(self.folder).best()
        return None if best is None else best["step"]

    def model(
        self, step: int | str | None = None, *, scale: Scale | None = None, kept: int | None = None
    ) -> StagedModel:
        """Return the model in a checkpoint, by default the latest, scaled as `scaling` says.

        Its step may be "best": that of the lowest validation loss.

        Raises:
            InputError: if there is no such checkpoint, or it cannot be read or scaled so.
        """
        if scale is None:
            return open_source(self.folder, step=step).model()
        source = open_source(self.folder, step=step)
        return source.model().scaled(create_scaling(scale, source).scales(kept))

    def scaling(self, scale: Scale, step: int | str | None = None) -> Scaling:
        """Return how the model in a checkpoint is scaled, for every number of stages that may run.

        What residual branches of inner stages add is multiplied by a number, or by the "share" of
        the run's microbatches that visited the stage.

        Raises:
            InputError: if there is no such checkpoint, or it cannot be read or scaled so.
        """
        return create_scaling(scale, open_source(self.folder, step=step))

    def held_out_batches(self, sequences: int) -> Iterator[Batch]:
        """Read at most so many sequences of the held-out text, in batches of the run."""
        run = RunDir(self.folder)
        data = run.with_tokenizer(run.located(self.config.data))
        return held_out_batches(data, data.microbatch_size, sequences)
