"""Time of the averaging over the replicas of a stage: a ring.

In mode `exact` it is an all-reduce. In mode `outer` each replica's own message about a fragment
goes round the ring whole, in half as many steps: that takes half as long as an all-reduce of its
bytes times the number of replicas. So there is one implementation of a ring: `ring_s` and
`settle_ring` are plain code on arrays that runs interpreted and also compiled within
`skippipe_sched.search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.problem.case import Case

# Up to this many replicas every ring is tried; above it a ring is built and then improved.
EXHAUSTIVE_REPLICAS = 7

Seconds = TypeVar("Seconds", float, np.ndarray)


class Rings(NamedTuple):
    """Properties of the rings of a stage in an iteration, as numbers for compiled code.

    `of_all_reduce` is the time of a ring as a share of an all-reduce of `all_reduce_bytes`. An
    iteration has `number` rings on average. A ring may take as long as `delay` iterations without
    making them longer; the rings of a stage follow one another. `waits`: whether the iteration ends
    with them.
    """

    of_all_reduce: float
    number: float
    delay: float
    waits: bool


def rings_of_iteration(policy: AveragingPolicy) -> Rings:
    """Return the rings of a stage under this policy."""
    if not policy.is_outer:
        return Rings(1.0, 1.0, 0.0, True)
    number = policy.fragments / policy.every
    return Rings(0.5, number, min(float(policy.delay), 1.0 / number), False)


def all_reduce_bytes(policy: AveragingPolicy, stage_bytes: float, replicas: int) -> float:
    """Return the bytes of the all-reduce that a ring of this policy is, or is half of (`Rings`)."""
    if not policy.is_outer:
        return stage_bytes
    return replicas * policy.fragment_bytes(stage_bytes)


def bytes_of_rings(case: Case) -> Float[np.ndarray, " stages"]:
    """Compute the `all_reduce_bytes` of every stage of a case, with all of its replicas."""
    sizes = zip(case.stage_bytes, case.stages, strict=True)
    return np.array([all_reduce_bytes(case.averaging, *of_stage) for of_stage in sizes])


def added_s(rings: Rings, ring_s: float, pipeline_s: float, worked_s: float) -> float:
    """Compute the time that rings add to an iteration, by a stage working `worked_s` of it [s].

    In outer mode, it approximates the mean: a ring begins when the stage has ended its iteration,
    and no node waits for it before the stage would begin the iteration after its delay, unless the
    stage's next ring is due earlier. Then all nodes wait for the rest.
    """
    if rings.waits:
        return ring_s
    spare_s = min((rings.delay + 1.0) * pipeline_s - worked_s, pipeline_s / rings.number)
    return rings.number * max(0.0, ring_s - spare_s)


def least_averaged_s(
    rings: Rings, work_s: Seconds, ring_s: Seconds, least_s: Seconds | float
) -> Seconds:
    """Bound the seconds of an iteration from below, by a stage's work and by its rings.

    Each of its nodes is busy for `least_s` in every iteration. In the `delay` iterations between
    sending and applying a fragment, the stage's last node advances by a ring, and in every other
    one by its work; or if rings leave no time between them, by rings alone.
    """
    between = 1.0 - rings.number * rings.delay
    longer_s: Any = np.maximum(work_s, rings.number * ring_s + between * least_s)
    return longer_s


def averaging_s(case: Case, stage: int, ring: Sequence[int]) -> float:
    """Compute the seconds of a ring of `stage` over nodes in this order.

    With n nodes an all-reduce takes 2(n-1)/n * stage_bytes / (slowest link in the ring) + 2(n-1) *
    (largest latency), and a ring of a fragment (n-1) * (its bytes / slowest link + largest
    latency).
    """
    if len(ring) < 2:
        return 0.0
    latency, bandwidth = case.link_matrices
    size = all_reduce_bytes(case.averaging, case.stage_bytes[stage], len(ring))
    share = rings_of_iteration(case.averaging).of_all_reduce
    return share * float(ring_s(latency, bandwidth, size, np.array(ring)))


@lru_cache(maxsize=1024)
def quickest_averaging_s(case: Case, stage: int, nodes: tuple[int, ...]) -> float:
    """Compute the seconds of the averaging over `best_ring`; cached for repeated searches."""
    return averaging_s(case, stage, best_ring(case, stage, nodes))


def best_ring(case: Case, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Find the order of the replicas of `stage` in which they average soonest.

    Exact up to `EXHAUSTIVE_REPLICAS` replicas, a local optimum above.
    """
    latency, bandwidth = case.link_matrices
    ring = np.array(nodes)
    size = all_reduce_bytes(case.averaging, case.stage_bytes[stage], len(ring))
    settle_ring(latency, bandwidth, size, ring)
    return tuple(ring.tolist())


def ring_s(
    latency: Float[np.ndarray, "nodes nodes"],
    bandwidth: Float[np.ndarray, "nodes nodes"],
    stage_bytes: float,
    ring: Int[np.ndarray, " replicas"],
) -> float:
    """Compute the seconds of the all-reduce over a ring of at least two replicas."""
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
    """Reorder a ring in place so that its all-reduce is fastest."""
    replicas = len(ring)
    if replicas < 3:
        return
    if replicas <= EXHAUSTIVE_REPLICAS:
        _try_every_ring(latency, bandwidth, stage_bytes, ring)
        return
    for i in range(1, replicas):  # Continue to the replica with the fastest link.
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
    """Try all orders of the replicas after the first by Heap's algorithm, a swap after each."""
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
    """Reverse the part of the ring that best replaces its slowest link; return the new seconds."""
    replicas = len(ring)
    worst = 0
    for i in range(1, replicas):
        if bandwidth[ring[i - 1], ring[i]] < bandwidth[ring[worst - 1], ring[worst]]:
            worst = i
    start = ring.copy()
    best = ring.copy()
    for length in range(2, replicas):
        for side in range(2):
            # The link into `worst` is replaced if the part begins there, or ends just before.
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


# Functions that are compiled together by `search.compiled`.
ON_ARRAYS = (added_s, ring_s, settle_ring, _try_every_ring, _without_worst_link)
