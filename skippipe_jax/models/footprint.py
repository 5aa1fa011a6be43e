"""Parameters and optimizer state of a stage, and traffic of an iteration, by formula. No JAX.

docs/memory_formulas.md derives every formula.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE
from skippipe_sched.problem.averaging import SCALE_BYTES as BYTES_OF_A_SCALE
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.config import AveragingConfig, Config, DataConfig, ModelConfig
from skippipe_jax.config.optimizer import MUON
from skippipe_jax.models.block_footprint import (
    DTYPE_BYTES,
    arrays_of_block,
    block_parameters,
    tokens_of,
)

GRADIENT_BYTES = 4
"""Bytes of each number in gradients: float32."""
COUNTER_BYTES = 4
"""Bytes of each counter in the state of an optimizer: AdamW's, its schedule's, and Muon's."""
COPIES_OF_BUDDY = 2
"""Copies of a stage on its buddy host: a complete one, and the next."""
SCALE_BYTES = 2
"""Bytes of a scale in int8 activations: bfloat16."""


@dataclass(frozen=True)
class HopBytes:
    """Bytes that one microbatch sends between stages, in the transfer dtypes, with their scales."""

    activation: int
    gradient: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that all nodes send in one iteration, also within one location.

    `hop` is one activation, and `gradient_hop` its gradient. `pipeline` is the sum over the paths
    of all microbatches, and `averaging` the sum over the rings of all stages, with `averaging.mode:
    outer` the mean over a cycle.
    """

    hop: int
    gradient_hop: int
    pipeline: int
    averaging: int


def stage_parameters(model: ModelConfig, layers: int, *, is_data_stage: bool) -> int:
    """Count the parameters of a stage; a data stage also has embedding, final norm and head."""
    matrices = model.vocabulary_size * model.width * (1 if model.tied_head else 2)
    return layers * block_parameters(model) + is_data_stage * (matrices + model.width)


def activation_bytes(model: ModelConfig, data: DataConfig, dtype: str) -> int:
    """Return the bytes of an activation of one microbatch between stages, or of its gradient.

    With the dtype int8 these include the scales of groups of channels.
    """
    channels = model.width + (data.packing == "documents")
    if dtype == "int8":
        groups = -(-model.width // NUMBERS_OF_A_SCALE)
        return tokens_of(data) * (channels + SCALE_BYTES * groups)
    return tokens_of(data) * channels * DTYPE_BYTES[dtype]


def hop_bytes(config: Config) -> HopBytes:
    """Return the bytes that one microbatch sends between stages, in the transfer dtypes."""
    forward, back = transfer_dtypes(config)
    return HopBytes(
        activation_bytes(config.model, config.data, forward),
        activation_bytes(config.model, config.data, back),
    )


def sizes_of_hops(config: Config) -> dict[str, int]:
    """Return the keys of a case for `hop_bytes`, without `gradient_bytes` if it is the same."""
    hop = hop_bytes(config)
    sizes = {"activation_bytes": hop.activation}
    return sizes if hop.gradient == hop.activation else sizes | {"gradient_bytes": hop.gradient}


def transfer_dtypes(config: Config) -> tuple[str, str]:
    """Return the transfer dtypes of activations and of their gradients."""
    forward = config.network.activation_dtype or config.model.compute_dtype
    return forward, config.network.gradient_dtype or forward


def averaged_bytes(config: Config, stages: int) -> list[int]:
    """Return the bytes that replicas of each stage average: gradients in their transfer dtype.

    With `averaging.mode: outer`, outer gradients in float32, to be sent in `averaging.dtype`.

    Raises:
        InputError: if the layers cannot be divided among the stages.
    """
    of_gradients = None if config.averaging.is_outer else config.network.averaging_dtype
    width = DTYPE_BYTES[of_gradients or "float32"]
    return [
        width * stage_parameters(config.model, count, is_data_stage=stage == 0)
        for stage, count in enumerate(config.model.stage_partition(stages))
    ]


def optimizer_bytes(config: Config, numbers: int, matrices: int) -> int:
    """Count the bytes of optimizer state: two moments a number, with Muon one for `matrices`.

    `matrices` counts those numbers of a stage that are in matrices of blocks.
    """
    is_muon = config.optimizer.name == MUON
    moments = 2 * numbers - is_muon * matrices
    counters = (2 + is_muon) * COUNTER_BYTES
    return DTYPE_BYTES[config.optimizer.moment_dtype] * moments + counters


def block_matrices(model: ModelConfig, layers: int) -> int:
    """Count the numbers in the matrices of `layers` blocks."""
    return layers * (block_parameters(model) - 2 * model.width)


def buddy_checkpoint_bytes(config: Config, stages: int) -> list[int]:
    """Return the bytes of a buddy checkpoint of each stage: parameters and optimizer state.

    Raises:
        InputError: if the layers cannot be divided among the stages.
    """
    model = config.model
    width = DTYPE_BYTES[model.parameter_dtype]
    numbers = [
        (stage_parameters(model, layers, is_data_stage=stage == 0), block_matrices(model, layers))
        for stage, layers in enumerate(model.stage_partition(stages))
    ]
    return [width * count + optimizer_bytes(config, count, own) for count, own in numbers]


def message_bytes(config: Config, layers: int, fragment: int, *, is_data_stage: bool) -> int:
    """Return the bytes that a replica sends for one fragment of a stage of `layers` blocks."""
    arrays = arrays_of_fragment(config, layers, fragment, is_data_stage=is_data_stage)
    dtype = config.averaging.dtype
    if dtype == "int8":
        return sum(size + BYTES_OF_A_SCALE * -(-size // NUMBERS_OF_A_SCALE) for size in arrays)
    return DTYPE_BYTES[dtype] * sum(arrays)


def arrays_of_fragment(
    config: Config, layers: int, fragment: int, *, is_data_stage: bool
) -> list[int]:
    """Return the size of each array of a fragment; arrays of its blocks are stacked."""
    model, averaging = config.model, config.averaging
    blocks = len(averaging.blocks_of(fragment, layers))
    arrays = [blocks * size for size in arrays_of_block(model)]
    matrix = model.vocabulary_size * model.width
    if is_data_stage and fragment == 0:
        arrays.append(matrix)
    if is_data_stage and fragment == averaging.fragments - 1:
        arrays += [model.width] if model.tied_head else [model.width, matrix]
    return arrays


def traffic(config: Config, case: Case, visits: int) -> Traffic:
    """Return the traffic of an iteration whose microbatches visit `visits` stages in all.

    A microbatch sends one activation for each stage that it visits, the last one back to its data
    node, and as many gradients. This is not for microbatches that stay on their data node, which
    send nothing.
    """
    hop, layers = hop_bytes(config), config.model.stage_partition(len(case.stages))
    return Traffic(
        hop=hop.activation,
        gradient_hop=hop.gradient,
        pipeline=visits * (hop.activation + hop.gradient),
        averaging=sum(
            round(n * bytes_passed(config, layers[stage], n, is_data_stage=stage == 0))
            for stage, n in enumerate(case.stages)
        ),
    )


def bytes_passed(config: Config, layers: int, replicas: int, *, is_data_stage: bool) -> float:
    """Return the mean bytes that each replica of a stage of `layers` blocks sends per iteration."""
    if replicas < 2:
        return 0.0
    if config.averaging.is_outer:
        of_cycle = sum(
            message_bytes(config, layers, fragment, is_data_stage=is_data_stage)
            for fragment in range(config.averaging.fragments)
        )
        return (replicas - 1) * of_cycle / config.averaging.every
    width = DTYPE_BYTES[config.network.averaging_dtype or "float32"]
    size = width * stage_parameters(config.model, layers, is_data_stage=is_data_stage)
    return 2 * (replicas - 1) * size / replicas


def bytes_per_link(config: Config, plan: Plan, step: int) -> dict[tuple[int, int], int]:
    """Return the bytes sent from node to node in a step: activations, gradients, averaging.

    Each node counts as if it had its own device. The n replicas of a stage average in the planner's
    ring, where each sends 2(n-1)/n of the gradients to the next; or n - 1 messages about each
    fragment, as the mean of a cycle.
    """
    if config.averaging.is_outer and config.averaging.is_exact(step):
        config = replace(config, averaging=AveragingConfig())
    size = hop_bytes(config)
    sent: Counter[tuple[int, int]] = Counter()
    for microbatch, path in enumerate(plan.microbatches):
        for before, after in pairwise(microbatch_chain(microbatch, path)):
            if before.node != after.node:
                is_gradient = after.kind == "B"
                sent[before.node, after.node] += size.gradient if is_gradient else size.activation
    layers = config.model.stage_partition(len(plan.stages))
    for stage in range(len(plan.stages)):
        ring = best_ring(plan.case, stage, plan.stages[stage])
        passed = int(bytes_passed(config, layers[stage], len(ring), is_data_stage=stage == 0))
        for position, node in enumerate(ring):
            if passed:
                sent[ring[position - 1], node] += passed
    return dict(sent)
