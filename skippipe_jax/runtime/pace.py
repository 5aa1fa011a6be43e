"""How much of a ring is on its way at once: enough to fill its links, and not more.

What goes from one host to another goes in order: first what has been offered and asked for first
(see `skippipe_jax.runtime.transport`). Where a ring shares its way with hops, because its hosts
serve several nodes, an activation would wait for all of the ring that was ahead of it. So a ring is
cut into chunks that take a small share of a hop's time, and a host asks for no more of them than
are needed for the link to be busy all the time. Inputs of operations are asked for long before they
are there: when one is offered, it goes after those few chunks, and before all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from skippipe_sched.problem.case import Case

# As much as a server copies at a time: in larger chunks nothing would go quicker.
LARGEST_CHUNK_BYTES = 1 << 20
# Of one hop's bytes. Two chunks, the least that is under way, delay a hop by an eighth of its time.
SHARE_OF_HOP = 1 / 16
# A chunk takes about a millisecond of a core on its way, however small it is: so it is to take its
# link twenty times as long. And 400 bytes go with it, which are to be about a hundredth of it.
LEAST_CHUNK_S = 0.02
SMALLEST_CHUNK_BYTES = 1 << 15
# What may pass until a host that something comes to has asked for more of it.
ANSWER_S = 0.02


def chunk_bytes(case: Case, nodes: Sequence[int], hop_bytes: float) -> float:
    """Return the bytes of a chunk, at most, of a ring over nodes in this order.

    Hops of so many bytes go over the same links; with `math.inf` none does.
    """
    bandwidth = case.link_matrices[1]
    slowest = min(float(bandwidth[link]) for link in zip(nodes, _after(nodes), strict=True))
    of_hop = min(SHARE_OF_HOP * hop_bytes, LARGEST_CHUNK_BYTES)
    return max(of_hop, SMALLEST_CHUNK_BYTES, slowest * LEAST_CHUNK_S)


def chunks_ahead(case: Case, nodes: Sequence[int], size: float) -> tuple[int, ...]:
    """Return how many chunks of `size` bytes each node asks the one before it for ahead.

    One is on the link while the next ones are asked for: as many as go over it in a round trip.
    """
    latency, bandwidth = case.link_matrices
    before = (nodes[-1], *nodes[:-1])
    ahead = []
    for link in zip(before, nodes, strict=True):
        round_trip_s = latency[link] + latency[link[::-1]] + ANSWER_S
        ahead.append(1 + math.ceil(bandwidth[link] * round_trip_s / size))
    return tuple(ahead)


def _after(nodes: Sequence[int]) -> Sequence[int]:
    return (*nodes[1:], nodes[0])
