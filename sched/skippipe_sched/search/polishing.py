"""Annealing of a candidate together with the order on its nodes, compiled."""

from __future__ import annotations

import numpy as np

from skippipe_sched.search.arrays import Stretches, copy, copy_of, no_stretch
from skippipe_sched.search.chance import below, uniform
from skippipe_sched.search.compiled import compiled
from skippipe_sched.search.evaluator import evaluate
from skippipe_sched.search.moves import NODES, REPLICA, STAGE, draw_move, propose, revert

# Of the moves of `polish`, so many change paths and not the order alone.
PATH_MOVES_SHARE = 0.25
FARTHEST_ROTATION = 4


@compiled
def cost_of_order(problem, candidate, order, draws, scratch, limit, mean_weight):
    """What a candidate costs [s] if the nodes run `order`: the mean over `draws` of delays.

    Without draws nothing is late. Infinity if it cannot be below `limit`.
    """
    number = max(1, draws.operations.shape[0])
    total = 0.0
    for draw in range(number):
        stretch = no_stretch()
        if draws.operations.shape[0] > 0:
            stretch = Stretches(draws.operations[draw], draws.hops[draw], draws.averagings[draw])
        total += evaluate(
            problem,
            candidate,
            order,
            True,
            stretch,
            scratch,
            number * limit - total,
            mean_weight,
        )
        if total >= number * limit:
            return np.inf
    return total / number


@compiled
def polish(problem, chain, order, draws, piece):
    """Anneal a candidate together with the order on its nodes, both in place.

    Here a node may wait for an operation although another is there, which no dispatch does. Most
    moves change the order; the others change the paths, by the moves of `weights`, and the
    microbatches that change places keep each other's places in the orders.
    """
    candidate, undo, state = chain.candidate, chain.undo, chain.state
    operations, first = order.operations, order.first
    temperature = piece.temperature
    count = candidate.priority.shape[1]
    best = copy_of(candidate)
    best_operations, best_first = operations.copy(), first.copy()
    before, first_before = operations.copy(), first.copy()
    current = cost_of_order(
        problem, candidate, order, draws, chain.scratch, np.inf, piece.mean_weight
    )
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
                before[:] = operations
                first_before[:] = first
                if move in (REPLICA, STAGE):
                    _follow_relocation(candidate, undo, order, before, state)
                else:
                    _follow_paths(candidate, undo, order)
        else:
            slot = below(state, candidate.node_of_slot.shape[0])
            room = first[slot + 1] - first[slot]
            if room < 2:
                continue
            # One operation passes over a few others, forward or back.
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
        limit = current - temperature * np.log(1.0 - uniform(state))
        cost = cost_of_order(
            problem, candidate, order, draws, chain.scratch, limit, piece.mean_weight
        )
        if cost < limit:
            current = cost
            if cost < least:
                least = cost
                copy(candidate, best)
                best_operations[:] = operations
                best_first[:] = first
        elif changes_paths:
            revert(problem, candidate, undo, move, True)
            if move != NODES:
                operations[:] = before
                first[:] = first_before
        else:
            _rotate(operations, slot_begin, slot_end, not forward)
    copy(best, candidate)
    operations[:] = best_operations
    first[:] = best_first


@compiled
def _follow_paths(candidate, undo, order):
    """After an exchange between two microbatches: each takes over the other's places."""
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


@compiled
def _follow_relocation(candidate, undo, order, before, state):
    """After a relocation: the microbatch leaves one slot's order for any places in the other's."""
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
        # `first` of this slot is not needed any more; that of the next is, until its turn.
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


@compiled
def _rotate(operations, i, k, forward):
    """Operation i goes to k past those between, or if not `forward` operation k to i."""
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
