"""What may compute attention, and which shapes each of them takes."""

from __future__ import annotations

from skippipe_jax.config.choices import Choice

AUTO, XLA, BLOCKWISE, CUDNN, SPLASH = "auto", "xla", "blockwise", "cudnn", "splash"
ATTENTION = Choice((AUTO, XLA, BLOCKWISE, CUDNN, SPLASH))
SHORT = 256
"""Sequences up to so long have so few scores that by default all of them are there at once."""
CPU_BLOCK, BLOCK = 128, 512
"""Queries, and keys, that blockwise attention takes at a time on processors, and on others."""
PLATFORM_OF = {CUDNN: "gpu", SPLASH: "tpu"}
"""Where a kernel runs that does not run everywhere, by JAX's names."""
MOST_CONSTANTS = 1 << 19
"""Numbers in the cosines and sines that a program has as constants, in 2 MB."""
SPLASH_LANES = 128
CUDNN_MOST_WIDTH, CUDNN_WIDTH_STEP = 128, 8


def holds_all_scores(attention: str, length: int) -> bool:
    """Whether all scores of a sequence of so many tokens are there at once, wherever it runs."""
    return attention == XLA or (attention == AUTO and length <= SHORT)


def turns_by_constants(length: int, head_width: int) -> bool:
    """Tell whether the rotations of sequences of so many tokens are constants of a program."""
    return length * head_width <= MOST_CONSTANTS


def why_unfit(implementation: str, *, length: int, head_width: int, compute_dtype: str) -> str:
    """Why a kernel does not take such sequences and heads, as a part of a sentence; "" if it does.

    Both kernels say so themselves, but only when they are compiled, and of one device.
    """
    if implementation == CUDNN:
        if compute_dtype == "float32":
            return "does not compute in model.compute_dtype = 'float32'"
        if head_width > CUDNN_MOST_WIDTH or head_width % CUDNN_WIDTH_STEP:
            return (
                f"takes heads of a width up to {CUDNN_MOST_WIDTH} that {CUDNN_WIDTH_STEP} divides, "
                f"and model.width / model.heads is {head_width}"
            )
    if implementation == SPLASH:
        if length % SPLASH_LANES:
            return (
                f"takes sequences of a multiple of {SPLASH_LANES} tokens, and "
                f"data.sequence_length is {length}"
            )
        if head_width % SPLASH_LANES:
            return (
                f"takes heads whose width {SPLASH_LANES} divides, and model.width / model.heads "
                f"is {head_width}"
            )
    return ""
