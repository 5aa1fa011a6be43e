"""Bytes that blocks keep between forward and backward, and make within one, by formula.

docs/memory_formulas.md derives every formula. Bytes kept are exact.
"""

from __future__ import annotations

from skippipe_jax.config import DataConfig, ModelConfig
from skippipe_jax.config.model import CPU_BLOCK, holds_all_scores, rotations_as_constants

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in each dtype that a configuration may name."""
TOKEN_BYTES = 4


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


def bytes_saved_by_blocks(model: ModelConfig, data: DataConfig, layers: int) -> int:
    """Return the bytes that `layers` blocks keep if only elementwise results are recomputed."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    keeps_scores = holds_all_scores(model.attention, data.sequence_length)
    scores = tokens * model.heads * data.sequence_length * keeps_scores
    # All others recompute the scores block by block, and keep a log-sum for each query.
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
    """Return the bytes that a block keeps on the device besides its input, if it is recomputed."""
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    if model.recompute == "save_only_attention":
        return compute * tokens * model.width + bytes_of_log_sums(model, data)
    if model.recompute == "dots_with_no_batch_dims_saveable":
        return offloadable_bytes(model, data)
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


def passing_bytes(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes that a backward pass makes for the current block, whatever is kept.

    These are the gradients of its parameters, before they are stacked with those of other blocks,
    the inputs of its matrix products, three times, and elementwise results.
    """
    compute = DTYPE_BYTES[model.compute_dtype]
    of_products = 3 * tokens_of(data) * model.width
    return compute * (block_parameters(model) + of_products) + quick_bytes(model, data)


def quick_bytes(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of elementwise results in the backward pass of a block.

    These are the last product within SwiGLU, its gradient, and the gradients of gate and up; and in
    float32 the input of a norm and its gradient.
    """
    compute = DTYPE_BYTES[model.compute_dtype]
    return tokens_of(data) * (4 * model.ffn_width * compute + 2 * model.width * 4)
