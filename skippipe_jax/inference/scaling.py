"""Which scales a model's residual branches get, where it learnt to skip some of its stages.

What a stage adds was learnt where others did not run. When more of them run than in training, all
of it is too much, and when fewer run, too little. So the right scales depend on how many stages
run. They are folded into the weights where these are read, and nothing that follows knows of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from tqdm import tqdm

from skippipe_jax.config import DataConfig
from skippipe_jax.config.model import StageCut
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.branch_scales import BranchScales, folded
from skippipe_jax.storage import run_folder

SHARE, FIT = "share", "fit"
Scale = str | float
"""`SHARE`, `FIT`, or what every branch of the inner stages is multiplied by."""

# So many batches of so many tokens, or of a microbatch if that has more, teach a few numbers.
FIT_BATCHES, FIT_TOKENS = 40, 2048
FIT_RATE = 0.05


def parse_scale(given: Scale) -> Scale:
    """What a user gives as --scale, checked.

    Raises:
        InputError: if it is neither of the words nor a number above 0.
    """
    if given in (SHARE, FIT):
        return given
    try:
        number = float(given)
    except ValueError as error:
        raise InputError(
            "--scale", given, "is no scale", "Write share, fit, or a number such as 0.7"
        ) from error
    return fields.number(number, "--scale", 0.0, above=True)


def stage_scales(scale: float | Sequence[float], cut: StageCut, kept: int) -> BranchScales:
    """Scales of branches from a number for all inner stages, or from shares of microbatches.

    With the share of microbatches that visited each stage, all stages together add as much as in
    training. Where only `kept` run, the data stage among them, each adds as many times more.
    """
    if isinstance(scale, float):
        return BranchScales.of_stages([1.0, *[scale] * (len(cut) - 1)], cut)
    more = (len(cut) - 1) / max(kept - 1, 1)
    return BranchScales.of_stages([1.0, *(share * more for share in scale[1:])], cut)


class Scaling:
    """How the branches of one model are scaled, for every number of stages that may run.

    Attributes:
        model: as it is without.
    """

    def __init__(
        self, scale: Scale, model: StagedModel, data: DataConfig, shares: Sequence[float] | None
    ):
        """`shares` are those of microbatches that visited each stage, where a run has some."""
        self.model = model
        self._scale, self._data, self._shares = parse_scale(scale), data, shares
        self._found: dict[int, BranchScales] = {}

    def scales(self, kept: int | None = None) -> BranchScales:
        """The scales where `kept` stages run, the data stage among them; by default all."""
        kept = self.model.stages if kept is None else kept
        if kept not in self._found:
            self._found[kept] = self._scales(kept)
        return self._found[kept]

    def scaled(self, kept: int | None = None) -> StagedModel:
        """The model with these scales in its weights."""
        scales, cut = self.scales(kept), self.model.cut
        parameters = [
            scales.folded(own, cut, stage) for stage, own in enumerate(self.model.parameters)
        ]
        return replace(self.model, parameters=parameters)

    def _scales(self, kept: int) -> BranchScales:
        cut = self.model.cut
        if self._scale == FIT:
            first = 1.0 if self._shares is None else self._shares
            return fitted(self.model, self._data, kept, stage_scales(first, cut, kept))
        if self._scale == SHARE:
            assert self._shares is not None, "refused where the shares are read"
            return stage_scales(self._shares, cut, kept)
        return stage_scales(float(self._scale), cut, kept)


def scaling_of(
    scale: Scale,
    model: StagedModel,
    data: DataConfig,
    run: Path | None = None,
    step: int | None = None,
) -> Scaling:
    """How to scale the model in a checkpoint of a run, or one without a run.

    Raises:
        InputError: if the scale is none, or asks for shares where there are none.
    """
    parsed, shares = parse_scale(scale), None
    if run is not None and step is not None:
        shares = visited_shares(run, step, model.stages)
    if parsed == SHARE and shares is None:
        raise InputError(
            "--scale",
            SHARE,
            f"no plan of {model.stages} stages says how many microbatches visited each",
            "Write fit, or a number such as 0.7",
        )
    return Scaling(parsed, model, data, shares)


def visited_shares(run: Path, step: int, stages: int) -> tuple[float, ...] | None:
    """The share of a run's microbatches that visited each stage, by the plans that it has now.

    None where these are of another number of stages, or there are none, as after a conversion.
    """
    if not (run / run_folder.PLAN).exists():
        return None
    shares = run_folder.saved_schedule(run).visited_shares(max(step, 1)).tolist()
    return tuple(shares) if len(shares) == stages else None


def fitted(model: StagedModel, data: DataConfig, kept: int, first: BranchScales) -> BranchScales:
    """Scales with which `kept` stages, drawn anew for each batch, say training text best.

    They are learnt by Adam from `first` on; the data stage keeps its own.

    Raises:
        InputError: if there is no text.
    """
    cut = model.cut
    sequences = max(data.microbatch_size, FIT_TOKENS // data.sequence_length, 1)
    batches = TrainingBatches(replace(data, microbatch_size=sequences))
    # One pass after another goes backward through all stages, on one device.
    structures = replace(model, config=replace(model.config, recompute="block")).structures
    scales = [jnp.asarray(first.of_blocks(cut.blocks(stage))) for stage in range(1, len(cut))]
    optimizer = optax.adam(optax.cosine_decay_schedule(FIT_RATE, FIT_BATCHES))
    state, draw = optimizer.init(scales), random.Random(0)
    for number in tqdm(range(FIT_BATCHES), unit="batch", disable=None, leave=False):
        batch = batches[number]
        runs = np.zeros(len(cut) - 1, bool)
        runs[draw.sample(range(len(cut) - 1), kept - 1)] = True
        x = model.embed(batch)
        gradient = _gradient(structures, scales, list(model.parameters), runs, x, batch["targets"])
        updates, state = optimizer.update(gradient, state)
        scales = optax.apply_updates(scales, updates)
    inner = np.concatenate(jax.device_get(scales)) if scales else np.zeros((0, 2))
    attention, feed_forward = np.concatenate([np.ones((cut[0], 2)), inner]).T.tolist()
    return BranchScales(tuple(attention), tuple(feed_forward))


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    structures: tuple[Any, ...],
    scales: list[Float[Array, "blocks 2"]],
    parameters: list[Any],
    runs: Bool[Array, " inner_stages"],
    x: Float[Array, "sequence position channels"],
    targets: Int[Array, "sequence position"],
) -> list[Float[Array, "blocks 2"]]:
    """Of the mean loss where the inner stages that do not run add nothing."""

    def loss(scales: list[Float[Array, "blocks 2"]]) -> Float[Array, ""]:
        outputs = x
        for stage, (own, structure) in enumerate(zip(scales, structures[1:], strict=True)):
            weights = folded(parameters[stage + 1], own * runs[stage])
            outputs = nnx.merge(structure, weights)(outputs)
        nats, tokens = nnx.merge(structures[0], parameters[0]).loss(outputs, targets)
        return nats / tokens

    return jax.grad(loss)(scales)
