"""Scales of the residual branches of a model that was trained with skipped stages.

What a stage adds was learnt where others did not run. When more of them run than in training, all
of it is too much. So the right scales depend on how many stages run. They are folded into the
weights where these are read, and nothing that follows knows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.model import StagePartition
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.models.branch_scales import BranchScales, ScaleTable
from skippipe_jax.storage.run_dir import PLAN, RunDir

SHARE = "share"
Scale = str | float
"""`SHARE`, or what every branch of the inner stages is multiplied by."""

LARGEST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Scaling:
    """Branch scales of one model, for every number of stages that may run.

    Attributes:
        scale: what was asked for: `SHARE` or a number.
        cut: number of blocks of each stage.
        shares: share of microbatches that visited each stage, for `SHARE`.
    """

    scale: Scale
    cut: StagePartition
    shares: Sequence[float] | None = None

    def scales(self, kept: int | None = None) -> BranchScales:
        """Return the scales where `kept` stages run, the data stage among them; by default all.

        With the share of microbatches that visited it, each stage adds what it added in training on
        average. Where fewer stages run, each adds as many times more, but never more than it learnt
        to: what some models gain by that is little, and what others lose is much.

        Raises:
            InputError: if the model has not so many.
        """
        inner = len(self.cut) - 1
        kept = inner + 1 if kept is None else fields.integer(kept, "kept", 1, inner + 1)
        if kept == 1:
            inner_scales = [1.0] * inner  # None of them runs.
        elif self.shares is None:
            inner_scales = [float(self.scale)] * inner
        else:
            inner_scales = [min(share * inner / (kept - 1), 1.0) for share in self.shares[1:]]
        return BranchScales.of_stages([1.0, *inner_scales], self.cut)

    def table(self) -> ScaleTable:
        """Return the scales for each number of stages that may run."""
        every = range(sum(self.cut))
        counts = range(1, len(self.cut) + 1)
        return np.stack([self.scales(kept).of_blocks(every) for kept in counts])


def create_scaling(scale: Scale, source: ModelSource) -> Scaling:
    """Return how to scale a model, of which no stage is read.

    Raises:
        InputError: if the scale is neither `SHARE` nor a number above 0, or asks for shares where
            there are none.
    """
    if scale != SHARE:
        return Scaling(_number(scale), source.cut)
    shares = _visited_shares(source)
    if shares is None:
        problem = f"needs a plan of {source.stages} stages to count the microbatches of each"
        raise InputError("--scale", SHARE, problem, "Write a number such as 0.7")
    return Scaling(SHARE, source.cut, shares)


def _number(value: Scale) -> float:
    try:
        scale = fields.number(value, "--scale", 0.0, above=True)
        if scale > LARGEST_SCALE:
            raise InputError("--scale", scale, f"must be at most {LARGEST_SCALE:g}", "")
        return scale
    except InputError as error:
        remedy = f"Write {SHARE}, or a number above 0 such as 0.7"
        raise InputError("--scale", value, error.problem, remedy) from error


def _visited_shares(source: ModelSource) -> Sequence[float] | None:
    """Return the share of a run's microbatches that visited each stage, by its current plans.

    None where these are of another number of stages, or there are none, as after a conversion.
    """
    if source.step is None or not (source.folder / PLAN).exists():
        return None
    shares = RunDir(source.folder).schedule().visited_shares(max(source.step, 1)).tolist()
    return shares if len(shares) == source.stages else None
