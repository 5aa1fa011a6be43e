"""Pacing of rings: chunks in flight on a link, enough to fill it and not more.

A link sends arrays in the order in which they were both offered and requested (see
`skippipe_jax.runtime.transport`). If a ring shares links with hops, because its hosts serve several
nodes, an activation would wait for all data of the ring ahead of it. A ring is therefore cut into
chunks that take a small share of a hop's time, and a host requests no more of them than keep the
link busy. Inputs of operations are requested long in advance: once offered, an input is sent after
these few chunks and before all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skippipe_sched.problem.case import Case

# The amount that a server copies at a time: larger chunks would not be faster.
LARGEST_CHUNK_BYTES = 1 << 20
# Share of a hop's bytes. Two chunks, the least in flight, delay a hop by an eighth of its time.
SHARE_OF_HOP = 1 / 16
# A chunk of any size takes about a millisecond of a core, so it is to occupy the link for 20 ms. It
# has an overhead of 400 bytes, which is to be about a hundredth of it.
LEAST_CHUNK_S = 0.02
SMALLEST_CHUNK_BYTES = 1 << 15
# Time that a receiver may take to request the next chunk.
ANSWER_S = 0.02


def chunk_bytes(case: Case, nodes: Sequence[int], hop_bytes: float) -> float:
    """Return the maximum bytes of a chunk of a ring over nodes in this order.

    Hops of `hop_bytes` share its links; `math.inf` means that none do.
    """
    bandwidth = case.link_matrices[1]
    following = (*nodes[1:], nodes[0])
    slowest = min(float(bandwidth[link]) for link in zip(nodes, following, strict=True))
    of_hop = min(SHARE_OF_HOP * hop_bytes, LARGEST_CHUNK_BYTES)
    return max(of_hop, SMALLEST_CHUNK_BYTES, slowest * LEAST_CHUNK_S)


def chunks_ahead(case: Case, nodes: Sequence[int], size: float) -> tuple[int, ...]:
    """Return how many chunks of `size` bytes each node requests in advance from its predecessor.

    These are one chunk on the link and as many as the link carries in a round trip.
    """
    latency, bandwidth = case.link_matrices
    before = (nodes[-1], *nodes[:-1])
    ahead = []
    for link in zip(before, nodes, strict=True):
        round_trip_s = latency[link] + latency[link[::-1]] + ANSWER_S
        ahead.append(1 + math.ceil(bandwidth[link] * round_trip_s / size))
    return tuple(ahead)
