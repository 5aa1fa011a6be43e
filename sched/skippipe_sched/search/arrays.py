"""Data of compiled code: a case, a candidate and an order as arrays.

A candidate is placed on slots: slot q belongs to stage `stage_of_slot[q]`, and `node_of_slot[q]` is
the node that serves it. Paths are stored as slots, so that two nodes trade places by swapping two
numbers. An operation is its position in the microbatch's chain (plan.microbatch_chain): with paths
of `length` nodes, F at 0 .. length - 1, L at length, B at length + 1 .. 2 * length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation, microbatch_chain
from skippipe_sched.search.compiled import allocating_kernel, fast, kernel
from skippipe_sched.timing.averaging import (
    Rings,
    bytes_of_rings,
    ring_s,
    rings_of_iteration,
    settle_ring,
)
from skippipe_sched.timing.hops import parts_of_hops

# Seconds of an operation: its own, of the hop before it, and without waits from its start to the
# end of its microbatch and to that of the iteration.
OPERATION, HOP, TO_DATA_NODE, TO_END = range(4)


class Problem(NamedTuple):
    """A case as arrays, with shapes in the comments."""

    forward_s: np.ndarray  # nodes
    memory: np.ndarray  # nodes
    forward_hop_s: np.ndarray  # nodes, nodes
    backward_hop_s: np.ndarray  # nodes, nodes
    follow: bool  # whether hops on a directed link follow one another
    connections: bool  # whether nodes share connections: only then `hops` are filled
    hops: np.ndarray  # 2, nodes, nodes, 5: of activations and of gradients (timing.hops.Parts)
    location: np.ndarray  # nodes
    visit_load_s: np.ndarray  # nodes: of their connections; 0 where these are not shared
    latency_s: np.ndarray  # nodes, nodes
    bandwidth: np.ndarray  # nodes, nodes
    stage_of_slot: np.ndarray  # slots
    first_slot: np.ndarray  # stages + 1
    stage_cost: np.ndarray  # stages
    ring_bytes: np.ndarray  # stages: of an all-reduce that is as long as a ring, or twice as long
    rings: Rings
    rules: np.ndarray  # max_swaps, max_swap_distance, max_jump
    backward_ratio: float
    loss_ratio: float
    unequal: bool  # whether nodes differ in speed or `visit_load_s`


class Candidate(NamedTuple):
    """A placement, and paths as slots."""

    node_of_slot: np.ndarray  # slots
    paths: np.ndarray  # microbatches, length
    averaging_s: np.ndarray  # stages
    visits: np.ndarray  # slots


class Order(NamedTuple):
    """Operations of all slots, slot after slot; those of slot q begin at ``first[q]``.

    An operation is its microbatch times 2 * length + 1, plus its position.
    """

    operations: np.ndarray
    first: np.ndarray  # slots + 1


class Scratch(NamedTuple):
    """Buffers of one simulation at a time.

    The first two hold the operations of a candidate, as `prepare` writes them. The microbatches in
    flight have a lane each, and `lanes` are the unused ones of each data node.
    """

    slots: np.ndarray  # microbatches, 2 * length + 1
    seconds: np.ndarray  # microbatches, 2 * length + 1, 4: see OPERATION and the next three
    every: np.ndarray  # microbatches: their numbers
    position: np.ndarray  # microbatches, as of the next five
    running: np.ndarray
    arrived_s: np.ndarray
    next_waiting: np.ndarray
    lane: np.ndarray
    event_s: np.ndarray  # 2 * the least power of two that holds all lanes
    event_of: np.ndarray
    lanes: np.ndarray
    first_lane: np.ndarray  # data nodes
    first_waiting: np.ndarray  # slots, kinds of operations
    last_waiting: np.ndarray
    busy: np.ndarray  # slots, as of the next five
    free: np.ndarray
    awake: np.ndarray
    is_awake: np.ndarray
    slot_end_s: np.ndarray
    next_in_order: np.ndarray
    stage_begin_s: np.ndarray
    stage_end_s: np.ndarray
    link_free_s: np.ndarray
    uplink_free_s: np.ndarray
    least_s: np.ndarray  # 2: bounds of the iteration, and of the weighted mean


def problem_of(case: Case) -> Problem:
    """Convert a case to arrays."""
    latency, bandwidth = case.link_matrices
    forward = np.array([node.forward_s for node in case.nodes])
    # Limits beyond the number of stages have no further effect, and must fit a machine integer.
    rules = (case.rules.max_swaps, case.rules.max_swap_distance, case.rules.max_jump)
    return Problem(
        forward_s=forward,
        memory=np.array([min(node.memory, sum(case.microbatches)) for node in case.nodes]),
        forward_hop_s=np.ascontiguousarray(case.forward_hop_s),
        backward_hop_s=np.ascontiguousarray(case.backward_hop_s),
        follow=case.contention != "none",
        connections=case.shares_connections,
        hops=parts_of_hops(case) if case.shares_connections else np.zeros((2, 1, 1, 5)),
        location=case.location_matrices[0],
        visit_load_s=case.visit_load_s,
        latency_s=np.ascontiguousarray(latency),
        bandwidth=np.ascontiguousarray(bandwidth),
        stage_of_slot=np.repeat(np.arange(len(case.stages)), case.stages),
        first_slot=np.cumsum([0, *case.stages]),
        stage_cost=np.array(case.stage_cost),
        ring_bytes=bytes_of_rings(case),
        rings=rings_of_iteration(case.averaging),
        rules=np.array([min(limit, len(case.stages)) for limit in rules]),
        backward_ratio=case.backward_ratio,
        loss_ratio=case.loss_ratio,
        unequal=any((each != each[0]).any() for each in (forward, case.visit_load_s)),
    )


def candidate_of(problem: Problem, node_of_slot: np.ndarray, paths: np.ndarray) -> Candidate:
    """Make a candidate, with its averaging times and visits."""
    averaging_s = np.zeros(len(problem.ring_bytes))
    for stage in range(len(averaging_s)):
        fast(set_averaging)(problem, node_of_slot, stage, averaging_s)
    visits = np.bincount(paths.ravel(), minlength=len(node_of_slot))
    return Candidate(node_of_slot.copy(), paths.copy(), averaging_s, visits)


def scratch_for(problem: Problem, microbatches: int, length: int) -> Scratch:
    """Allocate buffers for simulations of paths of `length` nodes."""
    slots, stages = len(problem.stage_of_slot), len(problem.ring_bytes)
    # By all nodes: slots may be fewer, if other nodes belong to another pipeline.
    nodes = len(problem.forward_s)
    links = (nodes, nodes) if problem.follow else (1, 1)
    operations = microbatches, 2 * length + 1
    data_nodes = problem.first_slot[1]
    lanes = int(np.sort(problem.memory)[-data_nodes:].sum())
    places = 2 << (lanes - 1).bit_length()
    return Scratch(
        slots=np.zeros(operations, np.int64),
        seconds=np.zeros((*operations, 4)),
        every=np.arange(microbatches),
        position=np.zeros(microbatches, np.int64),
        running=np.zeros(microbatches, np.bool_),
        arrived_s=np.zeros(microbatches),
        next_waiting=np.zeros(microbatches, np.int64),
        lane=np.zeros(microbatches, np.int64),
        event_s=np.zeros(places),
        event_of=np.zeros(places, np.int64),
        lanes=np.zeros(lanes, np.int64),
        first_lane=np.zeros(data_nodes, np.int64),
        first_waiting=np.zeros((slots, 3), np.int64),
        last_waiting=np.zeros((slots, 3), np.int64),
        busy=np.zeros(slots, np.bool_),
        free=np.zeros(slots, np.int64),
        awake=np.zeros(slots, np.int64),
        is_awake=np.zeros(slots, np.bool_),
        slot_end_s=np.zeros(slots),
        next_in_order=np.zeros(slots, np.int64),
        stage_begin_s=np.zeros(stages),
        stage_end_s=np.zeros(stages),
        link_free_s=np.zeros(links),
        uplink_free_s=np.zeros(nodes),
        least_s=np.zeros(2),
    )


def order_for(candidate: Candidate) -> Order:
    """Allocate an order of a candidate's operations, which dispatch fills."""
    visits = 2 * candidate.visits + np.bincount(
        candidate.paths[:, 0], minlength=len(candidate.visits)
    )
    first = np.concatenate([[0], np.cumsum(visits)])
    return Order(np.zeros(first[-1], np.int64), first)


def no_order() -> Order:
    """Return an empty order: dispatch chooses, and records nothing."""
    return Order(np.zeros(0, np.int64), np.zeros(0, np.int64))


def as_operations(
    order: Order, candidate: Candidate, paths: Sequence[NodePath]
) -> tuple[tuple[Operation, ...], ...]:
    """Convert an order on slots to one of every node; `paths` are the candidate's, as nodes."""
    chains = [microbatch_chain(m, path) for m, path in enumerate(paths)]
    count = len(chains[0])
    of_node: list[tuple[Operation, ...]] = [()] * len(candidate.node_of_slot)
    for slot, node in enumerate(candidate.node_of_slot):
        codes = order.operations[order.first[slot] : order.first[slot + 1]]
        of_node[node] = tuple(chains[code // count][code % count] for code in codes)
    return tuple(of_node)


@kernel
def copy_array(source, target):
    """Copy an array into another."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@kernel
def copy(source, target):
    """Copy a candidate into another."""
    copy_array(source.node_of_slot, target.node_of_slot)
    copy_array(source.averaging_s, target.averaging_s)
    copy_array(source.visits, target.visits)
    for m in range(source.paths.shape[0]):
        for i in range(source.paths.shape[1]):
            target.paths[m, i] = source.paths[m, i]


@kernel
def copy_order(source, target):
    """Copy an order into another."""
    copy_array(source.operations, target.operations)
    copy_array(source.first, target.first)


def copy_of(candidate: Candidate) -> Candidate:
    """Return a copy of a candidate."""
    return Candidate(*(array.copy() for array in candidate))


@kernel
def slot_at(paths, microbatch, position, length):
    """Return the slot of the operation at a position of a microbatch's chain."""
    if position < length:
        return paths[microbatch, position]
    if position == length:
        return paths[microbatch, 0]
    return paths[microbatch, 2 * length - position]


@kernel
def operation_s(problem, node, stage, position, length):
    """Compute the seconds of the operation at a position of a chain."""
    forward_s = problem.forward_s[node] * problem.stage_cost[stage]
    if position < length:
        return forward_s
    if position == length:
        return forward_s * problem.loss_ratio
    return forward_s * problem.backward_ratio


@kernel
def hop_seconds(problem, source, target, position, length):
    """Return the seconds of the hop between nodes to the operation at a position of a chain."""
    if position > length:
        return problem.backward_hop_s[source, target]
    return problem.forward_hop_s[source, target]


@kernel
def visit_s(problem, node, stage):
    """Compute the effective `forward_s` of a node that serves `stage`, as `Case.visit_s` [s]."""
    of_stage = problem.stage_cost[stage] * (1.0 + problem.backward_ratio)
    return max(problem.forward_s[node], problem.visit_load_s[node] / of_stage)


@kernel
def sending_s(problem, candidate, stage):
    """Compute the time that hops occupy the busiest connection of a stage's replicas [s]."""
    busiest_s = 0.0
    for slot in range(problem.first_slot[stage], problem.first_slot[stage + 1]):
        load_s = problem.visit_load_s[candidate.node_of_slot[slot]]
        busiest_s = max(busiest_s, candidate.visits[slot] * load_s)
    return busiest_s


@kernel
def leaves_location(problem, candidate, stage):
    """Return whether a stage's ring uses shared connections."""
    if not problem.connections:
        return False
    location, begin = problem.location, problem.first_slot[stage]
    first = location[candidate.node_of_slot[begin]]
    for slot in range(begin + 1, problem.first_slot[stage + 1]):
        if location[candidate.node_of_slot[slot]] != first:
            return True
    return False


@kernel
def beside_hops_s(problem, candidate, stage):
    """Compute the duration of a stage's ring, slowed by hops on its connections [s]."""
    seconds = candidate.averaging_s[stage]
    if leaves_location(problem, candidate, stage):
        seconds += problem.rings.delay * sending_s(problem, candidate, stage)
    return seconds


@allocating_kernel
def set_averaging(problem, node_of_slot, stage, averaging_s):
    """Set the averaging time of a stage over its best ring, or of one of its fragments."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    if end - begin < 2:
        averaging_s[stage] = 0.0
        return
    ring = node_of_slot[begin:end].copy()
    settle_ring(problem.latency_s, problem.bandwidth, problem.ring_bytes[stage], ring)
    seconds = ring_s(problem.latency_s, problem.bandwidth, problem.ring_bytes[stage], ring)
    averaging_s[stage] = problem.rings.of_all_reduce * seconds
