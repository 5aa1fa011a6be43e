"""Compiled timing model, for searches that call it tens of thousands of times a second.

It repeats `simulate` on arrays, with the same events, dispatch and averaging; a test compares the
two. The final prediction of a plan comes from `simulate`. There are two differences. A search only
needs to know whether a candidate is better than its current one, so a simulation stops as soon as
it cannot be. And dispatch without an order does not look ahead for deadlocks between nodes: a
candidate with a deadlock costs infinity, never less.

In outer mode, the cost is that of a single iteration, plus `added_s` for rings that are too long to
hide: simulating many iterations would take too long. While the mean guides the search, it includes
the time that the rings of all stages would add, so that a ring that is not the longest matters too.
"""

from __future__ import annotations

import numpy as np

from skippipe_sched.search.arrays import (
    beside_hops_s,
    hop_seconds,
    leaves_location,
    operation_s,
    send,
    slot_at,
)
from skippipe_sched.search.compiled import kernel
from skippipe_sched.timing.averaging import added_s


@kernel
def push(event_s, event_of, size, time_s, microbatch):
    """Add an event to a heap of `size` events, the earliest first, then the lowest microbatch."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if event_s[parent] < time_s or (
            event_s[parent] == time_s and event_of[parent] < microbatch
        ):
            break
        event_s[i] = event_s[parent]
        event_of[i] = event_of[parent]
        i = parent
    event_s[i] = time_s
    event_of[i] = microbatch


@kernel
def pop(event_s, event_of, size):
    """Remove the first event."""
    last = size - 1
    time_s, microbatch = event_s[last], event_of[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        right = child + 1
        if right < last and (
            event_s[right] < event_s[child]
            or (event_s[right] == event_s[child] and event_of[right] < event_of[child])
        ):
            child = right
        if time_s < event_s[child] or (time_s == event_s[child] and microbatch < event_of[child]):
            break
        event_s[i] = event_s[child]
        event_of[i] = event_of[child]
        i = child
    event_s[i] = time_s
    event_of[i] = microbatch


@kernel
def _set_remaining(problem, candidate, scratch, limit_s):
    """Set seconds from each operation's start to the end without waits; False if over limit.

    Links are also marked as free.
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
                if problem.follow:
                    scratch.link_free_s[source, node] = 0.0
                slot = before
        if remaining_s >= limit_s:
            return False
    return True


@kernel
def _chosen(scratch, slot, length):
    """Choose the waiting microbatch that goes first, and the one before it in the queue; or -1."""
    best = -1
    before_best = -1
    before = -1
    m = scratch.first_waiting[slot]
    while m >= 0:
        position = scratch.position[m]
        if position > length:
            return m, before
        if best < 0 and (position == length or scratch.free[slot] > 0):
            best = m
            before_best = before
        before = m
        m = scratch.next_waiting[m]
    return best, before_best


@kernel
def evaluate(problem, candidate, order, scratch, limit_s, mean_weight):
    """Simulate a candidate: return iteration_s plus `mean_weight` times its data nodes' mean end.

    In outer mode, the time that the rings of all stages would add is part of that mean.

    A free node takes a backward before other operations, and otherwise the first arrival, as the
    dispatch of `simulate` does; its choices are written to `order` if it has room. Returns infinity
    if nodes deadlock or the result cannot be below `limit_s`.
    """
    node_of_slot, paths = candidate.node_of_slot, candidate.paths
    operations = order.operations
    microbatches, length = paths.shape
    last = 2 * length
    count = last + 1
    recording = operations.shape[0] > 0
    if not _set_remaining(problem, candidate, scratch, limit_s):
        return np.inf
    _clear(problem, candidate, order, recording, scratch)
    size = microbatches
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
                    scratch.slot_end_s[slot] = now
                    continue
                position += 1
                scratch.position[m] = position
                target_slot = slot_at(paths, m, position, length)
                if target_slot != slot:
                    source, target = node_of_slot[slot], node_of_slot[target_slot]
                    arrival_s = send(problem, scratch, source, target, position, length, now)
                    if arrival_s + scratch.remaining_s[m, position] >= limit_s:
                        return np.inf
                    push(scratch.event_s, scratch.event_of, size, arrival_s, m)
                    size += 1
                    continue
            scratch.next_waiting[m] = -1
            if scratch.last_waiting[slot] >= 0:
                scratch.next_waiting[scratch.last_waiting[slot]] = m
            else:
                scratch.first_waiting[slot] = m
            scratch.last_waiting[slot] = m
        for i in range(touched):
            slot = scratch.touched[i]
            scratch.is_touched[slot] = False
            if scratch.busy[slot]:
                continue
            m, before = _chosen(scratch, slot, length)
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
                return np.inf
            stage = problem.stage_of_slot[slot]
            seconds = operation_s(problem, node_of_slot[slot], stage, position, length)
            if position < length:
                scratch.free[slot] -= 1
                scratch.stage_begin_s[stage] = min(scratch.stage_begin_s[stage], now)
            scratch.busy[slot] = True
            scratch.running[m] = True
            push(scratch.event_s, scratch.event_of, size, now + seconds, m)
            size += 1
    if ended < microbatches:
        return np.inf
    return _cost(problem, candidate, scratch, limit_s, mean_weight)


@kernel
def replay(problem, candidate, order, scratch, limit_s, mean_weight):
    """Judge a candidate as `evaluate` does, with nodes that run the operations of `order`.

    As in `skippipe_sched.timing.replay`, there are no events: a slot runs until the input of its
    next operation is missing, and the operation that sends the input wakes the slot.
    """
    node_of_slot, paths = candidate.node_of_slot, candidate.paths
    operations, first = order.operations, order.first
    microbatches, length = paths.shape
    count = 2 * length + 1
    if not _set_remaining(problem, candidate, scratch, limit_s):
        return np.inf
    _clear(problem, candidate, order, True, scratch)
    arrived_s, end_s, awake = scratch.event_s, scratch.slot_end_s, scratch.touched
    size = node_of_slot.shape[0]
    for q in range(size):
        awake[q] = q
        scratch.is_touched[q] = True
    ended = 0
    while size > 0:
        size -= 1
        slot = awake[size]
        scratch.is_touched[slot] = False
        node, stage = node_of_slot[slot], problem.stage_of_slot[slot]
        while scratch.next_in_order[slot] < first[slot + 1]:
            operation = operations[scratch.next_in_order[slot]]
            m, position = operation // count, operation % count
            if scratch.position[m] != position:
                break
            now = max(end_s[slot], arrived_s[m])
            if now + scratch.remaining_s[m, position] >= limit_s:
                return np.inf
            if position < length:
                if scratch.free[slot] == 0:
                    return np.inf
                scratch.free[slot] -= 1
                scratch.stage_begin_s[stage] = min(scratch.stage_begin_s[stage], now)
            now += operation_s(problem, node, stage, position, length)
            end_s[slot] = now
            if position > length:
                scratch.free[slot] += 1
                scratch.stage_end_s[stage] = max(scratch.stage_end_s[stage], now)
            scratch.next_in_order[slot] += 1
            scratch.position[m] += 1
            if position == 2 * length:
                ended += 1
                continue
            target_slot = slot_at(paths, m, position + 1, length)
            if target_slot != slot:
                target = node_of_slot[target_slot]
                now = send(problem, scratch, node, target, position + 1, length, now)
                waits_for = scratch.next_in_order[target_slot]
                if (
                    not scratch.is_touched[target_slot]
                    and waits_for < first[target_slot + 1]
                    and operations[waits_for] == operation + 1
                ):
                    scratch.is_touched[target_slot] = True
                    awake[size] = target_slot
                    size += 1
            arrived_s[m] = now
    if ended < microbatches:
        return np.inf
    return _cost(problem, candidate, scratch, limit_s, mean_weight)


@kernel
def _clear(problem, candidate, order, ordered, scratch):
    """Reset the buffers, with all microbatches ready at 0. `_set_remaining` resets the links."""
    for m in range(candidate.paths.shape[0]):
        scratch.position[m] = 0
        scratch.running[m] = False
        scratch.event_s[m] = 0.0
        scratch.event_of[m] = m
    for q in range(candidate.node_of_slot.shape[0]):
        scratch.first_waiting[q] = -1
        scratch.last_waiting[q] = -1
        scratch.busy[q] = False
        scratch.is_touched[q] = False
        scratch.free[q] = problem.memory[candidate.node_of_slot[q]]
        scratch.slot_end_s[q] = 0.0
        scratch.uplink_free_s[candidate.node_of_slot[q]] = 0.0
        if ordered:
            scratch.next_in_order[q] = order.first[q]
    for stage in range(problem.ring_bytes.shape[0]):
        scratch.stage_begin_s[stage] = np.inf
        scratch.stage_end_s[stage] = 0.0


@kernel
def _cost(problem, candidate, scratch, limit_s, mean_weight):
    """Compute the cost of a completed iteration."""
    stages = problem.ring_bytes.shape[0]
    pipeline_s = 0.0
    for stage in range(stages):
        pipeline_s = max(pipeline_s, scratch.stage_end_s[stage])
    iteration_s, mean_s = 0.0, 0.0
    for stage in range(stages):
        seconds = beside_hops_s(problem, candidate, stage)
        end_s = scratch.stage_end_s[stage]
        worked_s = max(0.0, end_s - scratch.stage_begin_s[stage])
        if leaves_location(problem, candidate, stage):
            for slot in range(problem.first_slot[stage], problem.first_slot[stage + 1]):
                end_s = max(end_s, scratch.uplink_free_s[candidate.node_of_slot[slot]])
        seconds = added_s(problem.rings, seconds, pipeline_s, worked_s)
        if not problem.rings.waits:
            end_s = pipeline_s
            mean_s += seconds
        iteration_s = max(iteration_s, end_s + seconds)
    data_nodes = problem.first_slot[1]
    for slot in range(data_nodes):
        mean_s += scratch.slot_end_s[slot] / data_nodes
    cost_s = iteration_s + mean_weight * mean_s
    return cost_s if cost_s < limit_s else np.inf
