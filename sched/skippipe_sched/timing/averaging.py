"""How long the replicas of a stage take to average what they hold: a ring all-reduce.

`ring_s` and `settle_ring` are plain code on arrays that runs as it is and also, compiled, within
`skippipe_sched.search`: there is one ring, whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from skippipe_sched.problem.case import Case

# Up to this many replicas every ring is tried; above it a ring is built and then improved.
EXHAUSTIVE_REPLICAS = 7


def averaging_s(case: Case, stage: int, ring: Sequence[int]) -> float:
    """Seconds of a ring all-reduce of what `stage` holds, over nodes in this order.

    2(n-1)/n * stage_bytes / (slowest link in the ring) + 2(n-1) * (largest latency).
    """
    if len(ring) < 2:
        return 0.0
    latency, bandwidth = case.link_matrices
    return float(ring_s(latency, bandwidth, case.stage_bytes[stage], np.array(ring)))


@lru_cache(maxsize=1024)
def quickest_averaging_s(case: Case, stage: int, nodes: tuple[int, ...]) -> float:
    """Seconds of the averaging over `best_ring`; kept, as a search asks for the same stages."""
    return averaging_s(case, stage, best_ring(case, stage, nodes))


def best_ring(case: Case, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The order of the replicas of `stage` in which a ring all-reduce is quickest.

    Exact up to `EXHAUSTIVE_REPLICAS` replicas, a local optimum above.
    """
    latency, bandwidth = case.link_matrices
    ring = np.array(nodes)
    settle_ring(latency, bandwidth, case.stage_bytes[stage], ring)
    return tuple(ring.tolist())


def ring_s(
    latency: Float[np.ndarray, "nodes nodes"],
    bandwidth: Float[np.ndarray, "nodes nodes"],
    stage_bytes: float,
    ring: Int[np.ndarray, " replicas"],
) -> float:
    """Seconds of the all-reduce over a ring of two replicas or more."""
    replicas = len(ring)
    largest_latency = 0.0
    least_bandwidth = np.inf
    for i in range(replicas):
        source, target = ring[i - 1], ring[i]
        largest_latency = max(largest_latency, latency[source, target])
        least_bandwidth = min(least_bandwidth, bandwidth[source, target])
    steps = 2 * (replicas - 1)
    seconds = steps / replicas * stage_bytes / least_bandwidth + steps * largest_latency
    return seconds  # pyright: ignore[reportReturnType]


def settle_ring(
    latency: Float[np.ndarray, "nodes nodes"],
    bandwidth: Float[np.ndarray, "nodes nodes"],
    stage_bytes: float,
    ring: Int[np.ndarray, " replicas"],
) -> None:
    """Reorder a ring in place so that its all-reduce is quickest."""
    replicas = len(ring)
    if replicas < 3:
        return
    if replicas <= EXHAUSTIVE_REPLICAS:
        _try_every_ring(latency, bandwidth, stage_bytes, ring)
        return
    for i in range(1, replicas):  # Go on to the replica with the quickest link.
        nearest = i
        for j in range(i + 1, replicas):
            if bandwidth[ring[i - 1], ring[j]] > bandwidth[ring[i - 1], ring[nearest]]:
                nearest = j
        ring[i], ring[nearest] = ring[nearest], ring[i]
    least_s = ring_s(latency, bandwidth, stage_bytes, ring)
    while True:
        seconds = _without_worst_link(latency, bandwidth, stage_bytes, ring, least_s)
        if seconds >= least_s:
            return
        least_s = seconds


def _try_every_ring(latency, bandwidth, stage_bytes, ring):
    """Heap's algorithm: all orders of the replicas after the first, each one swap from the last."""
    replicas = len(ring)
    best = ring.copy()
    least_s = ring_s(latency, bandwidth, stage_bytes, ring)
    counters = np.zeros(replicas, np.int64)
    i = 1
    while i < replicas - 1:
        if counters[i] < i:
            j = counters[i] if i % 2 else 0
            ring[j + 1], ring[i + 1] = ring[i + 1], ring[j + 1]
            seconds = ring_s(latency, bandwidth, stage_bytes, ring)
            if seconds < least_s:
                least_s = seconds
                best[:] = ring
            counters[i] += 1
            i = 1
        else:
            counters[i] = 0
            i += 1
    ring[:] = best


def _without_worst_link(latency, bandwidth, stage_bytes, ring, least_s):
    """Turn round the part of the ring that best replaces its slowest link; its seconds then."""
    replicas = len(ring)
    worst = 0
    for i in range(1, replicas):
        if bandwidth[ring[i - 1], ring[i]] < bandwidth[ring[worst - 1], ring[worst]]:
            worst = i
    start = ring.copy()
    best = ring.copy()
    for length in range(2, replicas):
        for side in range(2):
            # The link into `worst` goes if the part begins there, or ends just before.
            begin = worst if side == 0 else worst - length
            for i in range(length):
                ring[(begin + i) % replicas] = start[(begin + length - 1 - i) % replicas]
            seconds = ring_s(latency, bandwidth, stage_bytes, ring)
            if seconds < least_s:
                least_s = seconds
                best[:] = ring
            ring[:] = start
    ring[:] = best
    return least_s


# What is compiled together, where it is.
ON_ARRAYS = (ring_s, settle_ring, _try_every_ring, _without_worst_link)
