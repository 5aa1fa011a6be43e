"""Scales of the residual branches of a model that was trained with skipped stages.

What a stage adds was learnt where others did not run. When more of them run than in training, all
of it is too much. So the right scales depend on how many stages run. They are folded into the
weights where these are read, and nothing that follows knows of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from tqdm import tqdm

from skippipe_jax.config import DataConfig
from skippipe_jax.config.model import StagePartition
from skippipe_jax.data.batches import Batch, TrainingBatches
from skippipe_jax.inference.model_source import ModelSource, open_source
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.branch_scales import BranchScales, ScaleTable, folded
from skippipe_jax.models.llama import StageStructure
from skippipe_jax.storage.restore import latest_intact
from skippipe_jax.storage.run_dir import PLAN, RunDir

SHARE, FIT = "share", "fit"
Scale = str | float
"""`SHARE`, `FIT`, or what every branch of the inner stages is multiplied by."""

LARGEST_SCALE = float(np.finfo(np.float32).max)

# So many batches of so many tokens, or of a microbatch if that has more, teach a few numbers.
FIT_BATCHES, FIT_TOKENS = 40, 1024
FIT_RATE = 0.05


def parse_scale(value: Scale) -> Scale:
    """Return what a user gives as --scale, checked.

    Raises:
        InputError: if it is neither of the words nor a number above 0.
    """
    if value in (SHARE, FIT):
        return value
    try:
        scale = fields.number(value, "--scale", 0.0, above=True)
        if scale > LARGEST_SCALE:
            raise InputError("--scale", scale, f"must be at most {LARGEST_SCALE:g}", "")
        return scale
    except InputError as error:
        remedy = f"Write {SHARE}, {FIT}, or a number above 0 such as 0.7"
        raise InputError("--scale", value, error.problem, remedy) from error


class Scaling:
    """Branch scales of one model, for every number of stages that may run.

    Attributes:
        scale: what was asked for.
        model: as it is without.
    """

    def __init__(
        self, scale: Scale, model: StagedModel, data: DataConfig, shares: Sequence[float] | None
    ):
        """`shares` are those of microbatches that visited each stage, where a run has some."""
        self.scale, self.model = scale, model
        self._data, self._shares = data, shares
        self._scales_by_count: dict[int, BranchScales] = {}

    def scales(self, kept: int | None = None) -> BranchScales:
        """Return the scales where `kept` stages run, the data stage among them; by default all.

        Raises:
            InputError: if the model has not so many, or what should fit them is no text or finds
                no finite ones.
        """
        stages = self.model.stages
        kept = stages if kept is None else fields.integer(kept, "kept", 1, stages)
        if kept not in self._scales_by_count:
            self._scales_by_count[kept] = self._scales(kept)
        return self._scales_by_count[kept]

    def table(self) -> ScaleTable:
        """Return the scales for each number of stages that may run.

        Raises:
            InputError: as `scales` does.
        """
        every = range(self.model.config.layers)
        counts = range(1, self.model.stages + 1)
        return np.stack([self.scales(kept).of_blocks(every) for kept in counts])

    def scaled(self, kept: int | None = None) -> StagedModel:
        """Return the model with these scales in its weights."""
        return self.model.scaled(self.scales(kept))

    def _scales(self, kept: int) -> BranchScales:
        cut = self.model.cut
        if self.scale == FIT:
            return fitted(self.model, training_text(self._data), kept)
        return _unfitted(self.scale, self._shares, cut, kept)


def create_scaling(
    scale: Scale,
    model: StagedModel,
    data: DataConfig,
    run: Path | None = None,
    step: int | None = None,
) -> Scaling:
    """Return how to scale the model in a checkpoint of a run, or one without a run.

    `data` says which text scales are fitted on.

    Raises:
        InputError: if the scale is none, or asks for shares where there are none.
    """
    scale = parse_scale(scale)
    return Scaling(scale, model, data, _shares_for(scale, model.stages, run, step))


def scale_table(scale: Scale, source: ModelSource, run: Path | None) -> ScaleTable:
    """Return the scales of a model for each number of stages that may run.

    The model itself is read only where they are fitted.

    Raises:
        InputError: as `create_scaling` and `Scaling.scales` do.
    """
    model = source.model(None if parse_scale(scale) == FIT else ())
    return create_scaling(scale, model, source.config.data, run, source.step).table()


def scales_of_run(
    scale: Scale, run: Path, step: int | None = None
) -> tuple[BranchScales, StagePartition, int]:
    """Return the scales where all stages of a checkpoint run, its cut and its step.

    The model itself is read only where they are fitted.

    Raises:
        InputError: as `open_source`, `create_scaling` and `Scaling.scales` do.
    """
    scale = parse_scale(scale)
    if scale == FIT:
        source = open_source(run, step=step)
        model, data = source.model(), source.config.data
        return create_scaling(scale, model, data, run, source.step).scales(), model.cut, source.step
    checkpoint = latest_intact(run, step)
    cut = StagePartition(checkpoint.record.stage_layers)
    shares = _shares_for(scale, len(cut), run, checkpoint.step)
    return _unfitted(scale, shares, cut, len(cut)), cut, checkpoint.step


def visited_shares(run: Path, step: int, stages: int) -> tuple[float, ...] | None:
    """Return the share of a run's microbatches that visited each stage, by its current plans.

    None where these are of another number of stages, or there are none, as after a conversion.
    """
    if not (run / PLAN).exists():
        return None
    shares = RunDir(run).schedule().visited_shares(max(step, 1)).tolist()
    return tuple(shares) if len(shares) == stages else None


def _shares_for(
    scale: Scale, stages: int, run: Path | None, step: int | None
) -> tuple[float, ...] | None:
    """Return the shares that a scale is made from, if it is made from some."""
    if scale != SHARE:
        return None
    shares = None if run is None or step is None else visited_shares(run, step, stages)
    if shares is None:
        raise InputError(
            "--scale",
            SHARE,
            f"needs a plan of {stages} stages to count the microbatches of each",
            f"Write {FIT}, or a number such as 0.7",
        )
    return shares


def _unfitted(
    scale: Scale, shares: Sequence[float] | None, cut: StagePartition, kept: int
) -> BranchScales:
    """Return the scales of a number, or of shares where `kept` stages run, the data stage included.

    With the share of microbatches that visited it, each stage adds what it added in training on
    average. Where fewer stages run, each adds as many times more, but never more than it learnt to:
    what some models gain by that is little, and what others lose is much.
    """
    inner = len(cut) - 1
    if kept == 1:
        inner_scales = [1.0] * inner  # None of them runs.
    elif shares is None:
        inner_scales = [float(scale)] * inner
    else:
        inner_scales = [min(share * inner / (kept - 1), 1.0) for share in shares[1:]]
    return BranchScales.of_stages([1.0, *inner_scales], cut)


def fitted(model: StagedModel, text: Iterable[Batch], kept: int) -> BranchScales:
    """Fit scales on `FIT_BATCHES` batches, each run by `kept` stages that are drawn for it.

    They are learnt by Adam from 1 on; the data stage, which always runs, is left as it is.

    Raises:
        InputError: if no scales are found that are finite.
    """
    cut = model.cut
    if kept == 1:
        return BranchScales.of_stages([1.0] * len(cut), cut)  # No other stage runs.
    # One device has all stages, and keeps what it needs of one block at a time.
    structures = replace(model, config=replace(model.config, recompute="block")).structures
    scales = [jnp.ones((count, 2)) for count in cut[1:]]
    optimizer = optax.adam(optax.cosine_decay_schedule(FIT_RATE, FIT_BATCHES))
    state, draw = optimizer.init(scales), random.Random(0)
    for batch in tqdm(text, total=FIT_BATCHES, unit="batch", disable=None, leave=False):
        runs = np.zeros(len(cut) - 1, bool)
        runs[draw.sample(range(len(cut) - 1), kept - 1)] = True
        x = model.embed(batch)
        gradient = _gradient(structures, scales, list(model.parameters), runs, x, batch["targets"])
        updates, state = optimizer.update(gradient, state)
        scales = optax.apply_updates(scales, updates)
    inner_scales = np.concatenate(jax.device_get(scales))
    if not np.isfinite(inner_scales).all():
        raise InputError(
            "--scale",
            FIT,
            "finds no finite scales: training had diverged",
            "Choose an earlier step, or train again with a lower optimizer.learning_rate",
        )
    attention, feed_forward = np.concatenate([np.ones((cut[0], 2)), inner_scales]).T.tolist()
    return BranchScales(tuple(attention), tuple(feed_forward))


def training_text(data: DataConfig) -> Iterator[Batch]:
    """Return what `fitted` learns from: the first microbatches of a run, several in a batch.

    Raises:
        InputError: if there is no text.
    """
    microbatches = TrainingBatches(data)
    count = max(1, FIT_TOKENS // (data.microbatch_size * data.sequence_length))
    for number in range(0, FIT_BATCHES * count, count):
        parts = [microbatches[number + place] for place in range(count)]
        yield jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    structures: tuple[StageStructure, ...],
    scales: list[Float[Array, "_ 2"]],
    parameters: list[Any],
    runs: Bool[Array, " inner_stages"],
    x: Float[Array, "sequence position channels"],
    targets: Int[Array, "sequence position"],
) -> list[Float[Array, "_ 2"]]:
    """Return the gradient of the mean loss along the inner stages that run, in order."""

    def loss(scales: list[Float[Array, "_ 2"]]) -> Float[Array, ""]:
        outputs = x
        inner = zip(runs, structures[1:], parameters[1:], scales, strict=True)
        for is_run, structure, own, of_stage in inner:
            stage = structure.merge(folded(own, of_stage))
            outputs = jax.lax.cond(is_run, stage, lambda outputs: outputs, outputs)
        nats, tokens = structures[0].merge(parameters[0]).loss(outputs, targets)
        return nats / tokens

    return jax.grad(loss)(scales)
