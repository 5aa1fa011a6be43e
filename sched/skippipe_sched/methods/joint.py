"""Placement, stage sets, replicas, swaps and the order on the nodes, all searched together.

Several chains start from different placements, for full paths one from DT-FM's, and random
balanced paths (large cases from what the paper's search finds quickly). Each first settles by a
quick estimate, then anneals by the simulation of the whole iteration; the best of them go on. At
the end paths and order are polished together, where nodes may also wait.

Not in the paper, which places nodes, finds paths and orders operations one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np

from skippipe_sched.methods import dtfm, full, skippipe
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.routes import Routes
from skippipe_sched.problem.case import Case, Rules
from skippipe_sched.search import annealing
from skippipe_sched.search.annealing import Candidate
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.search.compiled import is_compiled
from skippipe_sched.search.evaluator import (
    NO_DRAWS,
    NO_ORDER,
    NO_STRETCH,
    Problem,
    Scratch,
    Stretches,
    as_operations,
    evaluate,
    first_of_slots,
    problem_of,
    scratch_for,
)
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.jitter import draw_stretch

# A second of the budget pays for simulating so many operations on each of the threads, however
# quick the machine is. The machine of the committed results does half as many again.
OPERATIONS_PER_S = 13e6
THREADS = 2
ROUNDING = 1e-9
# What a move costs besides its simulation, in operations.
OPERATIONS_OF_MOVE = 50
# Beyond what the caches hold, an operation takes up to three times as long.
CACHED_OPERATIONS = 5000
# A chain looks at the clock whenever it has done about this many seconds of work.
LOOK_S = 0.1
# A chain needs this many simulations to be worth starting, and so many for each microbatch.
LEAST_STEPS = 2000
LEAST_STEPS_OF_MICROBATCH = 20

# With fewer simulations than these for each microbatch, chains do not start at random but from
# what the paper's search finds in a share of the budget, with little of the heat that would
# destroy it.
HURRIED_STEPS = 300
HURRIED_HEAT = 0.05
PREPARING_SHARE = 0.2
# Where paths visit every stage, annealing hardly finds its way to placements as good as DT-FM's:
# one chain starts, with as little heat, from there.
PLACING_SHARE = 0.1

# How often each move is tried, by its number in annealing.py.
WEIGHTS = {
    annealing.NODES: 2.0,
    annealing.REPLICAS: 3.0,
    annealing.STAGES: 2.0,
    annealing.SWAP: 1.0,
    annealing.TAILS: 2.0,
    annealing.PRIORITY: 2.0,
    annealing.URGENCY: 1.0,
    annealing.REPLICA: 0.5,
    annealing.STAGE: 0.5,
}
# The mean end of the data nodes guides the search where the maximum is flat.
MEAN_WEIGHT = 0.3
# A robust plan is first a good plan. Then, for the rest of the work, its paths and order are
# polished for the mean over draws of jitter: other draws than `simulate --jitter` has.
CALM_SHARE = 0.4
DRAWS = 48
DRAWS_SEED = 1_000_000
# The quick estimate first, then the rounds, and last the order.
SETTLE_SHARE = 0.05
SETTLE_HOTTEST_S, SETTLE_COLDEST_S = 2.0, 0.05
POLISH_SHARE = 0.18
POLISH_HOTTEST, POLISH_COLDEST = 0.01, 0.0003
# With steps enough to reorder everything, polishing starts up to so many times hotter, on so many
# more chains: few operations are searched for the best order as thoroughly as for the best paths.
POLISH_MOST = 10
STEPS_TO_REORDER = 5
POLISH_MEAN_WEIGHT = 0.001


@dataclass(frozen=True)
class Round:
    """The best chains go on, for a share of the work; temperatures as shares of the iteration."""

    chains: int
    share: float
    hottest: float
    coldest: float


ROUNDS = (
    Round(chains=8, share=0.42, hottest=0.03, coldest=0.003),
    Round(chains=3, share=0.2, hottest=0.012, coldest=0.0015),
    Round(chains=2, share=0.15, hottest=0.006, coldest=0.0003),
)


def routes(case: Case, search: Search) -> Routes:
    """The best plan found for `case` within the budget.

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    return _Joint(case, search).run()


def full_routes(case: Case, search: Search) -> Routes:
    """The same for full paths in order: what planning alone brings, without skipping."""
    rules = Rules(max_swaps=0, max_swap_distance=1, max_jump=0)
    return routes(replace(case, path_length=len(case.stages), rules=rules), search)


class _Chain:
    """One candidate on its way, the best that it was, and its own random numbers."""

    def __init__(self, problem: Problem, candidate: Candidate, seed: int, heat: float):
        self.candidate = candidate
        self.heat = heat
        self.best = candidate.copy()
        self.best_cost = np.array([np.inf])
        self.undo = annealing.undo_for(candidate)
        self.scratch = scratch_for(problem, *candidate.paths.shape)
        self.state = annealing.random_state(seed)
        self.order = NO_ORDER
        self.cost_s = np.inf


class _Joint:
    """One search: the case as arrays, the chains, and how much work there is."""

    def __init__(self, case: Case, search: Search):
        self.case = case
        self.search = search
        self.problem = problem_of(case)
        microbatches = sum(case.microbatches)
        self.chain_length = 2 * case.path_length + 1
        operations = microbatches * self.chain_length
        slower = 1 + min(2.0, operations / CACHED_OPERATIONS)
        self.operations = operations * slower + OPERATIONS_OF_MOVE
        self.steps_to_reorder = STEPS_TO_REORDER * operations**2
        self.bound_s = lower_bound_s(case, case.path_length)
        self.weights = np.array([WEIGHTS[move] for move in sorted(WEIGHTS)])
        if search.placement is not None:
            self.weights[annealing.NODES] = 0.0
        self.polish_moves = np.ones(annealing.MOVES)
        self.polish_moves[[annealing.PRIORITY, annealing.URGENCY]] = 0.0
        if self.problem.unequal:  # Then a node's order is not another's.
            self.polish_moves[annealing.NODES] = 0.0
        self.draws = NO_DRAWS
        self.prepared: Routes | None = None
        self.placed: Placement | None = None
        self.optimal = False

    def run(self) -> Routes:
        self.compile(self.start(0))
        self.search.start_clock()
        work = self.search.steps(THREADS * OPERATIONS_PER_S)
        steps = work / self.operations * (CALM_SHARE if self.search.jitter else 1.0)
        least = max(LEAST_STEPS, LEAST_STEPS_OF_MICROBATCH * sum(self.case.microbatches))
        most = int(np.clip(ROUNDS[0].share * steps / least, THREADS, ROUNDS[0].chains))
        if ROUNDS[0].share * steps / most < HURRIED_STEPS * sum(self.case.microbatches):
            self.prepared = skippipe.routes(self.case, self.search.part(PREPARING_SHARE))
        elif self.search.placement is None and self.case.path_length == len(self.case.stages):
            self.placed = dtfm.place(self.case, self.search.part(PLACING_SHARE))
        every_chain = [self.start(number) for number in range(most)]
        chains = every_chain
        with ThreadPoolExecutor(THREADS) as threads:
            self.each(threads, chains, lambda chain: self.settle(chain, work / most))
            for round_ in ROUNDS:
                chains = sorted(chains, key=lambda chain: chain.cost_s)[: round_.chains]
                share = int(round_.share * steps / len(chains))
                reference_s = chains[0].cost_s
                self.each(
                    threads,
                    chains,
                    lambda chain, r=round_, n=share, s=reference_s: self.anneal(chain, r, n, s),
                )
            work_of_polish = POLISH_SHARE * steps
            most = int(np.clip(work_of_polish / self.steps_to_reorder, THREADS, len(every_chain)))
            chains = sorted(every_chain, key=lambda chain: chain.cost_s)[:most]
            polish = int(work_of_polish / len(chains))
            self.each(threads, chains, lambda chain: self.polish(chain, polish))
            if self.search.jitter:
                self.draws = self.draws_of_jitter()
                steps = (1 - CALM_SHARE) / CALM_SHARE * steps / DRAWS / len(chains)
                self.each(threads, chains, lambda chain: self.polish(chain, int(steps)))
        best = min(chains, key=lambda chain: chain.cost_s)
        return self.routes_of(best.candidate, best.order)

    def draws_of_jitter(self) -> Stretches:
        """The luck that a robust plan is made for."""
        size = sum(self.case.microbatches), len(self.case.stages)
        luck = [
            draw_stretch(*size, self.search.jitter, DRAWS_SEED + self.search.seed, draw)
            for draw in range(DRAWS)
        ]
        return Stretches(
            np.stack([one.operations for one in luck]),
            np.stack([one.hops for one in luck]),
            np.stack([one.averagings for one in luck]),
        )

    def each(
        self, threads: ThreadPoolExecutor, chains: list[_Chain], work: Callable[[_Chain], None]
    ) -> None:
        """Let all chains work, and see whether one of them cannot be beaten."""
        waiting = {threads.submit(work, chain) for chain in chains}
        while waiting:
            # With a timeout, so that this thread wakes for Ctrl-C and the progress bar moves.
            done, waiting = wait(waiting, timeout=LOOK_S)
            for future in done:
                future.result()
            self.search.found(min(chain.cost_s for chain in chains))
        # Only here, where all have ended: what a chain does must not hang on how quick others are.
        least_s = min(chain.cost_s for chain in chains)
        self.optimal = not self.search.jitter and least_s <= self.bound_s * (1 + ROUNDING)

    def start(self, number: int) -> _Chain:
        """A chain with random balanced paths on a random placement, if no better are known."""
        search, case = self.search, self.case
        nodes = search.random.permutation(len(case.nodes))
        is_placed = self.placed is not None and number == 0
        known = self.prepared.stages if self.prepared else search.placement
        if is_placed:
            known = self.placed
        if known is not None:
            nodes = np.array([node for stage in known for node in stage])
        stages = self.placement(nodes)
        paths = random_paths(case, stages, search.random)
        if self.prepared is not None and number == 0:
            paths = self.prepared.paths
        elif self.prepared is not None or is_placed:
            paths = full.matched(case, stages, paths)
        candidate = annealing.candidate_of(self.problem, nodes, np.argsort(nodes)[np.array(paths)])
        heat = 1.0 if self.prepared is None and not is_placed else HURRIED_HEAT
        return _Chain(self.problem, candidate, search.seed * 1_000_003 + number, heat)

    def placement(self, nodes: np.ndarray) -> Placement:
        first = self.problem.first_slot
        return tuple(
            tuple(nodes[first[stage] : first[stage + 1]].tolist())
            for stage in range(len(self.case.stages))
        )

    def compile(self, chain: _Chain) -> None:
        """Run everything once with no steps, so that compiling does not count as searching."""
        if not is_compiled(annealing.polish):
            print("compiling the search, once on this machine: half a minute", file=sys.stderr)
        self.settle(chain, 0.0)
        self.anneal(chain, ROUNDS[0], 0, 1.0)
        self.polish(chain, 0)
        chain.order = NO_ORDER

    def settle(self, chain: _Chain, work: float) -> None:
        """Anneal by the quick estimate, for `SETTLE_SHARE` of the work."""
        start, start_s = chain.candidate.copy(), self.cost(chain, 0.0)
        cost = 4 * self.chain_length + self.case.stages[0]
        weights = self.weights.copy()
        # Swapping nodes costs as much as all microbatches do.
        weights[annealing.NODES] *= min(1.0, 5 * cost / self.operations)
        weights[[annealing.PRIORITY, annealing.URGENCY]] = 0.0
        nodes_share = weights[annealing.NODES] / weights.sum()
        steps = int(SETTLE_SHARE * work / (cost + nodes_share * self.operations))
        self.in_pieces(
            steps,
            cost + nodes_share * self.operations,
            chain.heat * SETTLE_HOTTEST_S,
            chain.heat * SETTLE_COLDEST_S,
            lambda number, temperature, cooling: annealing.settle(
                self.problem,
                chain.candidate,
                chain.undo,
                chain.state,
                number,
                temperature,
                cooling,
                weights,
            ),
        )
        chain.best.take(chain.candidate)
        self.judge(chain)
        if not chain.cost_s <= start_s:  # The estimate does not see all, nor that nodes lock.
            chain.best.take(start)
            self.judge(chain)

    def in_pieces(
        self,
        steps: int,
        work_of_step: float,
        hottest: float,
        coldest: float,
        run: Callable[[int, float, float], object],
    ) -> None:
        """Run steps with falling temperatures, and look at the clock in between."""
        piece = max(1, int(LOOK_S * OPERATIONS_PER_S / work_of_step))
        cooling = (coldest / hottest) ** (1 / max(1, steps))
        for done in range(0, max(1, steps), piece):
            if done and (self.optimal or self.search.stopped()):
                return
            run(min(piece, steps - done), hottest * cooling**done, cooling)

    def anneal(self, chain: _Chain, round_: Round, steps: int, reference_s: float) -> None:
        """Anneal by simulation, from the best that the chain was."""
        chain.candidate.take(chain.best)
        current = self.cost(chain)
        chain.best_cost[0] = current

        def run(number: int, temperature: float, cooling: float) -> None:
            nonlocal current
            current = annealing.anneal(
                self.problem,
                chain.candidate,
                current,
                chain.best,
                chain.best_cost,
                chain.undo,
                chain.scratch,
                chain.state,
                number,
                temperature,
                cooling,
                self.weights,
                MEAN_WEIGHT,
            )

        self.in_pieces(
            steps,
            self.operations,
            chain.heat * round_.hottest * reference_s,
            chain.heat * round_.coldest * reference_s,
            run,
        )
        self.judge(chain)

    def cost(self, chain: _Chain, mean_weight: float = MEAN_WEIGHT) -> float:
        return annealing.cost_of(
            self.problem,
            chain.candidate,
            chain.scratch,
            np.inf,
            mean_weight,
        )

    def judge(self, chain: _Chain) -> None:
        """Put down what the chain's best candidate costs, and go on from it."""
        chain.candidate.take(chain.best)
        chain.cost_s = self.cost(chain, 0.0)

    def polish(self, chain: _Chain, steps: int) -> None:
        """Improve paths and order together, from the order that dispatch gives or the last one."""
        candidate = chain.candidate
        first = first_of_slots(candidate.paths, len(candidate.node_of_slot))
        if len(chain.order) == 0:
            chain.order = self.dispatched(candidate, chain.scratch)
        before, order_before = candidate.copy(), chain.order.copy()

        def cost_s() -> float:
            order = (chain.order, first, self.draws, chain.scratch)
            return annealing.cost_of_order(self.problem, candidate, *order, np.inf, 0.0)

        def run(number: int, temperature: float, cooling: float) -> None:
            annealing.polish(
                self.problem,
                candidate,
                chain.order,
                first,
                chain.undo,
                self.draws,
                chain.scratch,
                chain.state,
                number,
                temperature,
                cooling,
                self.weights * self.polish_moves,
                POLISH_MEAN_WEIGHT,
            )

        chain.cost_s = cost_s()
        hotter = np.clip(steps / self.steps_to_reorder, 1, POLISH_MOST)
        hottest, coldest = hotter * POLISH_HOTTEST * chain.cost_s, POLISH_COLDEST * chain.cost_s
        work_of_step = self.operations * max(1, len(self.draws.operations))
        self.in_pieces(steps, work_of_step, hottest, coldest, run)
        polished_s = cost_s()
        if polished_s < chain.cost_s:
            chain.cost_s = polished_s
        else:
            candidate.take(before)
            chain.order = order_before

    def dispatched(self, candidate: Candidate, scratch: Scratch) -> np.ndarray:
        """The order in which dispatch runs a candidate, slot after slot."""
        first = first_of_slots(candidate.paths, len(candidate.node_of_slot))
        order = np.zeros(first[-1], np.int64)
        arguments = (self.problem, *candidate[:2], candidate.averaging_s, candidate.priority)
        evaluate(*arguments, order, first, False, NO_STRETCH, scratch, np.inf, 0.0)
        return order

    def routes_of(self, candidate: Candidate, order: np.ndarray) -> Routes:
        nodes = candidate.node_of_slot
        paths = tuple(tuple(path) for path in nodes[candidate.paths].tolist())
        first = first_of_slots(candidate.paths, len(nodes))
        return Routes(self.placement(nodes), paths, as_operations(order, first, nodes, paths))
