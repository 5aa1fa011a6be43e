"""Memory of each device of a node's mesh, by formula: its shard of all that is split. No JAX.

docs/memory_formulas.md derives the formulas of nodes of one device, and their divisors on a mesh.
`skippipe_jax.models.sharding` declares how arrays are split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from skippipe_jax.config import Config, DataConfig, ModelConfig, NodeMesh
from skippipe_jax.config.hardware import ONE_DEVICE
from skippipe_jax.config.model import holds_all_scores
from skippipe_jax.models.block_footprint import (
    DTYPE_BYTES,
    TOKEN_BYTES,
    block_parameters,
    blocks_at_once,
    bytes_of_log_sums,
    bytes_of_places,
    bytes_saved_by_blocks,
    offloadable_bytes,
    quick_bytes,
    tokens_of,
)
from skippipe_jax.models.footprint import (
    GRADIENT_BYTES,
    OFFLOADS,
    NodeMemory,
    block_matrices,
    bytes_of_loss,
    bytes_of_update,
    hop_bytes,
    kept_bytes,
    optimizer_bytes,
    stage_parameters,
    unpacked_bytes,
)


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


def parameters_per_device(
    model: ModelConfig, layers: int, mesh: NodeMesh, *, is_data_stage: bool
) -> int:
    """Return how many of a stage's parameters each device has: norms are split over `fsdp` only."""
    scales = (2 * layers + is_data_stage) * model.width
    whole = stage_parameters(model, layers, is_data_stage=is_data_stage)
    return (whole - scales) // mesh.devices + scales // mesh.fsdp


def gathered_bytes(model: ModelConfig, layers: int, mesh: NodeMesh) -> int:
    """Return the bytes added on each device if the weights of `layers` blocks are gathered."""
    scales = 2 * layers * model.width
    matrices = layers * block_parameters(model) - scales
    computed = matrices // mesh.tensor * DTYPE_BYTES[model.compute_dtype]
    return computed + scales * DTYPE_BYTES[model.parameter_dtype]


def saved_bytes_per_device(
    config: Config, layers: int, mesh: NodeMesh, *, is_data_stage: bool
) -> int:
    """Return the bytes that a forward pass keeps for its backward pass on each device."""
    model, data = config.model, config.data
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    cuts, is_packed = Cuts.of(model, data, mesh), data.packing == "documents"
    if model.recompute == "stage":
        kept = kept_bytes(config, layers, is_data_stage=is_data_stage)
        return kept if is_data_stage else kept // cuts.all
    looked_up = TOKEN_BYTES * tokens * is_data_stage
    marks = is_packed * compute * tokens * (1 + is_data_stage)
    if model.recompute != "none":
        places = bytes_of_places(model, data) // (cuts.positions if is_packed else 1)
        inputs = compute * tokens * model.width // cuts.all
        return layers * (inputs + _saved_by_each(model, data, cuts)) + places + looked_up + marks
    return _kept_by_blocks(model, data, layers, cuts) + looked_up + marks


def _saved_by_each(model: ModelConfig, data: DataConfig, cuts: Cuts) -> int:
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    if model.recompute == "save_only_attention":
        return (compute * tokens * model.width + bytes_of_log_sums(model, data)) // cuts.attention
    if model.recompute == "dots_with_no_batch_dims_saveable":
        return offloadable_bytes(model, data) // cuts.all
    return 0


def _kept_by_blocks(model: ModelConfig, data: DataConfig, layers: int, cuts: Cuts) -> int:
    """Return `bytes_saved_by_blocks` of each device, each term by its own divisor."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    keeps_scores = holds_all_scores(model.attention, data.sequence_length)
    packed = data.packing == "documents"
    # Two blocks minus one: what each block keeps. The rest is shared.
    block = bytes_saved_by_blocks(model, data, 2) - bytes_saved_by_blocks(model, data, 1)
    shared = bytes_saved_by_blocks(model, data, 1) - block
    scores = tokens * model.heads * data.sequence_length * keeps_scores
    sums = 2 * 4 * tokens * model.heads if keeps_scores else bytes_of_log_sums(model, data)
    kv_width = model.kv_heads * model.head_width
    own = compute * tokens * (model.width + 2 * kv_width) + sums + scores * (4 + 4)
    products = compute * tokens * 2 * model.width
    scales = 2 * 4 * model.width
    rest = block - own - products - scales
    of_block = rest // cuts.all + own // cuts.attention + products // cuts.products + scales
    of_block += cuts.twice * compute * tokens * model.width // cuts.attention
    masks = scores * (1 + 4)
    marks = 4 * tokens * (packed and not keeps_scores)
    turns = (shared - masks - marks) // (cuts.positions if packed else 1)
    return layers * of_block + masks // cuts.attention + marks // cuts.positions + turns


def per_device_memory(
    config: Config,
    layers: int,
    whole: NodeMemory,
    mesh: NodeMesh,
    *,
    is_data_stage: bool,
    averages: bool,
    gathers: bool,
) -> NodeMemory:
    """Return the memory of each device of a node, from that of a node of one device (`whole`).

    `gathers` says whether weights are gathered once an iteration.
    """
    if mesh == ONE_DEVICE:
        return whole
    model, data = config.model, config.data
    count = parameters_per_device(model, layers, mesh, is_data_stage=is_data_stage)
    cuts, hop = Cuts.of(model, data, mesh), hop_bytes(config)
    parameters = count * DTYPE_BYTES[model.parameter_dtype]
    matrices = block_matrices(model, layers) // mesh.devices
    optimizer = optimizer_bytes(config, count, matrices)
    state_waits = config.optimizer.state_memory == "host"
    targets = TOKEN_BYTES * tokens_of(data) if is_data_stage else 0
    offloaded = layers * offloadable_bytes(model, data) if model.recompute == OFFLOADS else 0
    offloaded //= cuts.all
    return replace(
        whole,
        parameters=parameters,
        gradients=GRADIENT_BYTES * count,
        optimizer=0 if state_waits else optimizer,
        gathered=gathered_bytes(model, layers, mesh) if gathers else 0,
        kept=saved_bytes_per_device(config, layers, mesh, is_data_stage=is_data_stage) + targets,
        waiting=whole.waiting // max(hop.activation, hop.gradient) * _hop_of_each(config, cuts),
        working=max(
            _of_backward(config, layers, mesh, is_data_stage=is_data_stage, gathers=gathers),
            _of_loss(model, data, mesh) if is_data_stage else 0,
            averages * GRADIENT_BYTES * count,
            state_waits * optimizer + bytes_of_update(config, matrices),
        ),
        host=state_waits * optimizer + whole.in_flight * offloaded,
    )


def _hop_of_each(config: Config, cuts: Cuts) -> int:
    hop = hop_bytes(config)
    return max(hop.activation, hop.gradient) // cuts.all


def _of_backward(
    config: Config,
    layers: int,
    mesh: NodeMesh,
    *,
    is_data_stage: bool,
    gathers: bool,
) -> int:
    """Return the bytes of the gradients of all blocks, and of what the current block needs.

    These are its weights, if they are gathered for it alone, their gradient before and after the
    reduce-scatter, and the inputs of its matrix products, three times. The gradient of the
    embedding is made after all this is freed, and the head has none.
    """
    model, data = config.model, config.data
    cuts, compute = Cuts.of(model, data, mesh), DTYPE_BYTES[model.compute_dtype]
    held = DTYPE_BYTES[model.parameter_dtype]
    embedding = held * is_data_stage * model.vocabulary_size * model.width // mesh.devices
    kept = _kept_by_blocks(model, data, blocks_at_once(model, layers), cuts)
    kept += quick_bytes(model, data) // cuts.all
    together = (mesh.fsdp > 1) * (2 - gathers) * gathered_bytes(model, 1, mesh)
    block = together + compute * block_parameters(model) // mesh.devices
    multiplied = 3 * compute * tokens_of(data) * model.width // mesh.fsdp
    gradients = held * parameters_per_device(model, layers, mesh, is_data_stage=False)
    of_block = unpacked_bytes(config) // cuts.all + kept + block + multiplied
    return gradients + max(of_block, embedding)


def _of_loss(model: ModelConfig, data: DataConfig, mesh: NodeMesh) -> int:
    """Return the bytes of a loss, for each device's part of the vocabulary.

    These are a chunk's logits and their gradient, the head in these parts, its gradient in them and
    as the head is stored, and all tokens' activations, with their gradient in float32.
    """
    computed, held = DTYPE_BYTES[model.compute_dtype], DTYPE_BYTES[model.parameter_dtype]
    head = model.vocabulary_size * model.width // mesh.devices * (computed + GRADIENT_BYTES + held)
    tokens = tokens_of(data) * model.width * (computed + GRADIENT_BYTES)
    return bytes_of_loss(model, data) // mesh.devices + head + tokens
