"""Memory of a node and traffic of an iteration, by formula: bytes, before anything runs.

docs/memory_formulas.md derives every formula. Bytes that are held are exact. Temporaries of an
operation are those that it makes before XLA fuses any.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE
from skippipe_sched.problem.averaging import SCALE_BYTES as BYTES_OF_A_SCALE
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.config import AveragingConfig, Config, DataConfig, ModelConfig
from skippipe_jax.config.optimizer import MUON
from skippipe_jax.models.block_footprint import (
    DTYPE_BYTES,
    TOKEN_BYTES,
    arrays_of_block,
    block_parameters,
    blocks_at_once,
    bytes_of_places,
    bytes_saved_by_blocks,
    offloadable_bytes,
    passing_bytes,
    saved_by_block,
    tokens_of,
)
from skippipe_jax.models.head_chunks import LOGIT_BYTES, tokens_of_chunk

GRADIENT_BYTES = 4
"""Bytes of each number in gradients: float32."""
COUNTER_BYTES = 4
"""Bytes of each counter in the state of an optimizer: AdamW's, its schedule's, and Muon's."""
UPDATE_ARRAYS = 3.5
"""Float32 arrays that Muon makes of the numbers that it updates; XLA made 3.3 on a processor."""
OUTER_ARRAYS = 3
"""Float32 arrays with as many numbers as there are parameters: anchor, momentum and residual;
when a fragment is applied, its parameters, anchor and momentum."""
OFFLOADS = "offload_dot_with_no_batch_dims"
"""Value of `model.recompute` that keeps products in the host's memory."""
COPIES_OF_BUDDY = 2
"""Copies of a stage on its buddy host: a complete one, and the next."""
SCALE_BYTES = 2
"""Bytes of a scale in int8 activations: bfloat16."""


@dataclass(frozen=True)
class NodeMemory:
    """Bytes on each device of a node that serves one stage.

    With `averaging.mode: outer`, `outer` is the anchor, momentum and residual of a stage with
    replicas, and `changes` the node's bytes for fragments in transit. `kept` is what one microbatch
    in flight keeps for its backward pass, and `in_flight` is the most microbatches in flight.
    `waiting` is activations and gradients in transit, all of which may have arrived at one node.
    `working` is the temporaries of an operation. `gathered` is weights gathered from the devices of
    a mesh for an iteration. `host` is what is offloaded to the memory of the node's host; it is not
    on the device.
    """

    parameters: int
    gradients: int
    optimizer: int
    outer: int
    kept: int
    in_flight: int
    waiting: int
    changes: int
    working: int
    host: int
    gathered: int = 0

    @property
    def state(self) -> int:
        """Bytes that are always on the device."""
        return self.parameters + self.gradients + self.optimizer + self.outer

    @property
    def total(self) -> int:
        """Most bytes on the device at any moment."""
        passing = self.waiting + self.changes + self.working
        return self.state + self.gathered + self.in_flight * self.kept + passing


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


def head_bytes(model: ModelConfig) -> int:
    """Return the bytes of a head that is not the embedding, in the parameter dtype."""
    numbers = model.vocabulary_size * model.width * (not model.tied_head)
    return DTYPE_BYTES[model.parameter_dtype] * numbers


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


def bytes_of_update(config: Config, matrices: int) -> int:
    """Count the bytes that an update by Muon makes; AdamW makes less than a backward pass.

    These are the scaled gradient, the look-ahead momentum, the orthogonal update, and products.
    """
    return int(UPDATE_ARRAYS * GRADIENT_BYTES * matrices) if config.optimizer.name == MUON else 0


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


def memory_of_node(
    config: Config,
    layers: int,
    *,
    is_data_stage: bool,
    replicas: int,
    in_flight: int,
    under_way: int,
) -> NodeMemory:
    """Return the memory of a node of one device that serves a stage of `layers` blocks.

    The stage has `replicas` replicas. Up to `in_flight` microbatches are in flight on the node.
    Data nodes have begun and not completed up to `under_way` microbatches, each of which has at
    most one activation or gradient in transit.
    """
    model, data = config.model, config.data
    count = stage_parameters(model, layers, is_data_stage=is_data_stage)
    parameters = count * DTYPE_BYTES[model.parameter_dtype]
    targets = TOKEN_BYTES * tokens_of(data) if is_data_stage else 0
    # Either a backward pass or a loss runs: both make a gradient of every parameter before it is
    # accumulated, a backward pass none of the head. Or, after all microbatches, the ring of
    # gradients runs, or a fragment is applied.
    blocks = bytes_saved_by_blocks(model, data, blocks_at_once(model, layers))
    blocks += passing_bytes(model, data) - is_data_stage * head_bytes(model)
    operation = unpacked_bytes(config) + max(
        blocks, bytes_of_loss(model, data) if is_data_stage else 0
    )
    averages = replicas > 1
    is_outer = config.averaging.is_outer and averages
    hop = hop_bytes(config)
    optimizer = optimizer_bytes(config, count, block_matrices(model, layers))
    state_waits = config.optimizer.state_memory == "host"
    offloaded = layers * offloadable_bytes(model, data) if model.recompute == OFFLOADS else 0
    return NodeMemory(
        parameters=parameters,
        gradients=GRADIENT_BYTES * count,
        optimizer=0 if state_waits else optimizer,
        outer=is_outer * OUTER_ARRAYS * GRADIENT_BYTES * count,
        kept=kept_bytes(config, layers, is_data_stage=is_data_stage) + targets,
        in_flight=in_flight,
        waiting=under_way * max(hop.activation, hop.gradient),
        changes=fragment_bytes_in_transit(config, layers, replicas, is_data_stage=is_data_stage)
        if is_outer
        else 0,
        working=max(
            parameters + operation,
            averages * GRADIENT_BYTES * count,
            state_waits * optimizer + bytes_of_update(config, block_matrices(model, layers)),
            bytes_of_application(config, layers, is_data_stage=is_data_stage) if is_outer else 0,
        ),
        host=state_waits * optimizer + in_flight * offloaded,
    )


def fragment_bytes_in_transit(
    config: Config, layers: int, replicas: int, *, is_data_stage: bool
) -> int:
    """Return the most bytes of fragments in transit, with `averaging.mode: outer`.

    For each, a replica keeps the parameters at the sending, and the messages of all replicas.
    """
    averaging = config.averaging
    begun = averaging.exact_steps + averaging.every
    held = []
    for iteration in range(begun, begun + averaging.every):
        fragment = averaging.fragment_sent_after(iteration)
        held.append(0)
        if fragment is not None:
            numbers = sum(_arrays_of(config, layers, fragment, is_data_stage=is_data_stage))
            sent = message_bytes(config, layers, fragment, is_data_stage=is_data_stage)
            held[-1] = GRADIENT_BYTES * numbers + replicas * sent
    # The fragments of `delay` iterations are in transit at once; without delay, one fragment.
    ends, at_once = [*accumulate(held + held, initial=0)], max(averaging.delay, 1)
    return max(ends[first + at_once] - ends[first] for first in range(averaging.every))


def message_bytes(config: Config, layers: int, fragment: int, *, is_data_stage: bool) -> int:
    """Return the bytes that a replica sends for one fragment of a stage of `layers` blocks."""
    arrays = _arrays_of(config, layers, fragment, is_data_stage=is_data_stage)
    dtype = config.averaging.dtype
    if dtype == "int8":
        return sum(size + BYTES_OF_A_SCALE * -(-size // NUMBERS_OF_A_SCALE) for size in arrays)
    return DTYPE_BYTES[dtype] * sum(arrays)


def bytes_of_application(config: Config, layers: int, *, is_data_stage: bool) -> int:
    """Return the bytes that the application of the largest fragment makes before it is written.

    These are its parameters, anchor and momentum; sending makes less.
    """
    fragments = range(config.averaging.fragments)
    largest = max(
        sum(_arrays_of(config, layers, fragment, is_data_stage=is_data_stage))
        for fragment in fragments
    )
    return OUTER_ARRAYS * GRADIENT_BYTES * largest


def _arrays_of(config: Config, layers: int, fragment: int, *, is_data_stage: bool) -> list[int]:
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


def bytes_of_loss(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of a chunk's logits, and of their gradient in the compute dtype."""
    chunk = tokens_of_chunk(tokens_of(data), model.vocabulary_size)
    return chunk * model.vocabulary_size * (LOGIT_BYTES + DTYPE_BYTES[model.compute_dtype])


def traffic(config: Config, case: Case, visits: int) -> Traffic:
    """Return the traffic of an iteration whose microbatches visit `visits` stages in all.

    A microbatch sends one activation for each stage that it visits, the last one back to its data
    node, and as many gradients. This is not for microbatches that stay on their data node, which
    send nothing.
    """
    hop = hop_bytes(config)
    return Traffic(
        hop=hop.activation,
        gradient_hop=hop.gradient,
        pipeline=visits * (hop.activation + hop.gradient),
        averaging=_averaging_traffic(config, case),
    )


def _averaging_traffic(config: Config, case: Case) -> int:
    """Return the mean bytes that the rings of all stages send in an iteration."""
    layers = config.model.stage_partition(len(case.stages))
    return sum(
        round(n * bytes_passed(config, layers[stage], n, is_data_stage=stage == 0))
        for stage, n in enumerate(case.stages)
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


def unpacked_bytes(config: Config) -> int:
    """Return the bytes of what a backward pass converts from or to a transfer dtype.

    These are its inputs, the gradient of its outputs, and that of its inputs before it is sent.
    """
    computed = config.model.compute_dtype
    forward, back = transfer_dtypes(config)
    own = activation_bytes(config.model, config.data, computed)
    return own * ((forward != computed) + 2 * (back != computed))


def kept_bytes(config: Config, layers: int, *, is_data_stage: bool) -> int:
    """Return the bytes that a forward pass of `layers` blocks keeps for its backward pass."""
    model, data = config.model, config.data
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    is_packed = data.packing == "documents"
    if model.recompute == "stage":
        if is_data_stage:
            return TOKEN_BYTES * tokens * (1 + is_packed)
        return hop_bytes(config).activation
    # Tokens for the lookup, and marks of documents, which bypass the blocks.
    around = TOKEN_BYTES * tokens * is_data_stage + is_packed * compute * tokens * (
        1 + is_data_stage
    )
    if model.recompute != "none":
        inputs = compute * tokens * model.width
        own = layers * (inputs + saved_by_block(model, data))
        return own + bytes_of_places(model, data) + around
    return bytes_saved_by_blocks(model, data, layers) + around
