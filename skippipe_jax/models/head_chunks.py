"""How many tokens the head takes at a time. Loads no JAX, for `footprint` counts by it too."""

from __future__ import annotations

LOGIT_BYTES = 4
"""Of each logit: float32, whatever the compute dtype."""

MOST_LOGIT_BYTES = 512 * 2**20
"""Of a chunk's logits.

Every chunk reads the gradient of the head and writes it again, 8 bytes for each of its numbers,
while it computes 6 operations for each token and number. With 1,000 tokens an H100 computes three
times as long as it reads and writes, and a vocabulary of 128,256 leaves room for 1,046. With one of
32,000 all 4,096 tokens of a microbatch are one chunk, and nothing is read twice.
"""


def tokens_of_chunk(tokens: int, vocabulary_size: int) -> int:
    """Into chunks of how many tokens so many are cut: as few chunks as may be, of one size."""
    most = max(1, MOST_LOGIT_BYTES // (LOGIT_BYTES * vocabulary_size))
    chunks = -(-tokens // most)
    return -(-tokens // chunks)
