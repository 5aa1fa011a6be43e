"""What blocks keep between forward and backward, and make within one, by formula: bytes.

docs/memory_formulas.md derives every formula. What is kept is exact.
"""

from __future__ import annotations

from skippipe_jax.config import DataConfig, ModelConfig
from skippipe_jax.config.model import CPU_BLOCK, holds_all_scores, turns_by_constants

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number in each of the dtypes that a configuration may name."""
TOKEN_BYTES = 4


def tokens_of(data: DataConfig) -> int:
    """Of a microbatch."""
    return data.microbatch_size * data.sequence_length


def block_parameters(model: ModelConfig) -> int:
    """Of one block."""
    return sum(arrays_of_block(model))


def arrays_of_block(model: ModelConfig) -> list[int]:
    """Numbers of each: queries and outputs, keys and values, the three of SwiGLU, two norms."""
    width, kv_width = model.width, model.kv_heads * model.head_width
    return [width**2] * 2 + [width * kv_width] * 2 + [width * model.ffn_width] * 3 + [width] * 2


def kept_by_blocks(model: ModelConfig, data: DataConfig, layers: int) -> int:
    """Return what so many blocks keep if nothing slow is computed again."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    keeps_scores = holds_all_scores(model.attention, data.sequence_length)
    scores = tokens * model.heads * data.sequence_length * keeps_scores
    # All others compute the scores again, piece by piece, and keep what those of a query sum to.
    sums = 2 * 4 * tokens * model.heads if keeps_scores else bytes_of_log_sums(model, data)
    kv_width = model.kv_heads * model.head_width
    numbers = 6 * model.width + 2 * kv_width + 2 * model.ffn_width
    of_block = (
        tokens * numbers * compute + scores * (4 + 4) + tokens * 4 * 4 + sums + 2 * 4 * model.width
    )
    shared = scores * (1 + 4) + bytes_of_rotations(model, data)
    shared += 4 * tokens * (data.packing == "documents" and not keeps_scores)
    return layers * of_block + shared


def saved_by_block(model: ModelConfig, data: DataConfig) -> int:
    """What a block keeps on the device, besides its input, where the rest is computed again."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    if model.recompute == "save_only_attention":
        return compute * tokens * model.width + bytes_of_log_sums(model, data)
    if model.recompute == "dots_with_no_batch_dims_saveable":
        return offloadable_bytes(model, data)
    return 0


def offloadable_bytes(model: ModelConfig, data: DataConfig) -> int:
    """What the products of a block with its matrices give, but for the last, which none needs."""
    kv_width = model.kv_heads * model.head_width
    numbers = 2 * model.width + 2 * kv_width + 2 * model.ffn_width
    return DTYPE_BYTES[model.compute_dtype] * tokens_of(data) * numbers


def bytes_of_log_sums(model: ModelConfig, data: DataConfig) -> int:
    """What attention keeps in the scores' place, for each head and token up to a whole block."""
    length = data.sequence_length
    if holds_all_scores(model.attention, length):
        return 0
    block = min(CPU_BLOCK, length)
    return 4 * data.microbatch_size * model.heads * block * -(-length // block)


def bytes_of_places(model: ModelConfig, data: DataConfig) -> int:
    """What says, for a block that is computed again, where its tokens are: constants, if any."""
    if data.packing == "documents":
        return TOKEN_BYTES * tokens_of(data)
    are_constants = turns_by_constants(data.sequence_length, model.head_width)
    return are_constants * bytes_of_rotations(model, data)


def bytes_of_rotations(model: ModelConfig, data: DataConfig) -> int:
    """Of cosines and sines: of each token if documents are packed, else of each place."""
    places = tokens_of(data) if data.packing == "documents" else data.sequence_length
    return 2 * 4 * places * model.head_width // 2


def blocks_at_once(model: ModelConfig, layers: int) -> int:
    """Of how many blocks a backward pass has at once what `none` would keep.

    That is the block that it is at, whose turn it is for what was kept or is computed again; and
    all that it has computed again before, if that is the stage.
    """
    return 1 + layers if model.recompute == "stage" else 1


def passing_bytes(model: ModelConfig, data: DataConfig) -> int:
    """Return what a backward pass makes besides of the block that it is at, whatever is kept.

    That are gradients of its parameters, before they lie with those of the others; what its
    matrices are multiplied with, three times; and what is computed number by number.
    """
    compute = DTYPE_BYTES[model.compute_dtype]
    of_products = 3 * tokens_of(data) * model.width
    return compute * (block_parameters(model) + of_products) + quick_bytes(model, data)


def quick_bytes(model: ModelConfig, data: DataConfig) -> int:
    """Return what the backward pass of a block computes number by number.

    That are the product that SwiGLU multiplies last, its gradient and those of gate and up; and in
    float32 what a norm gets, and its gradient.
    """
    compute = DTYPE_BYTES[model.compute_dtype]
    return tokens_of(data) * (4 * model.ffn_width * compute + 2 * model.width * 4)
