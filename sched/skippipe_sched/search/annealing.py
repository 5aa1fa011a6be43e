"""Simulated annealing over everything that a plan decides, compiled.

A candidate is changed by small moves that keep the rules by construction: nodes change places,
microbatches exchange replicas, stages or the rest of their paths, neighbours on a path change
places, priorities shift. Each result is judged by the whole iteration (`evaluate`), so placement,
paths and order are searched together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from skippipe_sched.problem.rules import SHARE_TOLERANCE
from skippipe_sched.search.compiled import compiled
from skippipe_sched.search.evaluator import (
    Problem,
    Stretches,
    dispatch_priority,
    evaluate,
    operation_s,
    set_averaging,
    slot_at,
)

NODES, REPLICAS, STAGES, SWAP, TAILS, PRIORITY, URGENCY, REPLICA, STAGE = range(9)
MOVES = 9

# Of the moves of `polish`, so many change paths and not the order alone.
PATH_MOVES_SHARE = 0.25
FARTHEST_ROTATION = 4
# Of the moves of nodes, so many exchange all nodes of two stages and not two nodes alone.
WHOLE_STAGES_SHARE = 0.2
# The quick estimate of `settle` lies between the mean and the maximum over the data nodes.
POWER = 8.0


class Candidate(NamedTuple):
    """A placement, paths in slots, and what goes first where several operations wait."""

    node_of_slot: np.ndarray  # slots
    paths: np.ndarray  # microbatches, length
    priority: np.ndarray  # microbatches, 2 * length + 1
    averaging_s: np.ndarray  # stages
    visits: np.ndarray  # slots

    def copy(self) -> Candidate:
        """A candidate of its own."""
        return Candidate(*(array.copy() for array in self))

    def take(self, other: Candidate) -> None:
        """Become equal to another candidate."""
        for mine, theirs in zip(self, other, strict=True):
            mine[:] = theirs


class Undo(NamedTuple):
    """What the last move changed."""

    which: np.ndarray  # two microbatches, two slots, or (as -1 - stage) two stages
    paths: np.ndarray  # 2, length
    priority: np.ndarray  # 2, 2 * length + 1
    averaging_s: np.ndarray  # 2
    all_paths: np.ndarray  # microbatches, length; after a move of unequal nodes
    visits: np.ndarray  # slots


def candidate_of(problem: Problem, node_of_slot: np.ndarray, paths: np.ndarray) -> Candidate:
    """A candidate with the simulator's own dispatch."""
    microbatches, length = paths.shape
    averaging_s = np.zeros(len(problem.stage_bytes))
    for stage in range(len(averaging_s)):
        set_averaging(problem, node_of_slot, stage, averaging_s)
    visits = np.bincount(paths.ravel(), minlength=len(node_of_slot))
    priority = dispatch_priority(microbatches, length)
    return Candidate(node_of_slot.copy(), paths.copy(), priority, averaging_s, visits)


def undo_for(candidate: Candidate) -> Undo:
    """Room for what a move changes."""
    return Undo(
        which=np.zeros(2, np.int64),
        paths=candidate.paths[:2].copy() if len(candidate.paths) > 1 else candidate.paths[[0, 0]],
        priority=np.zeros((2, candidate.priority.shape[1])),
        averaging_s=np.zeros(2),
        all_paths=candidate.paths.copy(),
        visits=candidate.visits.copy(),
    )


def random_state(seed: int) -> np.ndarray:
    """The state of the random numbers of one chain."""
    return np.array([seed % 2**64], np.uint64)


@compiled
def _uniform(state):
    """A number in [0, 1): splitmix64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def _below(state, number):
    return int(_uniform(state) * number)


@compiled
def _keeps_rules(problem, path):
    """CC1 and CC2 of one path, as rules.sequence_problem says them."""
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


@compiled
def _keeps_shares(problem, candidate, stage):
    """TC1 of one stage, as rules.violations says it."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    total = 0
    speeds = 0.0
    fastest_s = np.inf
    for slot in range(begin, end):
        total += candidate.visits[slot]
        fastest_s = min(fastest_s, problem.forward_s[candidate.node_of_slot[slot]])
    for slot in range(begin, end):
        speeds += fastest_s / problem.forward_s[candidate.node_of_slot[slot]]
    for slot in range(begin, end):
        share = total * (fastest_s / problem.forward_s[candidate.node_of_slot[slot]]) / speeds
        if candidate.visits[slot] < np.floor(share + SHARE_TOLERANCE):
            return False
        if candidate.visits[slot] > np.ceil(share - SHARE_TOLERANCE):
            return False
    return True


@compiled
def _keeps_balance(problem, candidate):
    """CC3, as rules.violations says it."""
    least, most = np.int64(1) << 60, np.int64(0)
    for stage in range(1, problem.stage_bytes.shape[0]):
        total = 0
        for slot in range(problem.first_slot[stage], problem.first_slot[stage + 1]):
            total += candidate.visits[slot]
        least, most = min(least, total), max(most, total)
    return most - least <= 1


@compiled
def _share_out(problem, candidate, stage, state):
    """Move microbatches between the replicas of a stage until each has its share (TC1)."""
    begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
    microbatches, length = candidate.paths.shape
    total = 0
    speeds = 0.0
    for slot in range(begin, end):
        total += candidate.visits[slot]
        speeds += 1.0 / problem.forward_s[candidate.node_of_slot[slot]]
    share = np.zeros(end - begin)
    for slot in range(begin, end):
        speed = 1.0 / problem.forward_s[candidate.node_of_slot[slot]]
        share[slot - begin] = total * speed / speeds
    while True:
        # From the replica that is most above its share to the one most below.
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
        m = _below(state, microbatches)
        moved = False
        while not moved:
            for i in range(1, length):
                if candidate.paths[m, i] == over:
                    candidate.paths[m, i] = under
                    moved = True
            m = (m + 1) % microbatches
        candidate.visits[over] -= 1
        candidate.visits[under] += 1


@compiled
def _swap_nodes(problem, candidate, undo, state):
    slots = candidate.node_of_slot.shape[0]
    x, y = _below(state, slots), _below(state, slots)
    undo.which[0], undo.which[1] = x, y
    if x == y:
        return False
    a, b = problem.stage_of_slot[x], problem.stage_of_slot[y]
    undo.averaging_s[0], undo.averaging_s[1] = candidate.averaging_s[a], candidate.averaging_s[b]
    if problem.unequal:
        undo.all_paths[:] = candidate.paths
        undo.visits[:] = candidate.visits
    if a != b and _uniform(state) < WHOLE_STAGES_SHARE and _size(problem, a) == _size(problem, b):
        undo.which[0], undo.which[1] = -1 - a, -1 - b
    _exchange_nodes(problem, candidate, undo)
    if a != b:
        set_averaging(problem, candidate.node_of_slot, a, candidate.averaging_s)
        set_averaging(problem, candidate.node_of_slot, b, candidate.averaging_s)
    if problem.unequal:
        if a > 0:
            _share_out(problem, candidate, a, state)
        if b > 0 and b != a:
            _share_out(problem, candidate, b, state)
    return True


@compiled
def _size(problem, stage):
    return problem.first_slot[stage + 1] - problem.first_slot[stage]


@compiled
def _exchange_nodes(problem, candidate, undo):
    """The nodes of two slots, or of two stages, change places; once more, and they are back."""
    nodes = candidate.node_of_slot
    x, y, count = undo.which[0], undo.which[1], 1
    if x < 0:
        count = _size(problem, -1 - x)
        x, y = problem.first_slot[-1 - x], problem.first_slot[-1 - y]
    for i in range(count):
        nodes[x + i], nodes[y + i] = nodes[y + i], nodes[x + i]


@compiled
def _stage_of(problem, which):
    return problem.stage_of_slot[which] if which >= 0 else -1 - which


@compiled
def _exchange_replicas(problem, candidate, a, b, i):
    """Two microbatches exchange the replicas on which they visit one stage."""
    paths = candidate.paths
    stage = problem.stage_of_slot[paths[a, i]]
    for k in range(1, paths.shape[1]):
        if problem.stage_of_slot[paths[b, k]] == stage and paths[b, k] != paths[a, i]:
            paths[a, i], paths[b, k] = paths[b, k], paths[a, i]
            return True
    return False


@compiled
def _relocate(problem, candidate, a, i, target):
    """One microbatch visits another slot instead, if the shares and the balance allow it."""
    slot = candidate.paths[a, i]
    if slot == target:
        return False
    candidate.paths[a, i] = target
    candidate.visits[slot] -= 1
    candidate.visits[target] += 1
    stage, other = problem.stage_of_slot[slot], problem.stage_of_slot[target]
    kept = _keeps_shares(problem, candidate, stage)
    if kept and other != stage:
        kept = (
            _keeps_shares(problem, candidate, other)
            and _keeps_balance(problem, candidate)
            and _keeps_rules(problem, candidate.paths[a])
        )
    if not kept:
        candidate.visits[slot] += 1
        candidate.visits[target] -= 1
    return kept


@compiled
def _shift_priority(candidate, a, position, state):
    base = 1.0 if position > candidate.paths.shape[1] else 0.0
    back = _uniform(state) < 0.3
    candidate.priority[a, position] = base if back else base + 2.5 * (_uniform(state) - 0.5)


@compiled
def _shift_urgency(candidate, a, state):
    """Prefer one microbatch to the others, or not, wherever it goes."""
    shift = 0.0 if _uniform(state) < 0.3 else _uniform(state) - 0.5
    for position in range(candidate.priority.shape[1]):
        base = 1.0 if position > candidate.paths.shape[1] else 0.0
        candidate.priority[a, position] = base + shift


@compiled
def propose(problem, candidate, undo, move, state):
    """Make one move; False if it came to nothing (then `revert` must follow all the same)."""
    if move == NODES:
        return _swap_nodes(problem, candidate, undo, state)
    paths = candidate.paths
    microbatches, length = paths.shape
    a, b = _below(state, microbatches), _below(state, microbatches)
    undo.which[0], undo.which[1] = a, b
    undo.paths[0], undo.paths[1] = paths[a], paths[b]
    undo.priority[0], undo.priority[1] = candidate.priority[a], candidate.priority[b]
    if move == PRIORITY:
        _shift_priority(candidate, a, _below(state, 2 * length + 1), state)
        return True
    if move == URGENCY:
        _shift_urgency(candidate, a, state)
        return True
    if length == 1:
        return False
    i = 1 + _below(state, length - 1)
    if move == SWAP:
        if i + 1 == length:
            return False
        paths[a, i], paths[a, i + 1] = paths[a, i + 1], paths[a, i]
        return _keeps_rules(problem, paths[a])
    if move == REPLICA:
        stage = problem.stage_of_slot[paths[a, i]]
        begin, end = problem.first_slot[stage], problem.first_slot[stage + 1]
        return _relocate(problem, candidate, a, i, begin + _below(state, end - begin))
    if move == STAGE:
        begin, end = problem.first_slot[1], candidate.node_of_slot.shape[0]
        return _relocate(problem, candidate, a, i, begin + _below(state, end - begin))
    if a == b:
        return False
    if move == REPLICAS:
        return _exchange_replicas(problem, candidate, a, b, i)
    if move == TAILS:
        for k in range(i, length):
            paths[a, k], paths[b, k] = paths[b, k], paths[a, k]
    else:
        k = 1 + _below(state, length - 1)
        if problem.stage_of_slot[paths[a, i]] == problem.stage_of_slot[paths[b, k]]:
            return False
        paths[a, i], paths[b, k] = paths[b, k], paths[a, i]
    return _keeps_rules(problem, paths[a]) and _keeps_rules(problem, paths[b])


@compiled
def revert(problem, candidate, undo, move, made):
    """Take the last move back; `made` is what `propose` said of it."""
    a, b = undo.which[0], undo.which[1]
    if move == NODES:
        if not made:
            return
        _exchange_nodes(problem, candidate, undo)
        candidate.averaging_s[_stage_of(problem, a)] = undo.averaging_s[0]
        candidate.averaging_s[_stage_of(problem, b)] = undo.averaging_s[1]
        if problem.unequal:
            candidate.paths[:] = undo.all_paths
            candidate.visits[:] = undo.visits
        return
    if made and move in (REPLICA, STAGE):
        for i in range(1, candidate.paths.shape[1]):
            if candidate.paths[a, i] != undo.paths[0, i]:
                candidate.visits[candidate.paths[a, i]] -= 1
                candidate.visits[undo.paths[0, i]] += 1
    candidate.paths[a], candidate.paths[b] = undo.paths[0], undo.paths[1]
    candidate.priority[a], candidate.priority[b] = undo.priority[0], undo.priority[1]


@compiled
def _copy(source, target):
    target.node_of_slot[:] = source.node_of_slot
    target.paths[:] = source.paths
    target.priority[:] = source.priority
    target.averaging_s[:] = source.averaging_s
    target.visits[:] = source.visits


@compiled
def _copy_of(candidate):
    return Candidate(
        candidate.node_of_slot.copy(),
        candidate.paths.copy(),
        candidate.priority.copy(),
        candidate.averaging_s.copy(),
        candidate.visits.copy(),
    )


@compiled
def _draw_move(weights, state):
    drawn = _uniform(state) * weights.sum()
    for move in range(weights.shape[0] - 1):
        drawn -= weights[move]
        if drawn < 0.0:
            return move
    return weights.shape[0] - 1


@compiled
def _calm():
    """No stretch."""
    nothing = np.ones((0, 0))
    return Stretches(nothing, nothing, np.ones(0))


@compiled
def cost_of(problem, candidate, scratch, limit, mean_weight):
    """What a candidate costs [s] if its priorities decide what goes first."""
    no_order = np.zeros(0, np.int64)
    return evaluate(
        problem,
        candidate.node_of_slot,
        candidate.paths,
        candidate.averaging_s,
        candidate.priority,
        no_order,
        no_order,
        False,
        _calm(),
        scratch,
        limit,
        mean_weight,
    )


@compiled
def cost_of_order(problem, candidate, order, first, draws, scratch, limit, mean_weight):
    """What a candidate costs [s] if the nodes run `order`: the mean over `draws` of delays.

    Without draws nothing is late. Infinity if it cannot be below `limit`.
    """
    number = max(1, draws.operations.shape[0])
    total = 0.0
    for draw in range(number):
        stretch = _calm()
        if draws.operations.shape[0] > 0:
            stretch = Stretches(draws.operations[draw], draws.hops[draw], draws.averagings[draw])
        total += evaluate(
            problem,
            candidate.node_of_slot,
            candidate.paths,
            candidate.averaging_s,
            candidate.priority,
            order,
            first,
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
def anneal(
    problem,
    candidate,
    current,
    best,
    best_cost,
    undo,
    scratch,
    state,
    steps,
    temperature,
    cooling,
    weights,
    mean_weight,
):
    """`steps` moves at a temperature [s] that falls by the factor `cooling` with each.

    `current` is the candidate's cost; returns what it is afterwards. A cost below `best_cost[0]`
    is put there, and the candidate into `best`.
    """
    for _ in range(steps):
        temperature *= cooling
        move = _draw_move(weights, state)
        made = propose(problem, candidate, undo, move, state)
        if made:
            # Drawn first, so that a simulation can stop once the move cannot be accepted.
            limit = current - temperature * np.log(1.0 - _uniform(state))
            cost = cost_of(problem, candidate, scratch, limit, mean_weight)
            if cost < limit:
                current = cost
                if cost < best_cost[0]:
                    best_cost[0] = cost
                    _copy(candidate, best)
                continue
        revert(problem, candidate, undo, move, made)
    return current


@compiled
def _round_trip_s(problem, candidate, microbatch):
    """How long a microbatch takes if it never waits, for each that its data node may hold."""
    paths = candidate.paths
    length = paths.shape[1]
    seconds = 0.0
    before = paths[microbatch, 0]
    for position in range(2 * length + 1):
        slot = slot_at(paths, microbatch, position, length)
        source, node = candidate.node_of_slot[before], candidate.node_of_slot[slot]
        if slot != before:
            seconds += problem.hop_s[source, node]
        stage = problem.stage_of_slot[slot]
        seconds += operation_s(problem, node, stage, position, length)
        before = slot
    return seconds / problem.memory[candidate.node_of_slot[paths[microbatch, 0]]]


@compiled
def _estimate(problem, candidate, busy_s):
    """A quick guess at the iteration from how long each data node waits for its microbatches."""
    data_nodes = problem.first_slot[1]
    largest = 0.0
    for slot in range(data_nodes):
        largest = max(largest, busy_s[slot])
    total = 0.0
    for slot in range(data_nodes):
        total += (busy_s[slot] / largest) ** POWER
    own_s = candidate.averaging_s[0]
    mean_s = candidate.averaging_s.mean()
    # Stages after the first end before the data stage, which hides much of their averaging.
    longest_s = max(own_s, 0.7 * candidate.averaging_s.max())
    return largest * (total / data_nodes) ** (1.0 / POWER) + longest_s + 0.2 * mean_s


@compiled
def settle(problem, candidate, undo, state, steps, temperature, cooling, weights):
    """Anneal as `anneal` does, but by a quick estimate of the iteration in place of the simulation.

    The estimate knows no waiting for nodes or links. It is for a start from which to anneal, and
    for cases so large that there is time for few simulations.
    """
    microbatches = candidate.paths.shape[0]
    data_nodes = problem.first_slot[1]
    trip_s = np.zeros(microbatches)
    busy_s = np.zeros(data_nodes)
    for m in range(microbatches):
        trip_s[m] = _round_trip_s(problem, candidate, m)
        busy_s[candidate.paths[m, 0]] += trip_s[m]
    trips_before = trip_s.copy()
    busy_before = busy_s.copy()
    current = _estimate(problem, candidate, busy_s)
    for _ in range(steps):
        temperature *= cooling
        move = _draw_move(weights, state)
        if not propose(problem, candidate, undo, move, state):
            revert(problem, candidate, undo, move, False)
            continue
        a, b = undo.which[0], undo.which[1]
        if move == NODES:
            trips_before[:] = trip_s
            busy_before[:] = busy_s
            busy_s[:] = 0.0
            for m in range(microbatches):
                trip_s[m] = _round_trip_s(problem, candidate, m)
                busy_s[candidate.paths[m, 0]] += trip_s[m]
        else:
            for m in (a, b):
                slot = candidate.paths[m, 0]
                trips_before[m] = trip_s[m]
                busy_before[slot] = busy_s[slot]
            for m in (a, b):
                now_s = _round_trip_s(problem, candidate, m)
                busy_s[candidate.paths[m, 0]] += now_s - trip_s[m]
                trip_s[m] = now_s
        cost = _estimate(problem, candidate, busy_s)
        if cost < current - temperature * np.log(1.0 - _uniform(state)):
            current = cost
            continue
        revert(problem, candidate, undo, move, True)
        if move == NODES:
            trip_s[:] = trips_before
            busy_s[:] = busy_before
        else:
            for m in (a, b):
                trip_s[m] = trips_before[m]
            for m in (a, b):
                busy_s[candidate.paths[m, 0]] = busy_before[candidate.paths[m, 0]]
    return current


@compiled
def polish(
    problem,
    candidate,
    order,
    first,
    undo,
    draws,
    scratch,
    state,
    steps,
    temperature,
    cooling,
    weights,
    mean_weight,
):
    """Anneal a candidate together with the order on its nodes, both in place.

    Here a node may wait for an operation although another is there, which no dispatch does. Most
    moves change the order; the others change the paths, by the moves of `weights`, and the
    microbatches that change places keep each other's places in the orders. `first` is where the
    operations of each slot begin.
    """
    count = candidate.priority.shape[1]
    best = _copy_of(candidate)
    best_order = order.copy()
    best_first = first.copy()
    before = order.copy()
    first_before = first.copy()
    current = cost_of_order(problem, candidate, order, first, draws, scratch, np.inf, mean_weight)
    least = current
    for _ in range(steps):
        temperature *= cooling
        changes_paths = _uniform(state) < PATH_MOVES_SHARE
        move = -1
        slot_begin, slot_end, forward = 0, 0, True
        if changes_paths:
            move = _draw_move(weights, state)
            if not propose(problem, candidate, undo, move, state):
                revert(problem, candidate, undo, move, False)
                continue
            if move != NODES:
                before[:] = order
                first_before[:] = first
                if move in (REPLICA, STAGE):
                    _follow_relocation(candidate, undo, order, before, first, state)
                else:
                    _follow_paths(candidate, undo, order, first)
        else:
            slot = _below(state, candidate.node_of_slot.shape[0])
            room = first[slot + 1] - first[slot]
            if room < 2:
                continue
            # One operation passes over a few others, forward or back.
            slot_begin = first[slot] + _below(state, room - 1)
            farthest = min(FARTHEST_ROTATION, first[slot + 1] - slot_begin - 1)
            slot_end = slot_begin + 1 + _below(state, farthest)
            forward = _uniform(state) < 0.5
            moved = order[slot_begin] if forward else order[slot_end]
            own = 0
            for place in range(slot_begin, slot_end + 1):
                own += order[place] // count == moved // count
            if own > 1:
                continue
            _rotate(order, slot_begin, slot_end, forward)
        limit = current - temperature * np.log(1.0 - _uniform(state))
        cost = cost_of_order(problem, candidate, order, first, draws, scratch, limit, mean_weight)
        if cost < limit:
            current = cost
            if cost < least:
                least = cost
                _copy(candidate, best)
                best_order[:] = order
                best_first[:] = first
        elif changes_paths:
            revert(problem, candidate, undo, move, True)
            if move != NODES:
                order[:] = before
                first[:] = first_before
        else:
            _rotate(order, slot_begin, slot_end, not forward)
    _copy(best, candidate)
    order[:] = best_order
    first[:] = best_first


@compiled
def _follow_paths(candidate, undo, order, first):
    """After an exchange between two microbatches: each takes over the other's places."""
    paths = candidate.paths
    length = paths.shape[1]
    count = 2 * length + 1
    for side in range(2):
        mine, other = undo.which[side], undo.which[1 - side]
        for i in range(1, length):
            slot = undo.paths[side, i]
            left = True
            for k in range(1, length):
                left = left and paths[mine, k] != slot
            if left:
                for place in range(first[slot], first[slot + 1]):
                    # Marked, so that the other's turn does not take it back.
                    if order[place] >= 0 and order[place] // count == mine:
                        order[place] = -1 - other
    for side in range(2):
        m = undo.which[side]
        for i in range(1, length):
            slot = paths[m, i]
            position = i
            for place in range(first[slot], first[slot + 1]):
                if order[place] == -1 - m or (order[place] >= 0 and order[place] // count == m):
                    order[place] = m * count + position
                    position = 2 * length - i


@compiled
def _follow_relocation(candidate, undo, order, before, first, state):
    """After a relocation: the microbatch leaves one slot's order for any places in the other's."""
    length = candidate.paths.shape[1]
    count = 2 * length + 1
    m = undo.which[0]
    i = 1
    while candidate.paths[m, i] == undo.paths[0, i]:
        i += 1
    source, target = undo.paths[0, i], candidate.paths[m, i]
    room = first[target + 1] - first[target]
    forward_at, backward_at = _below(state, room + 1), _below(state, room + 1)
    if forward_at > backward_at:
        forward_at, backward_at = backward_at, forward_at
    written = 0
    for slot in range(candidate.node_of_slot.shape[0]):
        begin, end = first[slot], first[slot + 1]
        # `first` of this slot is not needed any more; that of the next is, until its turn.
        first[slot] = written
        for place in range(begin, end + 1):
            if slot == target and place - begin == forward_at:
                order[written] = m * count + i
                written += 1
            if slot == target and place - begin == backward_at:
                order[written] = m * count + 2 * length - i
                written += 1
            if place < end and not (slot == source and before[place] // count == m):
                order[written] = before[place]
                written += 1


@compiled
def _rotate(order, i, k, forward):
    if forward:
        moved = order[i]
        for place in range(i, k):
            order[place] = order[place + 1]
        order[k] = moved
    else:
        moved = order[k]
        for place in range(k, i, -1):
            order[place] = order[place - 1]
        order[i] = moved
