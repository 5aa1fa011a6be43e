"""Bytes that blocks keep between forward and backward, and make within one, by formula. No JAX.

docs/memory_formulas.md derives every formula, and its divisors on a mesh. Bytes kept are exact.
`tokens_of_chunk` is how many tokens the head takes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from skippipe_jax.config import DataConfig, ModelConfig, NodeMesh
from skippipe_jax.config.hardware import ONE_DEVICE
from skippipe_jax.config.model import CPU_BLOCK, holds_all_scores, rotations_as_constants

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in each dtype that a configuration may name."""
TOKEN_BYTES = 4
LOGIT_BYTES = 4
"""Bytes of each logit: float32, for any compute dtype."""

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
