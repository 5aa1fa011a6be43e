"""Compiled timing model, for searches that call it tens of thousands of times a second.

It repeats `simulate` on arrays, with the same events, dispatch and averaging; a test compares the
two. The final prediction of a plan comes from `simulate`. There are three differences. A search
only needs to know whether a candidate is better than its current one, so a simulation stops as soon
as it cannot be. Dispatch without an order does not look ahead for deadlocks between nodes: a
candidate with a deadlock costs infinity, never less. And it handles what happens at the same
instant one after the other, so a node may begin a forward just before a backward arrives.

In outer mode, the cost is that of a single iteration, plus `added_s` for rings that are too long to
hide: simulating many iterations would take too long. While the mean guides the search, it includes
the time that the rings of all stages would add, so that a ring that is not the longest matters too.
"""

from __future__ import annotations

import numpy as np

from skippipe_sched.search.arrays import (
    HOP,
    OPERATION,
    TO_DATA_NODE,
    TO_END,
    beside_hops_s,
    hop_seconds,
    leaves_location,
    operation_s,
    slot_at,
)
from skippipe_sched.search.compiled import kernel
from skippipe_sched.timing.averaging import added_s
from skippipe_sched.timing.hops import passed

# Queues of a slot, in the order in which it serves them.
BACKWARDS, LOSSES, FORWARDS = range(3)


@kernel
def prepare(problem, candidate, scratch, microbatches):
    """Write the operations of microbatches to the buffers; return a bound of the iteration [s].

    It is that of the microbatch that ends last if none waits, averaging included.
    """
    node_of_slot, paths = candidate.node_of_slot, candidate.paths
    averaging_s = candidate.averaging_s
    length = paths.shape[1]
    longest_s = 0.0
    for m in microbatches:
        trip_s, remaining_s = 0.0, 0.0
        slot = paths[m, 0]
        for position in range(2 * length, -1, -1):
            node = node_of_slot[slot]
            stage = problem.stage_of_slot[slot]
            if problem.rings.waits and position > length and averaging_s[stage] > remaining_s:
                remaining_s = averaging_s[stage]
            seconds = operation_s(problem, node, stage, position, length)
            trip_s += seconds
            remaining_s += seconds
            scratch.slots[m, position] = slot
            scratch.seconds[m, position, OPERATION] = seconds
            scratch.seconds[m, position, TO_DATA_NODE] = trip_s
            scratch.seconds[m, position, TO_END] = remaining_s
            if position == 0:
                break
            before = slot_at(paths, m, position - 1, length)
            if before != slot:
                seconds = hop_seconds(problem, node_of_slot[before], node, position, length)
                scratch.seconds[m, position, HOP] = seconds
                trip_s += seconds
                remaining_s += seconds
                slot = before
        longest_s = max(longest_s, remaining_s)
    return longest_s


@kernel
def set_event(scratch, m, time_s):
    """Set the time of a microbatch's next event; infinite if it waits or has ended.

    Events are in a tournament tree, with a leaf for each lane: place i holds the earlier of the
    events at 2 i and 2 i + 1, and place 1 the next of all.
    """
    event_s, event_of = scratch.event_s, scratch.event_of
    i = (event_s.shape[0] >> 1) + scratch.lane[m]
    event_s[i] = time_s
    event_of[i] = m
    while i > 1:
        other = i ^ 1
        if event_s[other] < time_s:
            time_s = event_s[other]
            m = event_of[other]
        i >>= 1
        event_s[i] = time_s
        event_of[i] = m


@kernel
def send(problem, candidate, scratch, m, position, ready_s):
    """Send a microbatch to the slot of its next position; return its arrival [s]."""
    hop_s = scratch.seconds[m, position, HOP]
    if not problem.follow:
        return ready_s + hop_s
    source = candidate.node_of_slot[scratch.slots[m, position - 1]]
    target = candidate.node_of_slot[scratch.slots[m, position]]
    uplink_free_s, link_free_s = scratch.uplink_free_s, scratch.link_free_s
    if not problem.connections:
        arrival_s = max(ready_s, link_free_s[source, target]) + hop_s
        link_free_s[source, target] = arrival_s
        return arrival_s
    parts = problem.hops[int(position > candidate.paths.shape[1]), source, target]
    hop = parts[0], parts[1], parts[2], parts[3], parts[4]
    free_s = uplink_free_s[source] if hop[1] > -np.inf else -np.inf
    _, left_s, through_s, arrival_s = passed(ready_s, free_s, link_free_s[source, target], hop)
    if hop[1] > -np.inf:
        uplink_free_s[source] = left_s
    link_free_s[source, target] = through_s
    return arrival_s


@kernel
def _enqueue(scratch, slot, m, now):
    """Let a microbatch wait for a slot."""
    length, position = scratch.slots.shape[1] >> 1, scratch.position[m]
    kind = FORWARDS if position < length else LOSSES if position == length else BACKWARDS
    scratch.arrived_s[m] = now
    scratch.next_waiting[m] = -1
    if scratch.first_waiting[slot, kind] >= 0:
        scratch.next_waiting[scratch.last_waiting[slot, kind]] = m
    else:
        scratch.first_waiting[slot, kind] = m
    scratch.last_waiting[slot, kind] = m


@kernel
def _dequeue(scratch, slot):
    """Choose the waiting microbatch that a slot serves next, and remove it; -1 if there is none."""
    arrived_s, first = scratch.arrived_s, scratch.first_waiting
    kind = BACKWARDS
    if first[slot, BACKWARDS] < 0:
        kind = LOSSES
        forward = first[slot, FORWARDS]
        if forward >= 0 and scratch.free[slot] > 0:
            loss = first[slot, LOSSES]
            if loss < 0 or arrived_s[forward] < arrived_s[loss]:
                kind = FORWARDS
    m = first[slot, kind]
    if m >= 0:
        first[slot, kind] = scratch.next_waiting[m]
    return m


@kernel
def _can_end_by(scratch, m, position, now, of_mean, limit_s):
    """Return whether the cost can be below the limit, once a microbatch has reached a position.

    Without waits from there, it bounds the end of the iteration and that of its data node, which
    counts `of_mean` times.
    """
    least_s, slot_end_s = scratch.least_s, scratch.slot_end_s
    least_s[0] = max(least_s[0], now + scratch.seconds[m, position, TO_END])
    slot = scratch.slots[m, 0]
    end_s = now + scratch.seconds[m, position, TO_DATA_NODE]
    if end_s > slot_end_s[slot]:
        least_s[1] += of_mean * (end_s - slot_end_s[slot])
        slot_end_s[slot] = end_s
    return least_s[0] + least_s[1] < limit_s


@kernel
def _start(problem, order, scratch, slot, m, now):
    """Start the next operation of a microbatch on its slot."""
    count = scratch.slots.shape[1]
    position = scratch.position[m]
    if order.operations.shape[0] > 0:
        order.operations[scratch.next_in_order[slot]] = m * count + position
        scratch.next_in_order[slot] += 1
    if position < count >> 1:
        stage = problem.stage_of_slot[slot]
        scratch.free[slot] -= 1
        if position == 0:
            scratch.lane[m] = scratch.lanes[scratch.first_lane[slot] + scratch.free[slot]]
        scratch.stage_begin_s[stage] = min(scratch.stage_begin_s[stage], now)
    scratch.busy[slot] = True
    scratch.running[m] = True
    set_event(scratch, m, now + scratch.seconds[m, position, OPERATION])


@kernel
def evaluate(problem, candidate, order, scratch, limit_s, mean_weight):
    """Simulate a candidate: return iteration_s plus `mean_weight` times its data nodes' mean end.

    In outer mode, the time that the rings of all stages would add is part of that mean.

    A free node takes a backward before other operations, and otherwise the first arrival, as the
    dispatch of `simulate` does; its choices are written to `order` if it has room. Returns infinity
    if nodes deadlock or the result cannot be below `limit_s`.
    """
    if prepare(problem, candidate, scratch, scratch.every) >= limit_s:
        return np.inf
    return evaluate_prepared(problem, candidate, order, scratch, limit_s, mean_weight)


@kernel
def evaluate_prepared(problem, candidate, order, scratch, limit_s, mean_weight):
    """Judge a candidate as `evaluate` does, after `prepare`."""
    event_s, event_of, slots = scratch.event_s, scratch.event_of, scratch.slots
    running, busy = scratch.running, scratch.busy
    microbatches, length = candidate.paths.shape
    data_nodes = problem.first_slot[1]
    of_mean = mean_weight / data_nodes
    _clear(problem, candidate, order, scratch)
    for m in range(microbatches):
        _enqueue(scratch, slots[m, 0], m, 0.0)
        if not _can_end_by(scratch, m, 0, 0.0, of_mean, limit_s):
            return np.inf
    for slot in range(data_nodes):
        m = _dequeue(scratch, slot)
        if m >= 0:
            _start(problem, order, scratch, slot, m, 0.0)
    ended = 0
    while event_s[1] < np.inf:
        now, m = event_s[1], event_of[1]
        position = scratch.position[m]
        slot = slots[m, position]
        next_s = np.inf
        if running[m]:
            running[m] = busy[slot] = False
            if position > length:
                scratch.free[slot] += 1
                scratch.stage_end_s[problem.stage_of_slot[slot]] = now
            position += 1
            scratch.position[m] = position
            if position > 2 * length:
                ended += 1
                scratch.lanes[scratch.first_lane[slot] + scratch.free[slot] - 1] = scratch.lane[m]
            elif slots[m, position] != slot:
                next_s = send(problem, candidate, scratch, m, position, now)
                if not _can_end_by(scratch, m, position, next_s, of_mean, limit_s):
                    return np.inf
            else:
                _enqueue(scratch, slot, m, now)
        else:
            _enqueue(scratch, slot, m, now)
        chosen = -1 if busy[slot] else _dequeue(scratch, slot)
        if chosen != m:
            set_event(scratch, m, next_s)
        if chosen >= 0:
            if not _can_end_by(scratch, chosen, scratch.position[chosen], now, of_mean, limit_s):
                return np.inf
            _start(problem, order, scratch, slot, chosen, now)
    if ended < microbatches:
        return np.inf
    return _cost(problem, candidate, scratch, limit_s, mean_weight)


@kernel
def replay(problem, candidate, order, scratch, limit_s, mean_weight):
    """Judge a candidate as `evaluate` does, with nodes that run the operations of `order`."""
    if prepare(problem, candidate, scratch, scratch.every) >= limit_s:
        return np.inf
    return replay_prepared(problem, candidate, order, scratch, limit_s, mean_weight)


@kernel
def replay_prepared(problem, candidate, order, scratch, limit_s, mean_weight):
    """Judge a candidate as `replay` does, after `prepare`.

    As in `skippipe_sched.timing.replay`, there are no events: a slot runs until the input of its
    next operation is missing, and the operation that sends the input wakes the slot.
    """
    operations, first, next_in_order = order.operations, order.first, scratch.next_in_order
    microbatches, length = candidate.paths.shape
    count = 2 * length + 1
    _clear(problem, candidate, order, scratch)
    arrived_s, end_s, awake = scratch.arrived_s, scratch.slot_end_s, scratch.awake
    size = candidate.node_of_slot.shape[0]
    for q in range(size):
        awake[q] = q
        scratch.is_awake[q] = True
    ended = 0
    while size > 0:
        size -= 1
        slot = awake[size]
        scratch.is_awake[slot] = False
        stage = problem.stage_of_slot[slot]
        while next_in_order[slot] < first[slot + 1]:
            operation = operations[next_in_order[slot]]
            m, position = operation // count, operation % count
            if scratch.position[m] != position:
                break
            now = max(end_s[slot], arrived_s[m])
            if now + scratch.seconds[m, position, TO_END] >= limit_s:
                return np.inf
            if position < length:
                if scratch.free[slot] == 0:
                    return np.inf
                scratch.free[slot] -= 1
                scratch.stage_begin_s[stage] = min(scratch.stage_begin_s[stage], now)
            now += scratch.seconds[m, position, OPERATION]
            end_s[slot] = now
            if position > length:
                scratch.free[slot] += 1
                scratch.stage_end_s[stage] = max(scratch.stage_end_s[stage], now)
            next_in_order[slot] += 1
            position += 1
            scratch.position[m] = position
            if position == count:
                ended += 1
                continue
            target = scratch.slots[m, position]
            if target != slot:
                now = send(problem, candidate, scratch, m, position, now)
                if (
                    not scratch.is_awake[target]
                    and next_in_order[target] < first[target + 1]
                    and operations[next_in_order[target]] == operation + 1
                ):
                    scratch.is_awake[target] = True
                    awake[size] = target
                    size += 1
            arrived_s[m] = now
    if ended < microbatches:
        return np.inf
    return _cost(problem, candidate, scratch, limit_s, mean_weight)


@kernel
def _clear(problem, candidate, order, scratch):
    """Reset the buffers, with all microbatches ready at 0."""
    node_of_slot = candidate.node_of_slot
    microbatches, count = scratch.slots.shape
    scratch.least_s[0] = scratch.least_s[1] = 0.0
    for m in range(microbatches):
        scratch.position[m] = 0
        scratch.arrived_s[m] = 0.0
        scratch.running[m] = False
    for i in range(scratch.event_s.shape[0]):
        scratch.event_s[i] = np.inf
    lane = 0
    for q in range(node_of_slot.shape[0]):
        node = node_of_slot[q]
        scratch.busy[q] = False
        scratch.free[q] = problem.memory[node]
        scratch.slot_end_s[q] = 0.0
        scratch.uplink_free_s[node] = 0.0
        for kind in range(3):
            scratch.first_waiting[q, kind] = -1
        if order.operations.shape[0] > 0:
            scratch.next_in_order[q] = order.first[q]
        if q < problem.first_slot[1]:
            scratch.first_lane[q] = lane
            for _ in range(scratch.free[q]):
                scratch.lanes[lane] = lane
                lane += 1
    for stage in range(problem.ring_bytes.shape[0]):
        scratch.stage_begin_s[stage] = np.inf
        scratch.stage_end_s[stage] = 0.0
    if problem.follow:
        for m in range(microbatches):
            for position in range(1, count):
                source = node_of_slot[scratch.slots[m, position - 1]]
                scratch.link_free_s[source, node_of_slot[scratch.slots[m, position]]] = 0.0


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
