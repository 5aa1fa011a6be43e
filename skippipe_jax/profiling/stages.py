"""Measurement of the seconds that a node takes for the operations of a stage."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from skippipe_jax.config import Config
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.stage_functions import (
    TOKENS,
    TOTALS,
    activation,
    functions_of_stage,
    wire_of_run,
)

FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"
LEAST_REPETITIONS = 3

Shape = tuple[bool, int]
"""Flag of the data stage, and number of layers; stages of equal shape share timings."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a repeated operation."""

    median_s: float
    least_s: float
    most_s: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarize the seconds of all repetitions."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


StageTimings = Mapping[str, Timing]
"""Timings by operation; a stage without a loss has no `LOSS`."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds of a forward of an average stage on each node, and other costs relative to it.

    Fields are those of a case. `largest_error` is the largest relative difference of these costs to
    the measured sum of forward and backward of a stage on a node.
    """

    forward_s: list[float]
    stage_cost: list[float]
    backward_ratio: float
    loss_ratio: float
    largest_error: float


def shapes_of_stages(config: Config, stages: int) -> list[Shape]:
    """Return the shape of each stage of a model with `stages` stages."""
    layers = config.model.stage_partition(stages)
    return [(stage == 0, count) for stage, count in enumerate(layers)]


def measure_stage(
    config: Config, shape: Shape, here: NodeSharding, budget_s: float
) -> dict[str, Timing]:
    """Time forward, loss (of a data stage), backward and update on one node.

    Microbatches are repeated for `budget_s` seconds. The first call for a shape and a device
    compiles, so its timings are meaningless.
    """
    device = here.devices[0]
    inputs, targets = _inputs(config, shape, device)
    inputs = jax.device_put(inputs, here.whole if shape[0] else here.of_hop(inputs.shape))
    targets = jax.device_put(targets, here.whole)
    wire, functions = wire_of_run(config), functions_of_stage(config, *shape).on(here.mesh)
    draw = jnp.zeros(4, jnp.uint32) if wire.gradients.is_drawn else None
    rounded_by = np.zeros(2, np.uint32)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(operation: str, function: Callable, *arguments: Any, **how: bool) -> Any:
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        results = jax.block_until_ready(function(*arguments, **how))
        seconds[operation].append(time.perf_counter() - start)
        return results

    with jax.default_device(device):
        parameters, state, gradients = functions.create(jax.random.key(0), 0)
        gauge, totals = jnp.zeros(2, jnp.int32), jnp.zeros(TOTALS)
        end = time.perf_counter() + budget_s
        while len(seconds[UPDATE]) < LEAST_REPETITIONS or time.perf_counter() < end:
            outputs, saved, gauge = timed(
                FORWARD, functions.forward, parameters, gauge, inputs, leaves=True
            )
            if targets is not None:
                given = parameters, gradients, totals, gauge, outputs, targets, draw
                gradient, gradients, totals, gauge = timed(
                    LOSS, functions.loss, *given, leaves=True
                )
            else:
                # The gradient of the outputs is the outputs themselves.
                gradient = wire.gradients.pack(wire.activations.unpack(outputs), draw)
                gradient = jax.device_put(gradient, here.of_hop(gradient.shape))
            given = parameters, gradients, gauge, saved, gradient, draw
            _, gradients, gauge = timed(BACKWARD, functions.backward, *given, leaves=True)
            summed = functions.squared_norm(gradients).at[TOKENS].set(inputs.shape[0])
            parameters, state, gradients = timed(
                UPDATE, functions.update, parameters, state, gradients, summed, rounded_by
            )
    return {operation: Timing.of(values) for operation, values in seconds.items()}


def fit_costs(timings: Sequence[Sequence[StageTimings]]) -> StageCosts:
    """Fit the costs of a case to the measured `timings[node][stage]`.

    In a case the time of an operation is the product of a cost of the node and a cost of the stage.
    These are fitted to the logarithms of the sums of forward and backward by least squares.
    """
    forward = _matrix(timings, FORWARD)
    backward = _matrix(timings, BACKWARD)
    loss = np.array([of_node[0][LOSS].median_s for of_node in timings])
    logarithm = np.log(forward + backward)
    stage_cost = np.exp(logarithm.mean(axis=0) - logarithm.mean())
    of_node = np.exp(logarithm.mean(axis=1)) * stage_cost.mean()
    stage_cost /= stage_cost.mean()
    backward_ratio = float(backward.sum() / forward.sum())
    forward_s = of_node / (1.0 + backward_ratio)
    error = np.outer(of_node, stage_cost) / (forward + backward)
    return StageCosts(
        forward_s=forward_s.tolist(),
        stage_cost=stage_cost.tolist(),
        backward_ratio=backward_ratio,
        loss_ratio=float(np.exp(np.log(loss / (forward_s * stage_cost[0])).mean())),
        largest_error=float(np.abs(error - 1.0).max()),
    )


def _matrix(
    timings: Sequence[Sequence[StageTimings]], operation: str
) -> Float[np.ndarray, "nodes stages"]:
    return np.array([[of[operation].median_s for of in of_node] for of_node in timings])


def _inputs(config: Config, shape: Shape, device: jax.Device) -> tuple[jax.Array, jax.Array | None]:
    """Make a random microbatch for a stage, encoded as in a hop; with targets for a data stage."""
    key, wanted = jax.random.key(0), activation(config.model, config.data)
    with jax.default_device(device):
        if shape[0]:
            tokens = jax.random.randint(key, wanted.shape[:2], 0, config.model.vocabulary_size)
            if config.data.packing == "documents":
                return jnp.stack([tokens, jnp.zeros_like(tokens)], axis=-1), tokens
            return tokens, tokens
        random = jax.random.normal(key, wanted.shape, wanted.dtype)
        return wire_of_run(config).activations.pack(random), None
