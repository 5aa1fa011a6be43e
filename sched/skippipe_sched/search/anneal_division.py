"""Compiled annealing of several parallel pipelines that trade nodes.

Each pipeline is a candidate on slots of its own, and the problems of all pipelines contain all
nodes of the whole case. So a node moves between pipelines as two nodes of one pipeline trade
places: by two numbers.

The cost is the end of the last pipeline. The other ends count a little, by a high power mean:
otherwise nearly all trades would leave the cost unchanged.
"""

from __future__ import annotations

import math

from skippipe_sched.search.arrays import copy, set_averaging
from skippipe_sched.search.compiled import kernel
from skippipe_sched.search.evaluator import evaluate
from skippipe_sched.search.moves import below, draw_move, propose, revert, share_out, uniform

# Power of the mean of the pipelines' ends: with a greater one, almost only the last end counts.
POWER = 8.0
# Share of the steps; the others are moves within a pipeline.
TRADES_SHARE = 0.3


@kernel
def _remaining_s(room, power_of_others, weight):
    """Compute the longest iteration [s] that keeps the mean of the ends within its limit."""
    remaining = room - power_of_others
    return remaining ** (1.0 / POWER) / weight if remaining > 0.0 else 0.0


@kernel
def _put(problem, chain, slot, node):
    """Put another node on a slot; store the candidate before in ``chain.undo``."""
    candidate = chain.candidate
    copy(candidate, chain.undo.before)
    stage = problem.stage_of_slot[slot]
    candidate.node_of_slot[slot] = node
    set_averaging(problem, candidate.node_of_slot, stage, candidate.averaging_s)
    if problem.unequal and stage > 0:
        share_out(problem, candidate, stage, chain.state)


@kernel
def _cost_s(problem, chain, limit_s, piece):
    candidate, scratch = chain.candidate, chain.scratch
    return evaluate(problem, candidate, chain.no_order, scratch, limit_s, piece.mean_weight)


@kernel
def trade(first, a, second, b, ends, places, weights, piece):
    """Run the moves of a piece in two pipelines, and trades of nodes between them.

    `first` and `second` are the problems of the chains `a` and `b`; `ends` has the end of every
    pipeline, those of these two at `places`, each its iteration's cost [s] times its weight in
    `weights`. The temperature is in the unit of `ends`. A single pipeline is passed as both of
    them, and trades no nodes.
    """
    temperature = piece.temperature
    alone = places[0] == places[1]
    others = 0.0
    for lane in range(ends.shape[0]):
        if lane != places[0] and lane != places[1]:
            others += ends[lane] ** POWER
    for _ in range(piece.steps):
        temperature *= piece.cooling
        power_a = ends[places[0]] ** POWER
        power_b = 0.0 if alone else ends[places[1]] ** POWER
        mean = (others + power_a + power_b) ** (1.0 / POWER)
        room = (mean - temperature * math.log(1.0 - uniform(a.state))) ** POWER - others
        if alone or uniform(a.state) >= TRADES_SHARE:
            within_a = alone or uniform(a.state) < 0.5
            problem, chain = (first, a) if within_a else (second, b)
            place, beside = (places[0], power_b) if within_a else (places[1], power_a)
            move = draw_move(piece.weights, chain.state)
            made = propose(problem, chain.candidate, chain.undo, move, chain.state)
            if made:
                limit_s = _remaining_s(room, beside, weights[place])
                cost_s = _cost_s(problem, chain, limit_s, piece)
                if cost_s < limit_s:
                    ends[place] = cost_s * weights[place]
                    continue
            revert(problem, chain.candidate, chain.undo, move, made)
            continue
        x = below(a.state, a.candidate.node_of_slot.shape[0])
        y = below(a.state, b.candidate.node_of_slot.shape[0])
        given = a.candidate.node_of_slot[x]
        _put(first, a, x, b.candidate.node_of_slot[y])
        limit_s = _remaining_s(room, 0.0, weights[places[0]])
        cost_s = _cost_s(first, a, limit_s, piece)
        kept = cost_s < limit_s
        if kept:
            _put(second, b, y, given)
            power_now = (cost_s * weights[places[0]]) ** POWER
            limit_b_s = _remaining_s(room, power_now, weights[places[1]])
            cost_b_s = _cost_s(second, b, limit_b_s, piece)
            kept = cost_b_s < limit_b_s
            if kept:
                ends[places[1]] = cost_b_s * weights[places[1]]
            else:
                copy(b.undo.before, b.candidate)
        if kept:
            ends[places[0]] = cost_s * weights[places[0]]
        else:
            copy(a.undo.before, a.candidate)
