"""Simulated annealing over everything that a plan decides, compiled.

Each result of a move is judged by the whole iteration (`evaluate`), so placement, paths and order
are searched together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from skippipe_sched.search.arrays import (
    Candidate,
    Order,
    Problem,
    Scratch,
    copy,
    copy_of,
    no_stretch,
    scratch_for,
)
from skippipe_sched.search.chance import random_state, uniform
from skippipe_sched.search.compiled import compiled
from skippipe_sched.search.evaluator import evaluate
from skippipe_sched.search.moves import Undo, draw_move, propose, revert, undo_for


class ChainState(NamedTuple):
    """One candidate on its way, the best that it was, and its own random numbers."""

    candidate: Candidate
    best: Candidate
    costs: np.ndarray  # 2: of the candidate, of the best [s]
    undo: Undo
    scratch: Scratch
    state: np.ndarray  # of the random numbers


class Piece(NamedTuple):
    """Some steps at a temperature [s] that falls by the factor `cooling` with each.

    `weights` say how often each move is tried; of the mean end of the data nodes, `mean_weight`
    counts besides the iteration.
    """

    steps: int
    temperature: float
    cooling: float
    weights: np.ndarray
    mean_weight: float


def chain_from(problem: Problem, candidate: Candidate, seed: int) -> ChainState:
    """A chain that begins at a candidate."""
    return ChainState(
        candidate,
        copy_of(candidate),
        np.full(2, np.inf),
        undo_for(candidate),
        scratch_for(problem, *candidate.paths.shape),
        random_state(seed),
    )


@compiled
def cost_of(problem, candidate, scratch, limit, mean_weight):
    """What a candidate costs [s] if its priorities decide what goes first."""
    nothing = np.zeros(0, np.int64)
    order = Order(nothing, nothing)
    return evaluate(problem, candidate, order, False, no_stretch(), scratch, limit, mean_weight)


@compiled
def anneal(problem, chain, piece):
    """Make the moves of a piece; the best candidate on the way is put into ``chain.best``."""
    candidate, costs, state = chain.candidate, chain.costs, chain.state
    temperature = piece.temperature
    for _ in range(piece.steps):
        temperature *= piece.cooling
        move = draw_move(piece.weights, state)
        made = propose(problem, candidate, chain.undo, move, state)
        if made:
            # Drawn first, so that a simulation can stop once the move cannot be accepted.
            limit = costs[0] - temperature * np.log(1.0 - uniform(state))
            cost = cost_of(problem, candidate, chain.scratch, limit, piece.mean_weight)
            if cost < limit:
                costs[0] = cost
                if cost < costs[1]:
                    costs[1] = cost
                    copy(candidate, chain.best)
                continue
        revert(problem, candidate, chain.undo, move, made)
