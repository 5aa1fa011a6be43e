"""The timing model compiled, for searches that ask it tens of thousands of times a second.

It is `simulate` again, on arrays: the same events, the same dispatch, the same averaging; a test
holds the two together. What a plan is finally said to take, `simulate` says. Two things differ.
A search wants to know only whether a candidate is better than what it has, so a simulation stops
as soon as it cannot be; and dispatch without an order does not look ahead for nodes that lock
against each other: a candidate that locks costs infinity, never less.

A candidate is placed on slots: slot q belongs to stage `stage_of_slot[q]`, and `node_of_slot[q]`
is the node that serves it. Paths are written in slots, so that two nodes swap places by swapping
two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import KINDS, NodePath, Operation, microbatch_chain
from skippipe_sched.search.compiled import compiled
from skippipe_sched.timing.averaging import ring_s, settle_ring

# In compiled code an operation is its position in the microbatch's chain (plan.microbatch_chain):
# with paths of `length` nodes, F at 0 .. length - 1, L at length, B at length + 1 .. 2 * length.


class Problem(NamedTuple):
    """A case as arrays; lengths in the comments."""

    forward_s: np.ndarray  # nodes
    memory: np.ndarray  # nodes
    hop_s: np.ndarray  # nodes, nodes
    latency_s: np.ndarray  # nodes, nodes
    bandwidth: np.ndarray  # nodes, nodes
    stage_of_slot: np.ndarray  # slots
    first_slot: np.ndarray  # stages + 1
    stage_cost: np.ndarray  # stages
    stage_bytes: np.ndarray  # stages
    rules: np.ndarray  # max_swaps, max_swap_distance, max_jump
    backward_ratio: float
    loss_ratio: float
    one_after_another: bool  # on each directed link (contention "link")
    unequal: bool  # nodes differ in speed


class Scratch(NamedTuple):
    """What one simulation at a time writes to."""

    position: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    event_s: np.ndarray
    event_of: np.ndarray
    next_waiting: np.ndarray
    first_waiting: np.ndarray
    last_waiting: np.ndarray
    busy: np.ndarray
    free: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    remaining_s: np.ndarray
    stage_end_s: np.ndarray
    data_end_s: np.ndarray
    link_free_s: np.ndarray
    next_in_order: np.ndarray


class Stretches(NamedTuple):
    """`simulate.Stretch` as arrays; several draws of it have one more axis in front."""

    operations: np.ndarray  # microbatches, 2 * length + 1
    hops: np.ndarray  # microbatches, 2 * length + 1
    averagings: np.ndarray  # stages


NO_STRETCH = Stretches(np.ones((0, 0)), np.ones((0, 0)), np.ones(0))
NO_DRAWS = Stretches(np.ones((0, 1, 1)), np.ones((0, 1, 1)), np.ones((0, 1)))
NO_ORDER = np.zeros(0, np.int64)


def problem_of(case: Case) -> Problem:
    """The arrays of a case."""
    latency, bandwidth = case.link_matrices
    forward = np.array([node.forward_s for node in case.nodes])
    # Limits beyond the number of stages mean nothing more, and must fit a machine's integer.
    rules = (case.rules.max_swaps, case.rules.max_swap_distance, case.rules.max_jump)
    return Problem(
        forward_s=forward,
        memory=np.array([min(node.memory, sum(case.microbatches)) for node in case.nodes]),
        hop_s=np.ascontiguousarray(case.hop_s),
        latency_s=np.ascontiguousarray(latency),
        bandwidth=np.ascontiguousarray(bandwidth),
        stage_of_slot=np.repeat(np.arange(len(case.stages)), case.stages),
        first_slot=np.cumsum([0, *case.stages]),
        stage_cost=np.array(case.stage_cost),
        stage_bytes=np.array(case.stage_bytes),
        rules=np.array([min(limit, len(case.stages)) for limit in rules]),
        backward_ratio=case.backward_ratio,
        loss_ratio=case.loss_ratio,
        one_after_another=case.contention == "link",
        unequal=bool((forward != forward[0]).any()),
    )


def scratch_for(problem: Problem, microbatches: int, length: int) -> Scratch:
    """Room for simulations of paths of `length` nodes."""
    slots, stages = len(problem.stage_of_slot), len(problem.stage_bytes)
    links = (slots, slots) if problem.one_after_another else (1, 1)
    return Scratch(
        position=np.zeros(microbatches, np.int64),
        running=np.zeros(microbatches, np.bool_),
        waiting=np.zeros(microbatches, np.bool_),
        event_s=np.zeros(microbatches + 1),
        event_of=np.zeros(microbatches + 1, np.int64),
        next_waiting=np.zeros(microbatches, np.int64),
        first_waiting=np.zeros(slots, np.int64),
        last_waiting=np.zeros(slots, np.int64),
        busy=np.zeros(slots, np.bool_),
        free=np.zeros(slots, np.int64),
        touched=np.zeros(slots, np.int64),
        is_touched=np.zeros(slots, np.bool_),
        remaining_s=np.zeros((microbatches, 2 * length + 1)),
        stage_end_s=np.zeros(stages),
        data_end_s=np.zeros(slots),
        link_free_s=np.zeros(links),
        next_in_order=np.zeros(slots, np.int64),
    )


def as_operations(
    order: Int[np.ndarray, " operations"],
    first: Int[np.ndarray, " slots+1"],
    node_of_slot: Int[np.ndarray, " slots"],
    paths: Sequence[NodePath],
) -> tuple[tuple[Operation, ...], ...]:
    """An order on slots, as the order of every node."""
    chains = [microbatch_chain(m, path) for m, path in enumerate(paths)]
    count = len(chains[0])
    of_node: list[tuple[Operation, ...]] = [()] * len(node_of_slot)
    for slot, node in enumerate(node_of_slot):
        codes = order[first[slot] : first[slot + 1]]
        of_node[node] = tuple(chains[code // count][code % count] for code in codes)
    return tuple(of_node)


def dispatch_priority(microbatches: int, length: int) -> Float[np.ndarray, "microbatches chain"]:
    """The priorities with which dispatch is that of `simulate`: backward before the others."""
    of_kind = {kind: float(kind == "B") for kind in KINDS}
    chain = microbatch_chain(0, range(length))
    return np.tile([of_kind[operation.kind] for operation in chain], (microbatches, 1))


@compiled
def slot_at(paths, microbatch, position, length):
    """The slot of the operation at a position of a microbatch's chain."""
    if position < length:
        return paths[microbatch, position]
    if position == length:
        return paths[microbatch, 0]
    return paths[microbatch, 2 * length - position]


@compiled
def operation_s(problem, node, stage, position, length):
    """Seconds of the operation at a position of a chain."""
    forward_s = problem.forward_s[node] * problem.stage_cost[stage]
    if position < length:
        return forward_s
    if position == length:
        return forward_s * problem.loss_ratio
    return forward_s * problem.backward_ratio


@compiled
def set_averaging(problem, node_of_slot, stage, averaging_s):
    """Put down how long a stage averages over its best ring."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    if end - begin < 2:
        averaging_s[stage] = 0.0
        return
    ring = node_of_slot[begin:end].copy()
    settle_ring(problem.latency_s, problem.bandwidth, problem.stage_bytes[stage], ring)
    averaging_s[stage] = ring_s(
        problem.latency_s, problem.bandwidth, problem.stage_bytes[stage], ring
    )


@compiled
def first_of_slots(paths, slots):
    """Where the operations of each slot begin in a flat order of all slots."""
    microbatches, length = paths.shape
    first = np.zeros(slots + 1, np.int64)
    for m in range(microbatches):
        for i in range(length):
            first[paths[m, i] + 1] += 2 if i else 3
    for q in range(slots):
        first[q + 1] += first[q]
    return first


@compiled
def _push(event_s, event_of, size, time_s, microbatch):
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


@compiled
def _pop(event_s, event_of, size):
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


@compiled
def _set_remaining(problem, node_of_slot, paths, averaging_s, scratch, limit_s):
    """Seconds from the start of each operation to the end, if nothing waits; False if over limit.

    Links are marked as free on the way.
    """
    microbatches, length = paths.shape
    for m in range(microbatches):
        remaining_s = 0.0
        slot = paths[m, 0]
        for position in range(2 * length, -1, -1):
            node = node_of_slot[slot]
            stage = problem.stage_of_slot[slot]
            if position > length and averaging_s[stage] > remaining_s:
                remaining_s = averaging_s[stage]
            remaining_s += operation_s(problem, node, stage, position, length)
            scratch.remaining_s[m, position] = remaining_s
            if position == 0:
                break
            before = slot_at(paths, m, position - 1, length)
            if before != slot:
                source = node_of_slot[before]
                remaining_s += problem.hop_s[source, node]
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
def evaluate(
    problem,
    node_of_slot,
    paths,
    averaging_s,
    priority,
    order,
    first,
    ordered,
    stretch,
    scratch,
    limit_s,
    mean_weight,
):
    """iteration_s of a candidate, plus `mean_weight` times the mean end of its data nodes.

    With `ordered`, nodes run the operations of `order` (flat, slot after slot, beginning at
    `first`) in that order. Without, a free node takes the operation with the highest `priority`,
    first come first served among equals, and what it took is written to `order` if there is room.
    Infinity where nodes lock against each other or the result cannot be below `limit_s`.
    """
    microbatches, length = paths.shape
    slots = node_of_slot.shape[0]
    stages = problem.stage_bytes.shape[0]
    last = 2 * length
    count = last + 1
    recording = not ordered and order.shape[0] > 0
    stretched = stretch.operations.shape[0] > 0
    if not _set_remaining(problem, node_of_slot, paths, averaging_s, scratch, limit_s):
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
        scratch.stage_end_s[stage] = 0.0
    size = 0
    for m in range(microbatches):
        scratch.position[m] = 0
        scratch.running[m] = False
        scratch.waiting[m] = False
        _push(scratch.event_s, scratch.event_of, size, 0.0, m)
        size += 1
    ended = 0
    while size > 0:
        now = scratch.event_s[0]
        touched = 0
        while size > 0 and scratch.event_s[0] == now:
            m = scratch.event_of[0]
            _pop(scratch.event_s, scratch.event_of, size)
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
                    hop_s = problem.hop_s[source, target]
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
                    _push(scratch.event_s, scratch.event_of, size, start_s + hop_s, m)
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
                m = order[following] // count
                position = order[following] % count
                if not scratch.waiting[m] or scratch.position[m] != position:
                    continue
                if position < length and scratch.free[slot] == 0:
                    continue
                scratch.next_in_order[slot] += 1
            else:
                m, before = _chosen(scratch, slot, priority, length)
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
                    order[scratch.next_in_order[slot]] = m * count + position
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
            scratch.busy[slot] = True
            scratch.running[m] = True
            scratch.waiting[m] = False
            _push(scratch.event_s, scratch.event_of, size, now + seconds, m)
            size += 1
        if over:
            return np.inf
    if ended < microbatches:
        return np.inf
    iteration_s = 0.0
    for stage in range(stages):
        seconds = averaging_s[stage]
        if stretched:
            seconds *= stretch.averagings[stage]
        iteration_s = max(iteration_s, scratch.stage_end_s[stage] + seconds)
    data_nodes = problem.first_slot[1]
    mean_s = 0.0
    for slot in range(data_nodes):
        mean_s += scratch.data_end_s[slot] / data_nodes
    cost_s = iteration_s + mean_weight * mean_s
    return cost_s if cost_s < limit_s else np.inf
