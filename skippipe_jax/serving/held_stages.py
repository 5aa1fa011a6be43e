"""The stages that a host holds for a service, with caches for the sequences of each group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from skippipe_jax.config import ModelConfig
from skippipe_jax.inference.decoding import StageExecutor, Step
from skippipe_jax.inference.partial import Order
from skippipe_jax.inference.staged_model import StagedModel


@dataclass(frozen=True)
class Slots:
    """How many sequences a service decodes.

    Attributes:
        groups: those of a group run through the stages together, groups one behind the other.
        each: sequences of a group.
        length: tokens of a sequence, its prompt included.
    """

    groups: int
    each: int
    length: int

    def cache_bytes(self, model: ModelConfig, layers: int) -> int:
        """Return the bytes of the caches of so many blocks."""
        of_token = 2 * layers * model.kv_heads * model.head_width
        itemsize = jnp.dtype(model.compute_dtype).itemsize
        return of_token * itemsize * self.groups * self.each * self.length


class HeldStages:
    """The stages of one host; stages may be added while others run."""

    def __init__(self, config: ModelConfig, stages: int, slots: Slots):
        """Hold none yet of so many stages."""
        self._config, self._stages, self._slots = config, stages, slots
        self._executors: dict[tuple[int, int], StageExecutor] = {}

    def hold(self, stage: int, parameters: Any) -> None:
        """Take in a stage, and compile all that sequences may need of it."""
        own = [parameters if other == stage else None for other in range(self._stages)]
        model, slots = StagedModel(self._config, own), self._slots
        made = [
            StageExecutor(model, (stage,), slots.each, slots.length) for _ in range(slots.groups)
        ]
        for step in made[0].steps_of_all_sizes():
            rows = len(step.positions)
            x = np.zeros((*step.positions.shape, self._config.width), self._config.compute_dtype)
            some = [[stage], *[[]] * (rows - 1)]
            for skipped in ([[]] * rows, some if rows > 1 else [[]]):
                _run(made[0], (stage,), x, step, skipped)
        self._executors |= {(stage, group): own for group, own in enumerate(made)}

    def run(
        self,
        group: int,
        stages: Order,
        x: Float[np.ndarray, "row time width"],
        step: Step,
        skipped: Sequence[Collection[int]],
    ) -> Float[np.ndarray, "row time width"]:
        """Return the residual stream after these stages; each row has some that it skips."""
        after: Any = x
        for stage in stages:
            after = _run(self._executors[stage, group], (stage,), after, step, skipped)
        return np.asarray(after)


def _run(
    executor: StageExecutor,
    stages: Order,
    x: Any,
    step: Step,
    skipped: Sequence[Collection[int]],
) -> jax.Array:
    """Run stages on what comes from elsewhere, or from a stage before: both compile alike."""
    place = jax.tree.leaves(executor.model.parameters[stages[0]])[0].sharding
    return executor.follow(stages, jax.device_put(x, place), step, skipped)
