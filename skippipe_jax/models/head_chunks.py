"""Number of tokens that the head takes at a time. No JAX, because `footprint` uses it too."""

from __future__ import annotations

LOGIT_BYTES = 4
"""Bytes of each logit: float32, for any compute dtype."""

MOST_LOGIT_BYTES = 512 * 2**20
"""Most bytes of a chunk's logits.

Every chunk reads and writes the gradient of the head, 8 bytes for each of its numbers, and computes
6 operations for each token and number. With 1,000 tokens an H100 computes three times as long as it
reads and writes, and a vocabulary of 128,256 allows 1,046. With a vocabulary of 32,000, all 4,096
tokens of a microbatch are one chunk, and nothing is read twice.
"""


def tokens_of_chunk(tokens: int, vocabulary_size: int) -> int:
    """Return the tokens of each chunk if `tokens` are split into the fewest equal chunks."""
    most = max(1, MOST_LOGIT_BYTES // (LOGIT_BYTES * vocabulary_size))
    chunks = -(-tokens // most)
    return -(-tokens // chunks)
