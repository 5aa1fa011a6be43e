"""Sizes by formula: of a stage, of what blocks keep, and of the traffic of an iteration. No JAX.

docs/memory_formulas.md derives every formula, and its divisors on a mesh. Bytes that blocks keep
between forward and backward are exact. `tokens_of_chunk` is how many tokens the head takes at a
time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE, SCALE_BYTES
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.config import AveragingConfig, Config, DataConfig, ModelConfig, NodeMesh
from skippipe_jax.config.hardware import ONE_DEVICE
from skippipe_jax.config.model import CPU_BLOCK, holds_all_scores, rotations_as_constants
from skippipe_jax.config.optimizer import MUON

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in each dtype that a configuration may name."""
TOKEN_BYTES = 4
LOGIT_BYTES = 4
"""Bytes of each logit: float32, for any compute dtype."""
GRADIENT_BYTES = 4
"""Bytes of each number in gradients: float32."""
COUNTER_BYTES = 4
"""Bytes of each counter in the state of an optimizer: AdamW's, its schedule's, and Muon's."""
COPIES_OF_BUDDY = 2
"""Copies of a stage on its buddy host: a complete one, and the next."""
ACTIVATION_SCALE_BYTES = 2
"""Bytes of a scale in int8 activations: bfloat16."""

MOST_LOGIT_BYTES = 512 * 2**20
"""Most bytes of a chunk's logits.

Every chunk reads and writes the gradient of the head, 8 bytes for each of its numbers, and computes
6 operations for each token and number. With 1,000 tokens an H100 computes three times as long as it
reads and writes, and a vocabulary of 128,256 allows 1,046. With a vocabulary of 32,000, all 4,096
tokens of a microbatch are one chunk, and nothing is read twice.
"""


@dataclass(frozen=True)
class Cuts:
    """Numbers of parts into which a mesh splits the arrays of a stage.

    Attributes:
        all: arrays between blocks, and those split along their channels within blocks.
        products: inputs of matrix products, which have all their channels.
        attention: arrays that attention keeps.
        positions: positions of tokens in packed documents.
        twice: True if the output of attention is kept twice: by heads, and by tokens.
    """

    all: int
    products: int
    attention: int
    positions: int
    twice: bool = False

    @classmethod
    def of(cls, model: ModelConfig, data: DataConfig, mesh: NodeMesh) -> Cuts:
        """Split the batch over `mesh` if `fsdp` divides it, else the tokens."""
        if data.microbatch_size % mesh.fsdp == 0:
            return cls(mesh.devices, mesh.fsdp, mesh.devices, mesh.fsdp)
        turns = model.kv_heads % mesh.devices == 0
        attention = mesh.devices if turns else mesh.tensor
        return cls(mesh.devices, mesh.fsdp, attention, 1, twice=True)


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


def tokens_of(data: DataConfig) -> int:
    """Return the number of tokens of a microbatch."""
    return data.microbatch_size * data.sequence_length


def block_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of one block."""
    return sum(arrays_of_block(model))


def arrays_of_block(model: ModelConfig) -> list[int]:
    """Return the size of each array: query, output, key, value, three of SwiGLU, and two norms."""
    width, kv_width = model.width, model.kv_heads * model.head_width
    return [width**2] * 2 + [width * kv_width] * 2 + [width * model.ffn_width] * 3 + [width] * 2


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
        return tokens_of(data) * (channels + ACTIVATION_SCALE_BYTES * groups)
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
        return sum(size + SCALE_BYTES * -(-size // NUMBERS_OF_A_SCALE) for size in arrays)
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


# What blocks keep between forward and backward, and make within one.


def bytes_saved_by_blocks(
    model: ModelConfig, data: DataConfig, layers: int, mesh: NodeMesh = ONE_DEVICE
) -> int:
    """Return the bytes that `layers` blocks keep if only elementwise results are recomputed."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    cuts, is_packed = Cuts.of(model, data, mesh), data.packing == "documents"
    keeps_scores = holds_all_scores(model.attention, data.sequence_length)
    scores = tokens * model.heads * data.sequence_length * keeps_scores
    # All others recompute the scores block by block, and keep a log-sum for each query.
    sums = 2 * 4 * tokens * model.heads if keeps_scores else bytes_of_log_sums(model, data)
    kv_width = model.kv_heads * model.head_width
    split = compute * tokens * (3 * model.width + 2 * model.ffn_width) + 4 * 4 * tokens
    attended = compute * tokens * (model.width + 2 * kv_width) + sums + (4 + 4) * scores
    of_block = split // cuts.all + attended // cuts.attention + 2 * 4 * model.width
    of_block += 2 * compute * tokens * model.width // cuts.products
    of_block += cuts.twice * compute * tokens * model.width // cuts.attention
    marks = 4 * tokens * (is_packed and not keeps_scores)
    shared = (1 + 4) * scores // cuts.attention + marks // cuts.positions
    shared += bytes_of_rotations(model, data) // (cuts.positions if is_packed else 1)
    return layers * of_block + shared


def saved_by_block(model: ModelConfig, data: DataConfig, cuts: Cuts) -> int:
    """Return the bytes that a block keeps on a device besides its input, if it is recomputed."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    if model.recompute == "save_only_attention":
        return (compute * tokens * model.width + bytes_of_log_sums(model, data)) // cuts.attention
    if model.recompute == "dots_with_no_batch_dims_saveable":
        return offloadable_bytes(model, data) // cuts.all
    return 0


def offloadable_bytes(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of a block's matrix products except the last, which no gradient needs."""
    kv_width = model.kv_heads * model.head_width
    numbers = 2 * model.width + 2 * kv_width + 2 * model.ffn_width
    return DTYPE_BYTES[model.compute_dtype] * tokens_of(data) * numbers


def bytes_of_log_sums(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of attention's log-sums: of each head and token, padded to whole blocks."""
    length = data.sequence_length
    if holds_all_scores(model.attention, length):
        return 0
    block = min(CPU_BLOCK, length)
    return 4 * data.microbatch_size * model.heads * block * -(-length // block)


def bytes_of_places(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of positions for recomputation: of packed tokens, else constants if any."""
    if data.packing == "documents":
        return TOKEN_BYTES * tokens_of(data)
    are_constants = rotations_as_constants(data.sequence_length, model.head_width)
    return are_constants * bytes_of_rotations(model, data)


def bytes_of_rotations(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of cosines and sines: of each token if packed, else of each position."""
    places = tokens_of(data) if data.packing == "documents" else data.sequence_length
    return 2 * 4 * places * model.head_width // 2


def blocks_at_once(model: ModelConfig, layers: int) -> int:
    """Return for how many blocks a backward pass holds the bytes that `none` would keep.

    These are the current block, kept or recomputed, and with `stage` also all blocks that were
    recomputed before.
    """
    return 1 + layers if model.recompute == "stage" else 1


def passing_bytes(model: ModelConfig, data: DataConfig, mesh: NodeMesh = ONE_DEVICE) -> int:
    """Return the bytes that a backward pass makes for the current block, whatever is kept.

    These are the gradients of its parameters, before they are stacked with those of other blocks,
    the inputs of its matrix products, three times, and elementwise results: the last product within
    SwiGLU, its gradient, and the gradients of gate and up; and in float32 the input of a norm and
    its gradient.
    """
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    elementwise = tokens * (4 * model.ffn_width * compute + 2 * model.width * 4)
    return (
        compute * block_parameters(model) // mesh.devices
        + 3 * compute * tokens * model.width // mesh.fsdp
        + elementwise // mesh.devices
    )


def tokens_of_chunk(tokens: int, vocabulary_size: int) -> int:
    """Return the tokens of each chunk if `tokens` are split into the fewest equal chunks."""
    most = max(1, MOST_LOGIT_BYTES // (LOGIT_BYTES * vocabulary_size))
    chunks = -(-tokens // most)
    return -(-tokens // chunks)
