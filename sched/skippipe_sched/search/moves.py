"""Compiled moves of the search: small, reversible changes of a candidate.

They keep the rules by construction: nodes trade places, microbatches exchange replicas, stages or
the rest of their paths, neighbors on a path trade places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from skippipe_sched.problem.rules import SHARE_TOLERANCE
from skippipe_sched.search.arrays import (
    Candidate,
    copy,
    copy_array,
    copy_of,
    set_averaging,
    visit_s,
)
from skippipe_sched.search.compiled import allocating_kernel, kernel

NODES, REPLICAS, STAGES, SWAP, TAILS, REPLICA, STAGE = range(7)
MOVES = 7
# Share of the moves of nodes that exchange all nodes of two stages and not two nodes alone.
WHOLE_STAGES_SHARE = 0.2


class Undo(NamedTuple):
    """State before the last move: of all if it moved nodes, of two microbatches otherwise."""

    before: Candidate
    microbatches: np.ndarray  # 2
    paths: np.ndarray  # 2, length


def undo_for(candidate: Candidate) -> Undo:
    """Allocate the buffers of a move's changes."""
    two = np.zeros(2, np.int64)
    return Undo(copy_of(candidate), two, candidate.paths[two])


def random_state(seed: int) -> np.ndarray:
    """Return the state of a chain's random number generator."""
    return np.array([seed % 2**64], np.uint64)


@kernel
def uniform(state):
    """Draw a number in [0, 1): splitmix64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def below(state, number):
    """Draw an integer from 0 to below `number`."""
    return int(uniform(state) * number)


@kernel
def keeps_rules(problem, path):
    """Return whether a path keeps CC1 and CC2, as rules.sequence_problem defines them."""
    highest = 0
    previous = 0
    swaps = 0
    for i in range(1, path.shape[0]):
        stage = problem.stage_of_slot[path[i]]
        for k in range(i):
            if problem.stage_of_slot[path[k]] == stage:
                return False
        if stage - previous - 1 > problem.rules[2]:
            return False
        if stage < highest:
            swaps += 1
            if highest - stage > problem.rules[1]:
                return False
        else:
            highest = stage
        previous = stage
    return swaps <= problem.rules[0]


@kernel
def keeps_shares(problem, candidate, stage):
    """Return whether one stage keeps TC1, as rules.violations defines it."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    total = 0
    speeds = 0.0
    fastest_s = np.inf
    for slot in range(begin, end):
        total += candidate.visits[slot]
        fastest_s = min(fastest_s, visit_s(problem, candidate.node_of_slot[slot], stage))
    for slot in range(begin, end):
        speeds += fastest_s / visit_s(problem, candidate.node_of_slot[slot], stage)
    for slot in range(begin, end):
        speed = fastest_s / visit_s(problem, candidate.node_of_slot[slot], stage)
        share = total * speed / speeds
        if candidate.visits[slot] < np.floor(share + SHARE_TOLERANCE):
            return False
        if candidate.visits[slot] > np.ceil(share - SHARE_TOLERANCE):
            return False
    return True


@kernel
def keeps_balance(problem, candidate):
    """Return whether a candidate keeps CC3, as rules.violations defines it."""
    least, most = np.int64(1) << 60, np.int64(0)
    for stage in range(1, problem.ring_bytes.shape[0]):
        total = 0
        for slot in range(problem.first_slot[stage], problem.first_slot[stage + 1]):
            total += candidate.visits[slot]
        least, most = min(least, total), max(most, total)
    return most - least <= 1


@allocating_kernel
def share_out(problem, candidate, stage, state):
    """Move microbatches between the replicas of a stage until each has its share (TC1)."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    microbatches, length = candidate.paths.shape
    total = 0
    speeds = 0.0
    for slot in range(begin, end):
        total += candidate.visits[slot]
        speeds += 1.0 / visit_s(problem, candidate.node_of_slot[slot], stage)
    share = np.zeros(end - begin)
    for slot in range(begin, end):
        speed = 1.0 / visit_s(problem, candidate.node_of_slot[slot], stage)
        share[slot - begin] = total * speed / speeds
    while True:
        # Move from the replica that is most above its share to the one most below.
        over, under = begin, begin
        for slot in range(begin, end):
            excess = candidate.visits[slot] - share[slot - begin]
            if excess > candidate.visits[over] - share[over - begin]:
                over = slot
            if excess < candidate.visits[under] - share[under - begin]:
                under = slot
        too_many = candidate.visits[over] > np.ceil(share[over - begin] - SHARE_TOLERANCE)
        too_few = candidate.visits[under] < np.floor(share[under - begin] + SHARE_TOLERANCE)
        if over == under or not (too_many or too_few):
            return
        m = below(state, microbatches)
        moved = False
        while not moved:
            for i in range(1, length):
                if candidate.paths[m, i] == over:
                    candidate.paths[m, i] = under
                    moved = True
            m = (m + 1) % microbatches
        candidate.visits[over] -= 1
        candidate.visits[under] += 1


@kernel
def _swap_nodes(problem, candidate, undo, state):
    nodes = candidate.node_of_slot
    x, y, count = below(state, nodes.shape[0]), below(state, nodes.shape[0]), 1
    if x == y:
        return False
    copy(candidate, undo.before)
    a, b = problem.stage_of_slot[x], problem.stage_of_slot[y]
    if a != b and uniform(state) < WHOLE_STAGES_SHARE and _size(problem, a) == _size(problem, b):
        x, y, count = problem.first_slot[a], problem.first_slot[b], _size(problem, a)
    for i in range(count):
        nodes[x + i], nodes[y + i] = nodes[y + i], nodes[x + i]
    if a != b:
        set_averaging(problem, nodes, a, candidate.averaging_s)
        set_averaging(problem, nodes, b, candidate.averaging_s)
    if problem.unequal:
        if a > 0:
            share_out(problem, candidate, a, state)
        if b > 0 and b != a:
            share_out(problem, candidate, b, state)
    return True


@kernel
def _size(problem, stage):
    return problem.first_slot[stage + 1] - problem.first_slot[stage]


@kernel
def _exchange_replicas(problem, candidate, a, b, i):
    """Exchange the replicas on which two microbatches visit one stage."""
    paths = candidate.paths
    stage = problem.stage_of_slot[paths[a, i]]
    for k in range(1, paths.shape[1]):
        if problem.stage_of_slot[paths[b, k]] == stage and paths[b, k] != paths[a, i]:
            paths[a, i], paths[b, k] = paths[b, k], paths[a, i]
            return True
    return False


@kernel
def _relocate(problem, candidate, a, i, target):
    """Move a visit of one microbatch to another slot, if the shares and the balance allow it."""
    slot = candidate.paths[a, i]
    if slot == target:
        return False
    candidate.paths[a, i] = target
    candidate.visits[slot] -= 1
    candidate.visits[target] += 1
    stage, other = problem.stage_of_slot[slot], problem.stage_of_slot[target]
    kept = keeps_shares(problem, candidate, stage)
    if kept and other != stage:
        kept = (
            keeps_shares(problem, candidate, other)
            and keeps_balance(problem, candidate)
            and keeps_rules(problem, candidate.paths[a])
        )
    if not kept:
        candidate.visits[slot] += 1
        candidate.visits[target] -= 1
    return kept


@kernel
def draw_move(weights, state):
    """Draw one of the moves in proportion to the weights."""
    drawn = uniform(state) * weights.sum()
    for move in range(weights.shape[0] - 1):
        drawn -= weights[move]
        if drawn < 0.0:
            return move
    return weights.shape[0] - 1


@kernel
def propose(problem, candidate, undo, move, state):
    """Make one move; False if it is impossible (`revert` must follow in any case)."""
    if move == NODES:
        return _swap_nodes(problem, candidate, undo, state)
    paths = candidate.paths
    microbatches, length = paths.shape
    a, b = below(state, microbatches), below(state, microbatches)
    undo.microbatches[0], undo.microbatches[1] = a, b
    copy_array(paths[a], undo.paths[0])
    copy_array(paths[b], undo.paths[1])
    if length == 1:
        return False
    i = 1 + below(state, length - 1)
    if move == SWAP:
        if i + 1 == length:
            return False
        paths[a, i], paths[a, i + 1] = paths[a, i + 1], paths[a, i]
        return keeps_rules(problem, paths[a])
    if move == REPLICA:
        stage = problem.stage_of_slot[paths[a, i]]
        begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
        return _relocate(problem, candidate, a, i, begin + below(state, end - begin))
    if move == STAGE:
        begin, end = problem.first_slot[1], candidate.node_of_slot.shape[0]
        return _relocate(problem, candidate, a, i, begin + below(state, end - begin))
    if a == b:
        return False
    if move == REPLICAS:
        return _exchange_replicas(problem, candidate, a, b, i)
    if move == TAILS:
        for k in range(i, length):
            paths[a, k], paths[b, k] = paths[b, k], paths[a, k]
    else:
        k = 1 + below(state, length - 1)
        if problem.stage_of_slot[paths[a, i]] == problem.stage_of_slot[paths[b, k]]:
            return False
        paths[a, i], paths[b, k] = paths[b, k], paths[a, i]
    return keeps_rules(problem, paths[a]) and keeps_rules(problem, paths[b])


@kernel
def revert(problem, candidate, undo, move, made):
    """Undo the last move; `made` is the result of `propose`."""
    if move == NODES:
        if made:
            copy(undo.before, candidate)
        return
    a, b = undo.microbatches[0], undo.microbatches[1]
    if made and move in (REPLICA, STAGE):
        for i in range(1, candidate.paths.shape[1]):
            if candidate.paths[a, i] != undo.paths[0, i]:
                candidate.visits[candidate.paths[a, i]] -= 1
                candidate.visits[undo.paths[0, i]] += 1
    copy_array(undo.paths[0], candidate.paths[a])
    copy_array(undo.paths[1], candidate.paths[b])
