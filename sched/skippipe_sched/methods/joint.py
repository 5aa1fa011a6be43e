"""Joint search for placement, stage sets, replicas, swaps and the order on the nodes.

Several chains start from different placements and random balanced paths; for full paths one starts
from DT-FM's placement, large cases start from a quick result of the paper's search, and one chain
starts from a known plan, if there is one. Each first settles by a quick estimate, then anneals by
the simulation of the whole iteration; the best continue. At the end paths and order are polished
together, where nodes may also wait. In outer mode, the chain with the shortest iteration in steady
state is taken.

A search that improves a known plan has a few chains, which all start there, without the estimate:
in two seconds it finds more that way, in ten about as much.

This differs from the paper, which places nodes, finds paths and orders operations one after the
other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache, cached_property, partial

import numpy as np

from skippipe_sched.methods import dtfm, full, skippipe
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.routes import Routes, data_node_of_microbatches, place_in_order
from skippipe_sched.problem.case import Case, Rules, parse_case
from skippipe_sched.problem.plan import NodePath, Plan
from skippipe_sched.search import annealer
from skippipe_sched.search.annealer import Annealer, Chain, Round
from skippipe_sched.search.arrays import as_operations, candidate_of, problem_of
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.search.compiled import (
    Compilation,
    compiling_alone,
    interpreting,
    is_compiled,
    mark_as_compiled,
)
from skippipe_sched.timing.simulate import forecast

THREADS = 2
ROUNDING = 1e-9
# Simulations that make a chain worth starting, in total and for each microbatch.
LEAST_STEPS = 2000
LEAST_STEPS_OF_MICROBATCH = 20

# With fewer simulations per microbatch, chains do not start at random but from the result of the
# paper's search in a share of the budget, at a low temperature that does not destroy it.
HURRIED_STEPS = 300
HURRIED_HEAT = 0.05
PREPARING_SHARE = 0.2
# If paths visit every stage, annealing rarely finds placements as good as DT-FM's: one chain starts
# there, at the same low temperature.
PLACING_SHARE = 0.1

# A search in plain Python: the seconds of its budget within which its temperature falls, its
# operations per second, and the share of this work for the quick estimate.
SHORT_BUDGET_S = 2.0
INTERPRETED_OPERATIONS_PER_S = 6e4
INTERPRETED_SETTLE_SHARE = 0.6
# The quick estimate is first, then the rounds, and last the order: few steps suffice for it, and
# rounds gain by more. With few operations paths are found soon, and the order matters more.
SETTLE_SHARE = 0.05
POLISH_SHARE = 0.04
FEW_OPERATIONS, POLISH_SHARE_OF_FEW = 100, 0.18
# A step of polishing replays an order, which is at least this many times as fast as choosing one.
REPLAYS_OF_STEP = 1.75
# Seconds of a step of the rounds that are left, relative to those done: at a lower temperature more
# simulations end early.
LATER_COST = 0.9
ROUNDS = (
    Round(chains=12, share=0.42, hottest=0.03, coldest=0.003),
    Round(chains=4, share=0.26, hottest=0.012, coldest=0.0015),
    Round(chains=2, share=0.23, hottest=0.006, coldest=0.0003),
)
ROUNDS_FROM_KNOWN = (
    Round(chains=4, share=0.51, hottest=0.015, coldest=0.0015),
    Round(chains=2, share=0.45, hottest=0.006, coldest=0.0003),
)
SMALLEST_CASE = {
    "nodes": 2, "locations": ["a"], "links": [], "activation_bytes": 1, "stage_bytes": 1,
    "forward_s": 1, "stages": [1, 1], "path_length": 2, "microbatches_per_data_node": 1,
    "memory": 1,
}  # fmt: skip


def routes(case: Case, search: Search, *, skips: bool = True) -> Routes:
    """Search for the best plan of `case` within the budget.

    Without `skips`, all paths are full and in order: the effect of planning alone.

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    if not skips:
        rules = Rules(max_swaps=0, max_swap_distance=1, max_jump=0)
        case = replace(case, path_length=len(case.stages), rules=rules)
    return _Joint(case, search).run()


def dealt(case: Case, plan: Plan) -> tuple[NodePath, ...]:
    """Return the paths of a plan, with their data nodes in the order that all methods use."""
    of_node: dict[int, list[NodePath]] = {node: [] for node in plan.stages[0]}
    for path in plan.microbatches:
        of_node[path[0]].append(path)
    return tuple(of_node[node].pop(0) for node in data_node_of_microbatches(case, plan.stages))


def compile_search() -> None:
    """Compile the search, once on this machine."""
    with compiling_alone():
        if not is_compiled():
            joint = _Joint(parse_case(SMALLEST_CASE), Search())
            joint.compile(joint.start(0))


@cache
def compilation() -> Compilation:
    """Start another process that compiles the search, once in this process."""
    return Compilation(f"from {__name__} import compile_search; compile_search()")


class _Joint:
    """A search: the case as arrays, the chains, and the amount of work."""

    def __init__(self, case: Case, search: Search):
        self.case = case
        self.search = search
        self.problem = problem_of(case)
        self.annealer = Annealer(
            self.problem, sum(case.microbatches), case.path_length,
            lambda: self.optimal or search.stopped(),
        )  # fmt: skip
        if search.placement is not None:
            self.annealer.keep_placement()
        self.prepared: Routes | None = None
        self.placed: Placement | None = None
        self.optimal = False

    @cached_property
    def bound_s(self) -> float:
        """Bound that no plan of the case can beat [s]."""
        # SciPy is slow to load, and a search in plain Python does not need it.
        from skippipe_sched.timing.bound import lower_bound_s

        return lower_bound_s(self.case, self.case.path_length)

    def run(self) -> Routes:
        if not is_compiled():
            quick = self.interpreted()
            if quick is not None:
                return quick
        self.compile(self.start(0))
        self.search.start_clock()
        work = self.search.steps(THREADS * annealer.OPERATIONS_PER_S)
        steps = work / self.annealer.operations
        if self.search.improves:
            chains = [self.start(number) for number in range(ROUNDS_FROM_KNOWN[0].chains)]
            with ThreadPoolExecutor(THREADS) as threads:
                self.each(threads, chains, self.annealer.judge)
                return self.best_of(self.annealed(threads, chains, ROUNDS_FROM_KNOWN, steps))
        least = max(LEAST_STEPS, LEAST_STEPS_OF_MICROBATCH * sum(self.case.microbatches))
        most = int(np.clip(ROUNDS[0].share * steps / least, THREADS, ROUNDS[0].chains))
        if ROUNDS[0].share * steps / most < HURRIED_STEPS * sum(self.case.microbatches):
            self.prepared = skippipe.routes(self.case, self.search.part(PREPARING_SHARE))
        elif self.search.placement is None and self.case.path_length == len(self.case.stages):
            self.placed = dtfm.place(self.case, self.search.part(PLACING_SHARE))
        chains = [self.start(number) for number in range(most)]
        with ThreadPoolExecutor(THREADS) as threads:
            settling = SETTLE_SHARE * (work / most)
            self.each(threads, chains, lambda chain: self.annealer.settle(chain, settling))
            return self.best_of(self.annealed(threads, chains, ROUNDS, steps))

    def annealed(
        self,
        threads: ThreadPoolExecutor,
        every_chain: list[Chain],
        rounds: tuple[Round, ...],
        steps: float,
    ) -> list[Chain]:
        """Anneal chains in these rounds, polish the best of all and return those.

        On a machine that is too slow for all steps, the later rounds have fewer, so that the
        temperature of each still falls to its end.
        """
        polish_share = POLISH_SHARE
        if sum(self.case.microbatches) * self.annealer.chain_length <= FEW_OPERATIONS:
            polish_share = POLISH_SHARE_OF_FEW
            of_before = (1 - polish_share) / (1 - POLISH_SHARE)
            rounds = tuple(replace(round_, share=of_before * round_.share) for round_ in rounds)
        chains, begun_s, done, left = every_chain, self.search.elapsed_s, 0.0, polish_share
        left += sum(round_.share for round_ in rounds)
        for round_ in rounds:
            if done:
                seconds_of_step = LATER_COST * (self.search.elapsed_s - begun_s) / done
                steps = self.search.fitted(steps, seconds_of_step * left * steps)
            chains = sorted(chains, key=lambda chain: chain.cost_s)[: round_.chains]
            share, first_s = int(round_.share * steps / len(chains)), chains[0].cost_s
            work_on = partial(self.annealer.anneal, round_=round_, steps=share, reference_s=first_s)
            self.each(threads, chains, work_on)
            done, left = done + round_.share * steps, left - round_.share
        work_of_polish = polish_share * steps * REPLAYS_OF_STEP
        worth = work_of_polish / self.annealer.steps_to_reorder
        most = int(np.clip(worth, THREADS, len(every_chain)))
        chains = sorted(every_chain, key=lambda chain: chain.cost_s)[:most]
        each_polish = int(work_of_polish / len(chains))
        self.each(threads, chains, lambda chain: self.annealer.polish(chain, each_polish))
        return chains

    def each(
        self, threads: ThreadPoolExecutor, chains: list[Chain], work: Callable[[Chain], None]
    ) -> None:
        """Run `work` on all chains, and check whether one of them reaches the bound."""
        waiting = {threads.submit(work, chain) for chain in chains}
        while waiting:
            # The timeout wakes this thread for Ctrl-C and the progress bar.
            done, waiting = wait(waiting, timeout=annealer.LOOK_S)
            for future in done:
                future.result()
            self.search.found(min(chain.cost_s for chain in chains))
        # Checked only after all have ended: the work of a chain must not depend on the speed of
        # others.
        least_s = min(chain.cost_s for chain in chains)
        self.optimal = least_s <= self.bound_s * (1 + ROUNDING)

    def start(self, number: int) -> Chain:
        """Start a chain with random balanced paths on a random placement, or from known ones."""
        search, case = self.search, self.case
        nodes = search.random.permutation(len(case.nodes))
        begun = search.begin if number == 0 or search.improves else None
        is_placed = self.placed is not None and number == 0 and begun is None
        known = self.prepared.stages if self.prepared else search.placement
        if is_placed:
            known = self.placed
        if begun is not None:
            known = begun.stages
        if known is not None:
            nodes = np.array([node for stage in known for node in stage])
        stages = place_in_order(case, nodes.tolist())
        paths = random_paths(case, stages, search.random)
        if begun is not None:
            paths = dealt(case, begun)
        elif self.prepared is not None and number == 0:
            paths = self.prepared.paths
        elif self.prepared is not None or is_placed:
            paths = full.matched(case, stages, paths)
        candidate = candidate_of(self.problem, nodes, np.argsort(nodes)[np.array(paths)])
        is_random = self.prepared is None and not is_placed and begun is None
        heat = 1.0 if is_random or search.improves else HURRIED_HEAT
        return Chain(self.problem, candidate, search.seed * 1_000_003 + number, heat)

    def compile(self, chain: Chain) -> None:
        """Run everything once with no steps, so that compiling does not count as searching."""
        self.annealer.settle(chain, 0.0)
        self.annealer.anneal(chain, ROUNDS[0], 0, 1.0)
        self.annealer.polish(chain, 0)
        dtfm.compile_scoring(self.case)
        mark_as_compiled()
        self.search.bound_s = self.bound_s

    def interpreted(self) -> Routes | None:
        """Search in plain Python while another process compiles the search; return the best plan.

        Return None once that is done, unless the budget is over by then or the user interrupts. A
        search that waits for the compiler does nothing else, unless compiling fails: then plain
        Python has all of the budget.
        """
        search, compiling = replace(self.search), compilation()  # It has its own random numbers.
        if search.waits_for_compiler and compiling.succeeded() is None:
            print("compiling the search (once per machine, 30 to 90 s)", file=sys.stderr)
            while compiling.succeeded() is None and not search.end.interrupted:
                time.sleep(annealer.LOOK_S)
        if compiling.succeeded():
            return None

        def over() -> bool:
            return search.stopped() or bool(compiling.succeeded())

        with interpreting():
            own = _Joint(self.case, search)
            chain = own.start(0)
            own.annealer.over = over
            own.annealer.operations_per_s = INTERPRETED_OPERATIONS_PER_S
            search.start_clock()
            work = INTERPRETED_OPERATIONS_PER_S * min(search.budget_s, SHORT_BUDGET_S)
            steps = int(work / own.annealer.operations)
            round_ = ROUNDS_FROM_KNOWN[-1] if search.improves else ROUNDS[1]
            if search.improves:
                own.annealer.judge(chain)
            is_begun = False  # One piece of work is done even if all is over.
            while not (is_begun and over()):
                if chain.cost_s < np.inf:
                    own.annealer.anneal(chain, round_, steps, chain.cost_s)
                else:
                    own.annealer.settle(chain, INTERPRETED_SETTLE_SHARE * work)
                search.found(chain.cost_s)
                is_begun = True
        end, compiled = search.end, compiling.succeeded()
        end.interpreted = end.cut_short = end.interrupted or not compiled
        end.uncompilable = compiled is False
        return own.routes_of(chain) if end.interpreted else None

    def best_of(self, chains: list[Chain]) -> Routes:
        """Return the result of the best chain; in outer mode, the best in steady state."""
        by_cost = sorted(chains, key=lambda chain: chain.cost_s)
        # A plan with a deadlock has no steady state.
        judged = [chain for chain in by_cost if chain.cost_s < np.inf]
        if not self.case.averaging.is_outer or not judged:
            return self.routes_of(by_cost[0])

        def steady_s(routes: Routes) -> float:
            return forecast(self.case, routes.stages, routes.paths, routes.order).iteration_s

        return min(map(self.routes_of, judged), key=steady_s)

    def routes_of(self, chain: Chain) -> Routes:
        candidate = chain.candidate
        paths = tuple(tuple(path) for path in candidate.node_of_slot[candidate.paths].tolist())
        order = None if chain.order is None else as_operations(chain.order, candidate, paths)
        return Routes(place_in_order(self.case, candidate.node_of_slot.tolist()), paths, order)
