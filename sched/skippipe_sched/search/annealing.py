"""Compiled simulated annealing over placement, paths and order.

`settle` judges each move by a quick estimate; `anneal` by the whole iteration (`evaluate`), so that
placement, paths and order are searched together; and `polish` by the whole iteration in an order
that it changes too (`replay`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from skippipe_sched.search.arrays import (
    Candidate,
    Order,
    Problem,
    Scratch,
    beside_hops_s,
    copy,
    copy_array,
    copy_of,
    copy_order,
    hop_seconds,
    no_order,
    operation_s,
    scratch_for,
    sending_s,
    slot_at,
)
from skippipe_sched.search.compiled import fast, kernel
from skippipe_sched.search.evaluator import evaluate, evaluate_prepared, prepare, replay_prepared
from skippipe_sched.search.moves import (
    NODES,
    REPLICA,
    STAGE,
    Undo,
    below,
    draw_move,
    propose,
    random_state,
    revert,
    undo_for,
    uniform,
)
from skippipe_sched.timing.averaging import added_s


class Estimate(NamedTuple):
    """Quick estimate of a candidate [s], and that before the last move."""

    trip_s: np.ndarray  # microbatches: of each, divided by the memory of its data node
    busy_s: np.ndarray  # data nodes: the sum of their trips
    trip_before_s: np.ndarray
    busy_before_s: np.ndarray


class ChainState(NamedTuple):
    """Annealed candidate, its best state so far, and its own random numbers."""

    candidate: Candidate
    best: Candidate
    costs: np.ndarray  # 2: of the candidate, of the best [s]
    undo: Undo
    scratch: Scratch
    state: np.ndarray  # of the random number generator
    no_order: Order
    estimate: Estimate


class Cooling(NamedTuple):
    """Steps at a temperature [s] that falls by the factor `cooling` with each.

    `weights` are those of the moves; the mean end of the data nodes is added to the iteration with
    the weight `mean_weight`.
    """

    steps: int
    temperature: float
    cooling: float
    weights: np.ndarray
    mean_weight: float


def chain_from(problem: Problem, candidate: Candidate, seed: int) -> ChainState:
    """Start a chain at a candidate."""
    sizes = len(candidate.paths), problem.first_slot[1]
    return ChainState(
        candidate,
        copy_of(candidate),
        np.full(2, np.inf),
        undo_for(candidate),
        scratch_for(problem, *candidate.paths.shape),
        random_state(seed),
        no_order(),
        Estimate(*(np.zeros(size) for size in sizes * 2)),
    )


def dispatched_s(problem: Problem, chain: ChainState, mean_weight: float) -> float:
    """Compute the cost of a chain's candidate [s] with the dispatch of `simulate`."""
    rest = chain.no_order, chain.scratch, np.inf, mean_weight
    return fast(evaluate)(problem, chain.candidate, *rest)


@kernel
def prepare_changed(problem, chain, move):
    """Prepare the microbatches that a move has changed; return their bound of the iteration [s]."""
    changed = chain.scratch.every if move == NODES else chain.undo.microbatches
    return prepare(problem, chain.candidate, chain.scratch, changed)


@kernel
def take_back(problem, chain, move, made):
    """Undo the last move as `revert` does, and prepare what it has changed."""
    revert(problem, chain.candidate, chain.undo, move, made)
    if made:
        prepare_changed(problem, chain, move)


@kernel
def anneal(problem, chain, piece):
    """Run the moves of a piece; store the best candidate in ``chain.best``."""
    candidate, costs, state, order = chain.candidate, chain.costs, chain.state, chain.no_order
    scratch, mean_weight = chain.scratch, piece.mean_weight
    temperature = piece.temperature
    prepare(problem, candidate, scratch, scratch.every)
    for _ in range(piece.steps):
        temperature *= piece.cooling
        move = draw_move(piece.weights, state)
        made = propose(problem, candidate, chain.undo, move, state)
        if made:
            # The threshold is drawn first, so that a simulation can stop once the move cannot be
            # accepted.
            limit = costs[0] - temperature * math.log(1.0 - uniform(state))
            if prepare_changed(problem, chain, move) < limit:
                cost = evaluate_prepared(problem, candidate, order, scratch, limit, mean_weight)
                if cost < limit:
                    costs[0] = cost
                    if cost < costs[1]:
                        costs[1] = cost
                        copy(candidate, chain.best)
                    continue
        take_back(problem, chain, move, made)


# The quick estimate of `settle` is between the mean and the maximum over the data nodes.
POWER = 8.0


@kernel
def _round_trip_s(problem, candidate, microbatch):
    """Compute a microbatch's trip without waits, divided by the memory of its data node [s]."""
    paths = candidate.paths
    length = paths.shape[1]
    seconds = 0.0
    before = paths[microbatch, 0]
    for position in range(2 * length + 1):
        slot = slot_at(paths, microbatch, position, length)
        source, node = candidate.node_of_slot[before], candidate.node_of_slot[slot]
        if slot != before:
            seconds += hop_seconds(problem, source, node, position, length)
        stage = problem.stage_of_slot[slot]
        seconds += operation_s(problem, node, stage, position, length)
        before = slot
    return seconds / problem.memory[candidate.node_of_slot[paths[microbatch, 0]]]


@kernel
def _estimate(problem, candidate, busy_s):
    """Estimate the iteration from the time that each data node waits for its microbatches."""
    data_nodes = problem.first_slot[1]
    largest = 0.0
    for slot in range(data_nodes):
        largest = max(largest, busy_s[slot])
    total = 0.0
    for slot in range(data_nodes):
        total += (busy_s[slot] / largest) ** POWER
    pipeline_s = largest * (total / data_nodes) ** (1.0 / POWER)
    if problem.connections:
        for stage in range(problem.ring_bytes.shape[0]):
            pipeline_s = max(pipeline_s, sending_s(problem, candidate, stage))
    averaging_s = candidate.averaging_s
    own_s, greatest_s, total_s = 0.0, 0.0, 0.0
    for stage in range(averaging_s.shape[0]):
        seconds = beside_hops_s(problem, candidate, stage)
        seconds = added_s(problem.rings, seconds, pipeline_s, pipeline_s)
        if stage == 0:
            own_s = seconds
        greatest_s = max(greatest_s, seconds)
        total_s += seconds
    # Stages after the first end before the data stage, which hides much of their averaging.
    longest_s = max(own_s, 0.7 * greatest_s)
    return pipeline_s + longest_s + 0.2 * (total_s / averaging_s.shape[0])


@kernel
def settle(problem, chain, piece):
    """Anneal as `anneal` does, but by a quick estimate of the iteration instead of the simulation.

    The estimate ignores waits for nodes or links. It serves to find a start for annealing, and for
    cases so large that there is time for only a few simulations.
    """
    candidate, undo, state = chain.candidate, chain.undo, chain.state
    temperature = piece.temperature
    microbatches = candidate.paths.shape[0]
    data_nodes = problem.first_slot[1]
    trip_s, busy_s, trips_before, busy_before = chain.estimate
    for slot in range(data_nodes):
        busy_s[slot] = 0.0
    for m in range(microbatches):
        trip_s[m] = _round_trip_s(problem, candidate, m)
        busy_s[candidate.paths[m, 0]] += trip_s[m]
    current = _estimate(problem, candidate, busy_s)
    for _ in range(piece.steps):
        temperature *= piece.cooling
        move = draw_move(piece.weights, state)
        if not propose(problem, candidate, undo, move, state):
            revert(problem, candidate, undo, move, False)
            continue
        if move == NODES:
            copy_array(trip_s, trips_before)
            copy_array(busy_s, busy_before)
            for slot in range(data_nodes):
                busy_s[slot] = 0.0
            for m in range(microbatches):
                trip_s[m] = _round_trip_s(problem, candidate, m)
                busy_s[candidate.paths[m, 0]] += trip_s[m]
        else:
            for m in undo.microbatches:
                slot = candidate.paths[m, 0]
                trips_before[m] = trip_s[m]
                busy_before[slot] = busy_s[slot]
            for m in undo.microbatches:
                now_s = _round_trip_s(problem, candidate, m)
                busy_s[candidate.paths[m, 0]] += now_s - trip_s[m]
                trip_s[m] = now_s
        cost = _estimate(problem, candidate, busy_s)
        if cost < current - temperature * math.log(1.0 - uniform(state)):
            current = cost
            continue
        revert(problem, candidate, undo, move, True)
        if move == NODES:
            copy_array(trips_before, trip_s)
            copy_array(busy_before, busy_s)
        else:
            for m in undo.microbatches:
                trip_s[m] = trips_before[m]
            for m in undo.microbatches:
                busy_s[candidate.paths[m, 0]] = busy_before[candidate.paths[m, 0]]


# Share of the moves of `polish` that change paths and not the order alone.
PATH_MOVES_SHARE = 0.25
FARTHEST_ROTATION = 4


@kernel
def polish(problem, chain, orders, piece):
    """Anneal a candidate together with the order on its nodes, both in place.

    `orders` are the order, and buffers for the best and the last one.

    Here a node may wait for an operation although another has arrived, which dispatch never does.
    Most moves change the order; the others change the paths, by the moves of `weights`, and then
    microbatches that exchange visits also exchange their positions in the orders.
    """
    candidate, undo, state = chain.candidate, chain.undo, chain.state
    order, best_order, before = orders
    operations, first = order.operations, order.first
    temperature = piece.temperature
    count = 2 * candidate.paths.shape[1] + 1
    copy(candidate, chain.best)
    copy_order(order, best_order)
    scratch, mean_weight = chain.scratch, piece.mean_weight
    prepare(problem, candidate, scratch, scratch.every)
    current = replay_prepared(problem, candidate, order, scratch, np.inf, mean_weight)
    least = current
    for _ in range(piece.steps):
        temperature *= piece.cooling
        changes_paths = uniform(state) < PATH_MOVES_SHARE
        move = -1
        slot_begin, slot_end, forward = 0, 0, True
        if changes_paths:
            move = draw_move(piece.weights, state)
            if not propose(problem, candidate, undo, move, state):
                revert(problem, candidate, undo, move, False)
                continue
            if move != NODES:
                copy_order(order, before)
                if move in (REPLICA, STAGE):
                    _follow_relocation(candidate, undo, order, before.operations, state)
                else:
                    _follow_paths(candidate, undo, order)
            prepare_changed(problem, chain, move)
        else:
            slot = below(state, candidate.node_of_slot.shape[0])
            room = first[slot + 1] - first[slot]
            if room < 2:
                continue
            # Move one operation past a few others, forward or back.
            slot_begin = first[slot] + below(state, room - 1)
            farthest = min(FARTHEST_ROTATION, first[slot + 1] - slot_begin - 1)
            slot_end = slot_begin + 1 + below(state, farthest)
            forward = uniform(state) < 0.5
            moved = operations[slot_begin if forward else slot_end]
            own = 0
            for place in range(slot_begin, slot_end + 1):
                own += operations[place] // count == moved // count
            if own > 1:
                continue
            _rotate(operations, slot_begin, slot_end, forward)
        limit = current - temperature * math.log(1.0 - uniform(state))
        cost = replay_prepared(problem, candidate, order, scratch, limit, mean_weight)
        if cost < limit:
            current = cost
            if cost < least:
                least = cost
                copy(candidate, chain.best)
                copy_order(order, best_order)
        elif changes_paths:
            take_back(problem, chain, move, True)
            if move != NODES:
                copy_order(before, order)
        else:
            _rotate(operations, slot_begin, slot_end, not forward)
    copy(chain.best, candidate)
    copy_order(best_order, order)


@kernel
def _follow_paths(candidate, undo, order):
    """Exchange the positions of two microbatches in the orders after they exchange visits."""
    paths, first, operations = candidate.paths, order.first, order.operations
    length = paths.shape[1]
    count = 2 * length + 1
    for side in range(2):
        mine, other = undo.microbatches[side], undo.microbatches[1 - side]
        for i in range(1, length):
            slot = undo.paths[side, i]
            left = True
            for k in range(1, length):
                left = left and paths[mine, k] != slot
            if left:
                for place in range(first[slot], first[slot + 1]):
                    # Marked, so that the other's turn does not take it back.
                    if operations[place] >= 0 and operations[place] // count == mine:
                        operations[place] = -1 - other
    for side in range(2):
        m = undo.microbatches[side]
        for i in range(1, length):
            slot = paths[m, i]
            position = i
            for place in range(first[slot], first[slot + 1]):
                if operations[place] == -1 - m or (
                    operations[place] >= 0 and operations[place] // count == m
                ):
                    operations[place] = m * count + position
                    position = 2 * length - i


@kernel
def _follow_relocation(candidate, undo, order, before, state):
    """Move a relocated microbatch from one slot's order to random positions in the other's."""
    operations, first = order.operations, order.first
    length = candidate.paths.shape[1]
    count = 2 * length + 1
    m = undo.microbatches[0]
    i = 1
    while candidate.paths[m, i] == undo.paths[0, i]:
        i += 1
    source, target = undo.paths[0, i], candidate.paths[m, i]
    room = first[target + 1] - first[target]
    forward_at, backward_at = below(state, room + 1), below(state, room + 1)
    if forward_at > backward_at:
        forward_at, backward_at = backward_at, forward_at
    written = 0
    for slot in range(candidate.node_of_slot.shape[0]):
        begin, end = first[slot], first[slot + 1]
        # The old `first` of this slot is no longer needed; that of the next slot is, until its
        # turn.
        first[slot] = written
        for place in range(begin, end + 1):
            if slot == target and place - begin == forward_at:
                operations[written] = m * count + i
                written += 1
            if slot == target and place - begin == backward_at:
                operations[written] = m * count + 2 * length - i
                written += 1
            if place < end and not (slot == source and before[place] // count == m):
                operations[written] = before[place]
                written += 1


@kernel
def _rotate(operations, i, k, forward):
    """Move operation i to k past those between, or if not `forward` operation k to i."""
    if forward:
        moved = operations[i]
        for place in range(i, k):
            operations[place] = operations[place + 1]
        operations[k] = moved
    else:
        moved = operations[k]
        for place in range(k, i, -1):
            operations[place] = operations[place - 1]
        operations[i] = moved
