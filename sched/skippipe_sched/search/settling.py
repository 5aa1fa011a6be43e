"""Annealing by a quick estimate of the iteration in place of the simulation, compiled."""

from __future__ import annotations

import numpy as np

from skippipe_sched.search.arrays import hop_seconds, operation_s, slot_at
from skippipe_sched.search.averaging import added_s
from skippipe_sched.search.chance import uniform
from skippipe_sched.search.compiled import compiled
from skippipe_sched.search.moves import NODES, draw_move, propose, revert

# The quick estimate of `settle` lies between the mean and the maximum over the data nodes.
POWER = 8.0


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
            seconds += hop_seconds(problem, source, node, position, length)
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
    pipeline_s = largest * (total / data_nodes) ** (1.0 / POWER)
    averaging_s = candidate.averaging_s
    own_s = added_s(problem.rings, averaging_s[0], pipeline_s, pipeline_s)
    greatest_s, total_s = 0.0, 0.0
    for stage in range(averaging_s.shape[0]):
        seconds = added_s(problem.rings, averaging_s[stage], pipeline_s, pipeline_s)
        greatest_s = max(greatest_s, seconds)
        total_s += seconds
    # Stages after the first end before the data stage, which hides much of their averaging.
    longest_s = max(own_s, 0.7 * greatest_s)
    return pipeline_s + longest_s + 0.2 * (total_s / averaging_s.shape[0])


@compiled
def settle(problem, chain, piece):
    """Anneal as `anneal` does, but by a quick estimate of the iteration in place of the simulation.

    The estimate knows no waiting for nodes or links. It is for a start from which to anneal, and
    for cases so large that there is time for few simulations.
    """
    candidate, undo, state = chain.candidate, chain.undo, chain.state
    temperature = piece.temperature
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
    for _ in range(piece.steps):
        temperature *= piece.cooling
        move = draw_move(piece.weights, state)
        if not propose(problem, candidate, undo, move, state):
            revert(problem, candidate, undo, move, False)
            continue
        if move == NODES:
            trips_before[:] = trip_s
            busy_before[:] = busy_s
            busy_s[:] = 0.0
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
        if cost < current - temperature * np.log(1.0 - uniform(state)):
            current = cost
            continue
        revert(problem, candidate, undo, move, True)
        if move == NODES:
            trip_s[:] = trips_before
            busy_s[:] = busy_before
        else:
            for m in undo.microbatches:
                trip_s[m] = trips_before[m]
            for m in undo.microbatches:
                busy_s[candidate.paths[m, 0]] = busy_before[candidate.paths[m, 0]]
