"""The averaging of a stage, compiled: the very ring of `skippipe_sched.timing.averaging`."""

from __future__ import annotations

from skippipe_sched.search.compiled import compiled, compiled_within
from skippipe_sched.timing.averaging import ON_ARRAYS, added_s, ring_s, settle_ring

__all__ = ["added_s", "set_averaging"]

for function in ON_ARRAYS:
    compiled_within(function)


@compiled
def set_averaging(problem, node_of_slot, stage, averaging_s):
    """Put down how long a stage averages over its best ring, or one of its fragments does."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    if end - begin < 2:
        averaging_s[stage] = 0.0
        return
    ring = node_of_slot[begin:end].copy()
    settle_ring(problem.latency_s, problem.bandwidth, problem.ring_bytes[stage], ring)
    seconds = ring_s(problem.latency_s, problem.bandwidth, problem.ring_bytes[stage], ring)
    averaging_s[stage] = problem.rings.of_all_reduce * seconds
