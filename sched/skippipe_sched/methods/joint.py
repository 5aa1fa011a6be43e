"""Placement, stage sets, replicas, swaps and the order on the nodes, all searched together.

Several chains start from different placements, for full paths one from DT-FM's, and random
balanced paths (large cases from what the paper's search finds quickly), and one from a plan that is
known already, if there is one. Each first settles by a
quick estimate, then anneals by the simulation of the whole iteration; the best of them go on. At
the end paths and order are polished together, where nodes may also wait. Where iterations do not
wait for averaging, the chain is taken whose iterations follow one another soonest.

Not in the paper, which places nodes, finds paths and orders operations one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np

from skippipe_sched.methods import dtfm, full, skippipe
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.routes import Routes, data_node_of_microbatches
from skippipe_sched.problem.case import Case, Rules
from skippipe_sched.problem.plan import NodePath, Plan
from skippipe_sched.search import annealer
from skippipe_sched.search.annealer import Annealer, Chain, Round
from skippipe_sched.search.arrays import Stretches, as_operations, candidate_of, problem_of
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.search.compiled import is_compiled
from skippipe_sched.search.polishing import polish
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.jitter import draw_stretch
from skippipe_sched.timing.simulate import forecast

THREADS = 2
ROUNDING = 1e-9
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

# A robust plan is first a good plan. Then, for the rest of the work, its paths and order are
# polished for the mean over draws of jitter: other draws than `simulate --jitter` has.
CALM_SHARE = 0.4
DRAWS = 48
DRAWS_SEED = 1_000_000
# The quick estimate first, then the rounds, and last the order.
SETTLE_SHARE = 0.05
POLISH_SHARE = 0.18
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


def dealt(case: Case, plan: Plan) -> tuple[NodePath, ...]:
    """The paths of a plan, with the data nodes of microbatches in the order of all methods."""
    of_node: dict[int, list[NodePath]] = {node: [] for node in plan.stages[0]}
    for path in plan.microbatches:
        of_node[path[0]].append(path)
    return tuple(of_node[node].pop(0) for node in data_node_of_microbatches(case, plan.stages))


class _Joint:
    """One search: the case as arrays, the chains, and how much work there is."""

    def __init__(self, case: Case, search: Search):
        self.case = case
        self.search = search
        self.problem = problem_of(case)
        self.annealer = Annealer(
            self.problem, sum(case.microbatches), case.path_length,
            lambda: self.optimal or search.stopped(),
        )  # fmt: skip
        self.bound_s = lower_bound_s(case, case.path_length)
        if search.placement is not None:
            self.annealer.keep_placement()
        self.prepared: Routes | None = None
        self.placed: Placement | None = None
        self.optimal = False

    def run(self) -> Routes:
        self.compile(self.start(0))
        self.search.start_clock()
        work = self.search.steps(THREADS * annealer.OPERATIONS_PER_S)
        steps = work / self.annealer.operations * (CALM_SHARE if self.search.jitter else 1.0)
        least = max(LEAST_STEPS, LEAST_STEPS_OF_MICROBATCH * sum(self.case.microbatches))
        most = int(np.clip(ROUNDS[0].share * steps / least, THREADS, ROUNDS[0].chains))
        if ROUNDS[0].share * steps / most < HURRIED_STEPS * sum(self.case.microbatches):
            self.prepared = skippipe.routes(self.case, self.search.part(PREPARING_SHARE))
        elif self.search.placement is None and self.case.path_length == len(self.case.stages):
            self.placed = dtfm.place(self.case, self.search.part(PLACING_SHARE))
        every_chain = [self.start(number) for number in range(most)]
        chains = every_chain
        with ThreadPoolExecutor(THREADS) as threads:
            settling = SETTLE_SHARE * (work / most)
            self.each(threads, chains, lambda chain: self.annealer.settle(chain, settling))
            for round_ in ROUNDS:
                chains = sorted(chains, key=lambda chain: chain.cost_s)[: round_.chains]
                share = int(round_.share * steps / len(chains))
                reference_s = chains[0].cost_s
                self.each(
                    threads,
                    chains,
                    lambda chain, r=round_, n=share, s=reference_s: self.annealer.anneal(
                        chain, r, n, s
                    ),
                )
            work_of_polish = POLISH_SHARE * steps
            worth = work_of_polish / self.annealer.steps_to_reorder
            most = int(np.clip(worth, THREADS, len(every_chain)))
            chains = sorted(every_chain, key=lambda chain: chain.cost_s)[:most]
            each_polish = int(work_of_polish / len(chains))
            self.each(threads, chains, lambda chain: self.annealer.polish(chain, each_polish))
            if self.search.jitter:
                self.annealer.draws = self.draws_of_jitter()
                steps = (1 - CALM_SHARE) / CALM_SHARE * steps / DRAWS / len(chains)
                self.each(threads, chains, lambda chain: self.annealer.polish(chain, int(steps)))
        return self.best_of(chains)

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
        self, threads: ThreadPoolExecutor, chains: list[Chain], work: Callable[[Chain], None]
    ) -> None:
        """Let all chains work, and see whether one of them cannot be beaten."""
        waiting = {threads.submit(work, chain) for chain in chains}
        while waiting:
            # With a timeout, so that this thread wakes for Ctrl-C and the progress bar moves.
            done, waiting = wait(waiting, timeout=annealer.LOOK_S)
            for future in done:
                future.result()
            self.search.found(min(chain.cost_s for chain in chains))
        # Only here, where all have ended: what a chain does must not hang on how quick others are.
        least_s = min(chain.cost_s for chain in chains)
        self.optimal = not self.search.jitter and least_s <= self.bound_s * (1 + ROUNDING)

    def start(self, number: int) -> Chain:
        """A chain with random balanced paths on a random placement, if no better are known."""
        search, case = self.search, self.case
        nodes = search.random.permutation(len(case.nodes))
        begun = search.begin if number == 0 else None
        is_placed = self.placed is not None and number == 0 and begun is None
        known = self.prepared.stages if self.prepared else search.placement
        if is_placed:
            known = self.placed
        if begun is not None:
            known = begun.stages
        if known is not None:
            nodes = np.array([node for stage in known for node in stage])
        stages = self.placement(nodes)
        paths = random_paths(case, stages, search.random)
        if begun is not None:
            paths = dealt(case, begun)
        elif self.prepared is not None and number == 0:
            paths = self.prepared.paths
        elif self.prepared is not None or is_placed:
            paths = full.matched(case, stages, paths)
        candidate = candidate_of(self.problem, nodes, np.argsort(nodes)[np.array(paths)])
        is_random = self.prepared is None and not is_placed and begun is None
        heat = 1.0 if is_random else HURRIED_HEAT
        return Chain(self.problem, candidate, search.seed * 1_000_003 + number, heat)

    def placement(self, nodes: np.ndarray) -> Placement:
        first = self.problem.first_slot
        return tuple(
            tuple(nodes[first[stage] : first[stage + 1]].tolist())
            for stage in range(len(self.case.stages))
        )

    def compile(self, chain: Chain) -> None:
        """Run everything once with no steps, so that compiling does not count as searching."""
        if not is_compiled(polish):
            print("compiling the search, once on this machine: half a minute", file=sys.stderr)
        self.annealer.settle(chain, 0.0)
        self.annealer.anneal(chain, ROUNDS[0], 0, 1.0)
        self.annealer.polish(chain, 0)

    def best_of(self, chains: list[Chain]) -> Routes:
        """What the best chain has found; where iterations overlap, best by how they follow."""
        by_cost = sorted(chains, key=lambda chain: chain.cost_s)
        # A plan that locks has no steady state, and one for jitter is best by its draws.
        judged = [chain for chain in by_cost if chain.cost_s < np.inf]
        if not self.case.averaging.is_outer or self.search.jitter or not judged:
            return self.routes_of(by_cost[0])

        def steady_s(routes: Routes) -> float:
            return forecast(self.case, routes.stages, routes.paths, routes.order).iteration_s

        return min(map(self.routes_of, judged), key=steady_s)

    def routes_of(self, chain: Chain) -> Routes:
        candidate = chain.candidate
        paths = tuple(tuple(path) for path in candidate.node_of_slot[candidate.paths].tolist())
        order = None if chain.order is None else as_operations(chain.order, candidate, paths)
        return Routes(self.placement(candidate.node_of_slot), paths, order)
