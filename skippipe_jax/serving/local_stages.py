"""Stages that a host holds for a service, with key-value caches for each group of sequences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Float

from skippipe_jax.config import ModelConfig
from skippipe_jax.inference.decoding import StageExecutor, Step
from skippipe_jax.inference.partial import StageOrder
from skippipe_jax.inference.stage_set import StageSet
from skippipe_jax.models.branch_scales import ScaleTable
from skippipe_jax.runtime.wire_format import WireFormat


@dataclass(frozen=True)
class Slots:
    """Number of sequences that a service decodes, and the dtype of their transfers.

    Attributes:
        groups: number of groups; the sequences of a group run through the stages together.
        each: sequences of a group.
        length: tokens of a sequence, its prompt included.
        hop_dtype: dtype of activations in transfers between hosts; None: the compute dtype.
    """

    groups: int
    each: int
    length: int
    hop_dtype: str | None = None

    def cache_bytes(self, model: ModelConfig, layers: int) -> int:
        """Return the bytes of the caches of `layers` blocks."""
        of_token = 2 * layers * model.kv_heads * model.head_width
        itemsize = jnp.dtype(model.compute_dtype).itemsize
        return of_token * itemsize * self.groups * self.each * self.length


# Compiled once for all codecs of a process: a format is equal to another with the same values.
_pack = jax.jit(WireFormat.pack, static_argnums=0)
_unpack = jax.jit(WireFormat.unpack, static_argnums=0)


class ActivationCodec:
    """Packing of activations for transfers between the hosts of a service."""

    def __init__(self, model: ModelConfig, dtype: str | None):
        """Transfer activations in a dtype; None is the compute dtype."""
        dtype = dtype or model.compute_dtype
        # One format serves activations of all shapes: they are packed token by token.
        of_token = jax.ShapeDtypeStruct((1, 1, model.width), model.compute_dtype)
        self._format = WireFormat(of_token, dtype, model.width)

    def packed(self, x: Float[Array, "row time width"]) -> np.ndarray:
        """Return the packed activation for the transfer."""
        return np.asarray(_pack(self._format, x))

    def unpacked(self, travelled: np.ndarray, place: Sharding) -> Float[Array, "row time width"]:
        """Return a received activation on a device."""
        return _unpack(self._format, jax.device_put(travelled, place))


class LocalStages:
    """Stages of one host; stages may be added while others run.

    Attributes:
        scales: scales of branches, as for `StageExecutor`; set before the first stage is added.
    """

    def __init__(self, config: ModelConfig, stages: int, slots: Slots):
        """Start without any of the model's `stages` stages."""
        self.scales: ScaleTable | None = None
        self._config, self._stages, self._slots = config, stages, slots
        self._codec = ActivationCodec(config, slots.hop_dtype)
        self._executors: dict[tuple[int, int], StageExecutor] = {}

    def hold(self, stage: int, parameters: Any) -> None:
        """Add a stage and compile all of its programs."""
        own = [parameters if other == stage else None for other in range(self._stages)]
        model, slots = StageSet(self._config, own), self._slots
        executors = [
            StageExecutor(model, (stage,), slots.each, slots.length, scales=self.scales)
            for _ in range(slots.groups)
        ]
        place = jax.tree.leaves(parameters)[0].sharding
        for step in executors[0].warm_up_steps():
            rows = len(step.positions)
            x = jnp.zeros((*step.positions.shape, self._config.width), self._config.compute_dtype)
            travelled = self._codec.packed(jax.device_put(x, place))
            some = [[stage], *[[]] * (rows - 1)]
            for skipped in ([[]] * rows, some if rows > 1 else [[]]):
                arguments = self._codec.unpacked(travelled, place), step, skipped
                self._codec.packed(executors[0].follow((stage,), *arguments))
        self._executors |= {(stage, group): own for group, own in enumerate(executors)}

    def drop(self, stage: int) -> None:
        """Release a stage and its caches."""
        for group in range(self._slots.groups):
            self._executors.pop((stage, group), None)

    def run(
        self,
        group: int,
        stages: StageOrder,
        travelled: np.ndarray,
        step: Step,
        skipped: Sequence[Collection[int]],
    ) -> np.ndarray:
        """Run stages on a received activation; return the packed output.

        Each row of the step skips the stages in its entry of `skipped`.
        """
        parameters = self._executors[stages[0], group].model.parameters[stages[0]]
        x = self._codec.unpacked(travelled, jax.tree.leaves(parameters)[0].sharding)
        for stage in stages:
            x = self._executors[stage, group].follow((stage,), x, step, skipped)
        return self._codec.packed(x)
