"""How long the replicas of a stage take to average what they hold: a ring all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

from skippipe_sched.case import Case

# Up to this many replicas every ring is tried; above it a ring is built and improved by 2-opt.
EXHAUSTIVE_REPLICAS = 7


def averaging_s(case: Case, stage: int, ring: Sequence[int]) -> float:
    """Seconds of a ring all-reduce of what `stage` holds, over nodes in this order.

    2(n-1)/n * stage_bytes / (slowest link in the ring) + 2(n-1) * (largest latency).
    """
    replicas = len(ring)
    if replicas < 2:
        return 0.0
    latency, bandwidth = case.link_matrices
    source, target = list(ring), [*ring[1:], ring[0]]
    steps = 2 * (replicas - 1)
    return float(
        steps / replicas * case.stage_bytes[stage] / bandwidth[source, target].min()
        + steps * latency[source, target].max()
    )


@lru_cache(maxsize=1024)
def quickest_averaging_s(case: Case, stage: int, nodes: tuple[int, ...]) -> float:
    """Seconds of the averaging over `best_ring`; kept, as a search asks for the same stages."""
    return averaging_s(case, stage, best_ring(case, stage, nodes))


def best_ring(case: Case, stage: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The order of the replicas of `stage` in which a ring all-reduce is quickest.

    Exact up to `EXHAUSTIVE_REPLICAS` replicas, a local optimum above.
    """
    if len(nodes) < 3:
        return tuple(nodes)
    first, *rest = nodes
    if len(nodes) <= EXHAUSTIVE_REPLICAS:
        rings = ((first, *order) for order in permutations(rest))
        return min(rings, key=lambda ring: averaging_s(case, stage, ring))
    _, bandwidth = case.link_matrices
    ring = [first]
    while rest:
        nearest = max(rest, key=lambda node: bandwidth[ring[-1], node])
        rest.remove(nearest)
        ring.append(nearest)
    return tuple(_two_opt(case, stage, ring))


def _two_opt(case: Case, stage: int, ring: list[int]) -> list[int]:
    best = averaging_s(case, stage, ring)
    improved = True
    while improved:
        improved = False
        for start in range(1, len(ring) - 1):
            for end in range(start + 2, len(ring) + 1):
                candidate = ring[:start] + ring[start:end][::-1] + ring[end:]
                cost = averaging_s(case, stage, candidate)
                if cost < best:
                    ring, best, improved = candidate, cost, True
    return ring
