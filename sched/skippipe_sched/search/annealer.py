"""Runs of annealing chains: lengths, temperatures, and checks of the clock in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from skippipe_sched.search import moves
from skippipe_sched.search.annealing import (
    ChainState,
    Cooling,
    anneal,
    chain_from,
    dispatched_s,
    polish,
    settle,
)
from skippipe_sched.search.arrays import Candidate, Order, Problem, copy, copy_of, order_for
from skippipe_sched.search.compiled import fast
from skippipe_sched.search.evaluator import evaluate, replay

# Operations that a second of the budget pays for on each thread, on a machine of any speed. Two
# cores of a Xeon need 0.8 to 0.9 s for them if paths skip stages, and 1.1 s for full paths.
OPERATIONS_PER_S = 28e6
# Cost of a move in addition to its simulation, in operations.
OPERATIONS_OF_MOVE = 50
# Beyond the size of the caches, an operation takes up to six times as long.
CACHED_OPERATIONS = 5000
# A chain checks the clock after about this many seconds of work.
LOOK_S = 0.1

# Weights of the moves: NODES, REPLICAS, STAGES, SWAP, TAILS, REPLICA, STAGE of moves.py.
WEIGHTS = np.array([4.0, 3.0, 2.0, 1.0, 2.0, 0.5, 0.5])
# The mean end of the data nodes guides the search where the maximum is flat.
MEAN_WEIGHT = 0.3
# The quick estimate is in seconds, whatever the case.
SETTLE_HOTTEST_S, SETTLE_COLDEST_S = 2.0, 0.05
POLISH_HOTTEST, POLISH_COLDEST = 0.01, 0.0003
# With enough steps to reorder everything, polishing starts up to this many times hotter, on up to
# this many times as many chains: for few operations the best order is searched as thoroughly as the
# best paths.
POLISH_MOST = 10
STEPS_TO_REORDER = 5
POLISH_MEAN_WEIGHT = 0.001


@dataclass(frozen=True)
class Round:
    """Annealing of the best chains for a share of the work; temperatures relative to iterations."""

    chains: int
    share: float
    hottest: float
    coldest: float


class Chain:
    """Annealed candidate, its initial temperature factor, and the cost of its best state [s]."""

    def __init__(self, problem: Problem, candidate: Candidate, seed: int, heat: float):
        """Start at a candidate, with the chain's own random numbers."""
        self.state: ChainState = chain_from(problem, candidate, seed)
        self.heat = heat
        self.order: Order | None = None
        self.cost_s = np.inf

    @property
    def candidate(self) -> Candidate:
        """Current candidate; it is the best one when no work is in progress."""
        return self.state.candidate


class Annealer:
    """Runs chains on one problem until the work is done or `over` returns true."""

    def __init__(
        self, problem: Problem, microbatches: int, path_length: int, over: Callable[[], bool]
    ):
        """Compute the cost of a step, in simulated operations."""
        self.operations_per_s = OPERATIONS_PER_S
        self.problem = problem
        self.over = over
        self.chain_length = 2 * path_length + 1
        operations = microbatches * self.chain_length
        slower = 1 + min(5.0, operations / CACHED_OPERATIONS)
        self.operations = operations * slower + OPERATIONS_OF_MOVE
        self.steps_to_reorder = STEPS_TO_REORDER * operations**2
        self.weights = WEIGHTS.copy()
        self.polish_moves = np.ones(moves.MOVES)
        if problem.unequal:  # Then one node's order does not suit another.
            self.polish_moves[moves.NODES] = 0.0

    def keep_placement(self) -> None:
        """Keep nodes on their stages from now on."""
        self.weights[moves.NODES] = 0.0

    def settle(self, chain: Chain, work: float) -> None:
        """Anneal by the quick estimate, for `work` operations."""
        state = chain.state
        start, start_s = copy_of(state.candidate), dispatched_s(self.problem, chain.state, 0.0)
        cost = 4 * self.chain_length + self.problem.first_slot[1]
        weights = self.weights.copy()
        # A swap of nodes costs as much as all microbatches.
        weights[moves.NODES] *= min(1.0, 5 * cost / self.operations)
        work_of_step = cost + weights[moves.NODES] / weights.sum() * self.operations
        temperatures = chain.heat * SETTLE_HOTTEST_S, chain.heat * SETTLE_COLDEST_S
        steps = int(work / work_of_step)
        self.in_pieces(settle, (state,), steps, temperatures, (weights, 0.0), work_of_step)
        copy(state.candidate, state.best)
        self.judge(chain)
        if not chain.cost_s <= start_s:  # The estimate ignores waits and deadlocks.
            copy(start, state.best)
            self.judge(chain)

    def anneal(self, chain: Chain, round_: Round, steps: int, reference_s: float) -> None:
        """Anneal by simulation, from the chain's best candidate."""
        state = chain.state
        copy(state.best, state.candidate)
        state.costs[:] = dispatched_s(self.problem, chain.state, MEAN_WEIGHT)
        hotter = chain.heat * round_.hottest * reference_s
        colder = chain.heat * round_.coldest * reference_s
        of_moves = self.weights, MEAN_WEIGHT
        self.in_pieces(anneal, (state,), steps, (hotter, colder), of_moves, self.operations)
        self.judge(chain)

    def polish(self, chain: Chain, steps: int) -> None:
        """Improve paths and order together, from the order of dispatch or the last one."""
        state, candidate = chain.state, chain.candidate
        if chain.order is None:
            chain.order = self.dispatched(chain)
        order = chain.order
        before, order_before = copy_of(candidate), Order(*(array.copy() for array in order))

        def cost_s() -> float:
            return fast(replay)(self.problem, candidate, order, state.scratch, np.inf, 0.0)

        chain.cost_s = cost_s()
        hotter = np.clip(steps / self.steps_to_reorder, 1, POLISH_MOST)
        hottest, coldest = hotter * POLISH_HOTTEST * chain.cost_s, POLISH_COLDEST * chain.cost_s
        of_moves = self.weights * self.polish_moves, POLISH_MEAN_WEIGHT
        orders = order, order_for(candidate), order_for(candidate)
        self.in_pieces(
            polish, (state, orders), steps, (hottest, coldest), of_moves, self.operations
        )
        polished_s = cost_s()
        if polished_s < chain.cost_s:
            chain.cost_s = polished_s
        else:
            copy(before, candidate)
            chain.order = order_before

    def dispatched(self, chain: Chain) -> Order:
        """Return the order in which dispatch runs a chain's candidate."""
        order = order_for(chain.candidate)
        rest = (order, chain.state.scratch, np.inf, 0.0)
        fast(evaluate)(self.problem, chain.candidate, *rest)
        return order

    def in_pieces(
        self,
        kernel: Callable[..., object],
        changed: tuple[Any, ...],
        steps: int,
        temperatures: tuple[float, float],
        of_moves: tuple[np.ndarray, float],
        work_of_step: float,
    ) -> None:
        """Run steps of a kernel with falling temperatures, and check the clock between pieces.

        It changes the arrays in `changed`; `of_moves` are the weights of a `Cooling`.
        """
        hottest, coldest = temperatures
        piece = max(1, int(LOOK_S * self.operations_per_s / work_of_step))
        cooling = (coldest / hottest) ** (1 / max(1, steps))
        for done in range(0, max(1, steps), piece):
            if done and self.over():
                return
            own = Cooling(min(piece, steps - done), hottest * cooling**done, cooling, *of_moves)
            fast(kernel)(self.problem, *changed, own)

    def judge(self, chain: Chain) -> None:
        """Continue from the chain's best candidate, and store its cost."""
        copy(chain.state.best, chain.candidate)
        chain.cost_s = dispatched_s(self.problem, chain.state, 0.0)
