"""The timing model compiled, for searches that ask it tens of thousands of times a second.

It is `simulate` again, on arrays: the same events, the same dispatch, the same averaging; a test
holds the two together. What a plan is finally said to take, `simulate` says. Two things differ.
A search wants to know only whether a candidate is better than what it has, so a simulation stops
as soon as it cannot be; and dispatch without an order does not look ahead for nodes that lock
against each other: a candidate that locks costs infinity, never less.

Where iterations do not wait for averaging, that is an iteration by itself, and what `added_s` says
of rings that are too long to hide: many iterations, one after another, are too many to look at. As
long as the search is guided by means, what the rings of each stage would add is one of them: a ring
that is not the longest matters too.
"""

from __future__ import annotations

import numpy as np

from skippipe_sched.search.arrays import hop_seconds, operation_s, slot_at
from skippipe_sched.search.averaging import added_s
from skippipe_sched.search.compiled import compiled
from skippipe_sched.search.events import pop, push


@compiled
def _set_remaining(problem, candidate, scratch, limit_s):
    """Seconds from the start of each operation to the end, if nothing waits; False if over limit.

    Links are marked as free on the way.
    """
    node_of_slot, paths = candidate.node_of_slot, candidate.paths
    averaging_s = candidate.averaging_s
    waiting = problem.rings.waits
    microbatches, length = paths.shape
    for m in range(microbatches):
        remaining_s = 0.0
        slot = paths[m, 0]
        for position in range(2 * length, -1, -1):
            node = node_of_slot[slot]
            stage = problem.stage_of_slot[slot]
            if waiting and position > length and averaging_s[stage] > remaining_s:
                remaining_s = averaging_s[stage]
            remaining_s += operation_s(problem, node, stage, position, length)
            scratch.remaining_s[m, position] = remaining_s
            if position == 0:
                break
            before = slot_at(paths, m, position - 1, length)
            if before != slot:
                source = node_of_slot[before]
                remaining_s += hop_seconds(problem, source, node, position, length)
                if problem.one_after_another:
                    scratch.link_free_s[source, node] = 0.0
                slot = before
        if remaining_s >= limit_s:
            return False
    return True


@compiled
def _chosen(scratch, slot, priority, length):
    """The waiting microbatch that goes first, and the one before it in the queue; or -1."""
    best = -1
    before_best = -1
    best_priority = -np.inf
    before = -1
    m = scratch.first_waiting[slot]
    while m >= 0:
        position = scratch.position[m]
        allowed = position >= length or scratch.free[slot] > 0
        if allowed and priority[m, position] > best_priority:
            best_priority = priority[m, position]
            best = m
            before_best = before
        before = m
        m = scratch.next_waiting[m]
    return best, before_best


@compiled
def evaluate(problem, candidate, order, ordered, stretch, scratch, limit_s, mean_weight):
    """iteration_s of a candidate, plus `mean_weight` times the mean end of its data nodes.

    Where iterations do not wait for averaging, what the rings of all stages would add is part of
    that mean.

    With `ordered`, nodes run the operations of `order` in that order. Without, a free node takes
    the operation with the highest priority, first come first served among equals, and what it took
    is written to `order` if there is room.
    Infinity where nodes lock against each other or the result cannot be below `limit_s`.
    """
    node_of_slot, paths = candidate.node_of_slot, candidate.paths
    operations, first = order.operations, order.first
    microbatches, length = paths.shape
    slots = node_of_slot.shape[0]
    stages = problem.ring_bytes.shape[0]
    last = 2 * length
    count = last + 1
    recording = not ordered and operations.shape[0] > 0
    stretched = stretch.operations.shape[0] > 0
    if not _set_remaining(problem, candidate, scratch, limit_s):
        return np.inf
    for q in range(slots):
        scratch.first_waiting[q] = -1
        scratch.last_waiting[q] = -1
        scratch.busy[q] = False
        scratch.free[q] = problem.memory[node_of_slot[q]]
        scratch.data_end_s[q] = 0.0
        if ordered or recording:
            scratch.next_in_order[q] = first[q]
    for stage in range(stages):
        scratch.stage_begin_s[stage] = np.inf
        scratch.stage_end_s[stage] = 0.0
    size = 0
    for m in range(microbatches):
        scratch.position[m] = 0
        scratch.running[m] = False
        scratch.waiting[m] = False
        push(scratch.event_s, scratch.event_of, size, 0.0, m)
        size += 1
    ended = 0
    while size > 0:
        now = scratch.event_s[0]
        touched = 0
        while size > 0 and scratch.event_s[0] == now:
            m = scratch.event_of[0]
            pop(scratch.event_s, scratch.event_of, size)
            size -= 1
            position = scratch.position[m]
            slot = slot_at(paths, m, position, length)
            if not scratch.is_touched[slot]:
                scratch.is_touched[slot] = True
                scratch.touched[touched] = slot
                touched += 1
            if scratch.running[m]:
                scratch.running[m] = False
                scratch.busy[slot] = False
                if position > length:
                    scratch.free[slot] += 1
                    scratch.stage_end_s[problem.stage_of_slot[slot]] = now
                if position == last:
                    ended += 1
                    scratch.data_end_s[slot] = now
                    continue
                position += 1
                scratch.position[m] = position
                target_slot = slot_at(paths, m, position, length)
                if target_slot != slot:
                    source, target = node_of_slot[slot], node_of_slot[target_slot]
                    hop_s = hop_seconds(problem, source, target, position, length)
                    if stretched:
                        hop_s *= stretch.hops[m, position]
                    start_s = now
                    if problem.one_after_another:
                        start_s = max(now, scratch.link_free_s[source, target])
                        scratch.link_free_s[source, target] = start_s + hop_s
                    if start_s + hop_s + scratch.remaining_s[m, position] >= limit_s:
                        for i in range(touched):
                            scratch.is_touched[scratch.touched[i]] = False
                        return np.inf
                    push(scratch.event_s, scratch.event_of, size, start_s + hop_s, m)
                    size += 1
                    continue
            scratch.waiting[m] = True
            scratch.next_waiting[m] = -1
            if scratch.last_waiting[slot] >= 0:
                scratch.next_waiting[scratch.last_waiting[slot]] = m
            else:
                scratch.first_waiting[slot] = m
            scratch.last_waiting[slot] = m
        over = False
        for i in range(touched):
            slot = scratch.touched[i]
            scratch.is_touched[slot] = False
            if scratch.busy[slot] or over:
                continue
            if ordered:
                following = scratch.next_in_order[slot]
                if following == first[slot + 1]:
                    continue
                m = operations[following] // count
                position = operations[following] % count
                if not scratch.waiting[m] or scratch.position[m] != position:
                    continue
                if position < length and scratch.free[slot] == 0:
                    continue
                scratch.next_in_order[slot] += 1
            else:
                m, before = _chosen(scratch, slot, candidate.priority, length)
                if m < 0:
                    continue
                position = scratch.position[m]
                if before < 0:
                    scratch.first_waiting[slot] = scratch.next_waiting[m]
                else:
                    scratch.next_waiting[before] = scratch.next_waiting[m]
                if scratch.last_waiting[slot] == m:
                    scratch.last_waiting[slot] = before
                if recording:
                    operations[scratch.next_in_order[slot]] = m * count + position
                    scratch.next_in_order[slot] += 1
            if now + scratch.remaining_s[m, position] >= limit_s:
                over = True
                continue
            stage = problem.stage_of_slot[slot]
            seconds = operation_s(problem, node_of_slot[slot], stage, position, length)
            if stretched:
                seconds *= stretch.operations[m, position]
            if position < length:
                scratch.free[slot] -= 1
                scratch.stage_begin_s[stage] = min(scratch.stage_begin_s[stage], now)
            scratch.busy[slot] = True
            scratch.running[m] = True
            scratch.waiting[m] = False
            push(scratch.event_s, scratch.event_of, size, now + seconds, m)
            size += 1
        if over:
            return np.inf
    if ended < microbatches:
        return np.inf
    pipeline_s = 0.0
    for stage in range(stages):
        pipeline_s = max(pipeline_s, scratch.stage_end_s[stage])
    iteration_s, mean_s = 0.0, 0.0
    for stage in range(stages):
        seconds = candidate.averaging_s[stage]
        if stretched:
            seconds *= stretch.averagings[stage]
        end_s = scratch.stage_end_s[stage]
        worked_s = max(0.0, end_s - scratch.stage_begin_s[stage])
        seconds = added_s(problem.rings, seconds, pipeline_s, worked_s)
        if not problem.rings.waits:
            end_s = pipeline_s
            mean_s += seconds
        iteration_s = max(iteration_s, end_s + seconds)
    data_nodes = problem.first_slot[1]
    for slot in range(data_nodes):
        mean_s += scratch.data_end_s[slot] / data_nodes
    cost_s = iteration_s + mean_weight * mean_s
    return cost_s if cost_s < limit_s else np.inf
