"""Division of the nodes of a case among lanes of experts that train in parallel.

The search tries many layouts: nodes of the lanes, as many for each or by its work, and the cut of
each model over its nodes. Each layout is annealed for all its lanes at once: nodes trade places
within a lane and between lanes, and paths change, judged by the simulation of a whole iteration.
The best layouts have children with small changes. At the end `joint` plans every expert of the few
best layouts, starting from the annealed paths, and the division with the earliest last end is
returned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from skippipe_sched.division.lanes import Division, Lane, LaneTraining, Part, checked
from skippipe_sched.division.parts import LaneCut, LanePlacement, Layout, Whole
from skippipe_sched.errors import InputError
from skippipe_sched.methods import make_plan, with_prediction
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.joint import THREADS
from skippipe_sched.methods.routes import (
    Routes,
    data_node_of_microbatches,
    place_in_order,
    visits_of_replicas,
)
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Plan
from skippipe_sched.search.anneal_division import trade
from skippipe_sched.search.annealer import (
    MEAN_WEIGHT,
    OPERATIONS_OF_MOVE,
    OPERATIONS_PER_S,
    WEIGHTS,
)
from skippipe_sched.search.annealing import ChainState, Cooling, anneal, chain_from, dispatched_s
from skippipe_sched.search.arrays import Problem, candidate_of, copy, copy_of, problem_of
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.search.compiled import fast

# Number of draws until a possible change is found.
TRIES = 20
# Number of cuts that are examined for a set of nodes.
SCREENED = 8
# Share of the first layouts in which all lanes have about as many nodes, whatever their work.
EQUAL_SHARE = 0.4
# Share of the budget; the rest is for the plans of the finalists.
DIVIDING_SHARE = 0.6
FINALISTS = 3
# Share of the threads' capacity; the rest is spent on making layouts.
WORKING_SHARE = 0.5
# Cost of judging a layout, in steps for each lane, and the number of layouts that have children.
STEPS_OF_LANE = 2_000
SCREENING_STEPS = 500
PARENTS = 8
CHILDREN = 8
# Limit on the parents that have the same cuts.
ALIKE = 2
# Share of the steps for layouts that are not children.
FIRST_SHARE = 0.2
# Steps of a piece, which covers two lanes; the next piece covers two others.
PIECE = 200
# Initial temperature of a child.
OF_CHILD = 0.01

# Temperatures as shares of the cost that is minimized.
HOTTEST, COLDEST = 0.05, 0.0005


def divide(source: Mapping[str, Any], lanes: Sequence[Lane], search: Search) -> Division:
    """Divide the nodes of a case, given as a mapping, among lanes that train in parallel.

    A part of the case has the links between its nodes and all its microbatches; the search chooses
    the number of replicas of each stage and whether neighboring stages are merged (`Whole`). All
    nodes are used.

    As for a plan, the result depends only on the seed and the budget on a fast enough machine.

    Raises:
        InputError: if the case, a lane or an expert is invalid, or there are too few nodes.
    """
    return _Search(Whole(source), checked(lanes), search).run()


@dataclass(eq=False)
class _Member:
    """A layout being annealed: a chain for each lane, and when each ends, in units of `weights`."""

    layout: Layout
    chains: list[ChainState]
    ends: np.ndarray
    random: np.random.Generator
    last: float = float("inf")

    @property
    def found(self) -> Layout:
        """Layout that annealing has produced."""
        return tuple(
            replace(place, nodes=tuple(chain.candidate.node_of_slot.tolist()))
            for place, chain in zip(self.layout, self.chains, strict=True)
        )


class _Search:
    """A search for a division.

    All nodes are used. How many each lane gets is drawn once, equal or by the work: small changes
    at most exchange the numbers of two lanes.
    """

    def __init__(self, whole: Whole, lanes: tuple[Lane, ...], search: Search):
        self.whole, self.lanes, self.search = whole, lanes, search
        nodes, needed = len(whole.case.nodes), whole.fewest_nodes * len(lanes)
        if nodes < needed:
            problem = f"{len(lanes)} parallel lanes need at least {whole.fewest_nodes} nodes each"
            remedy = f"Add {needed - nodes} nodes, or train fewer lanes in parallel"
            raise InputError("case.nodes", nodes, problem, remedy)
        self.work = np.array([lane.work for lane in lanes])
        self.near_s = whole.case.round_trip_s + whole.case.round_trip_s.T
        self.weights = np.array([lane.steps for lane in lanes], dtype=float)
        self.weights /= self.weights.max()
        self.chains = _Chains(whole, lanes)
        self.refusal: InputError | None = None
        operations = self.chains.microbatches * (2 * whole.case.path_length + 1)
        operations += OPERATIONS_OF_MOVE
        self.steps_per_s = WORKING_SHARE * THREADS * OPERATIONS_PER_S / operations

    def run(self) -> Division:
        """Search for the best division, and plan its experts."""
        self.compile()
        self.search.start_clock()
        members = self.evolved()
        finalists: dict[tuple[frozenset[int], ...], _Member] = {}
        for member in members:
            groups = tuple(frozenset(place.nodes) for place in member.found)
            finalists.setdefault(groups, member)
        chosen = list(finalists.values())[:FINALISTS]
        plans = sum(len(_kinds(lane)) for lane in self.lanes) * len(chosen)
        share = (1.0 - DIVIDING_SHARE) / plans
        divisions = [self.planned(member, share) for member in chosen]
        return min(divisions, key=lambda division: division.seconds)

    def compile(self) -> None:
        """Run the compiled functions once, so that compiling does not count as searching."""
        with suppress(InputError):
            random = np.random.default_rng(0)
            stages = len(self.whole.case.stages)
            place = LanePlacement(
                LaneCut(1, (1,) * stages, self.whole.case.path_length), tuple(range(stages))
            )
            chain = self.chains.random(0, place, random, 0)
            self.chains.anneal_alone(0, place.cut, chain, 1)
            member = _Member((place,), [chain], np.zeros(1), random)
            self.anneal(member, 1, HOTTEST)

    def evolved(self) -> list[_Member]:
        """Evolve layouts; return the best ones, best first."""
        seeds = itertools.count(self.search.seed * 1_000_003)
        each = STEPS_OF_LANE * len(self.lanes)
        of_first = each + SCREENING_STEPS * SCREENED * len(self.lanes)
        steps = self.search.steps(DIVIDING_SHARE * self.steps_per_s)
        firsts = int(FIRST_SHARE * steps / of_first / CHILDREN)
        generations = int((1.0 - FIRST_SHARE) * steps / each / CHILDREN)
        best: list[_Member] = []
        with ThreadPoolExecutor(THREADS) as threads:

            def judged(new: list[_Member], hottest: float) -> list[_Member]:
                if not self.search.stopped() or not best:
                    list(threads.map(lambda member: self.anneal(member, each, hottest), new))
                return _unlike(sorted([*best, *new], key=lambda member: member.last))[:PARENTS]

            for _ in range(max(1, firsts)):
                if best and self.search.stopped():
                    break
                new = list(threads.map(self.first, itertools.islice(seeds, CHILDREN)))
                best = judged([member for member in new if member], HOTTEST)
            if not best:
                assert self.refusal is not None
                raise self.refusal
            for _ in range(generations):
                if self.search.stopped():
                    break
                parents = [best[place % len(best)] for place in range(CHILDREN)]
                children = [self.child(parent, next(seeds)) for parent in parents]
                best = judged([child for child in children if child], OF_CHILD)
        return best

    def first(self, seed: int) -> _Member | None:
        """Make a member on a new layout; None if the rules allow none."""
        random = np.random.default_rng(seed)
        try:
            layout = self.drawn_layout(random)
            chains = [
                self.chains.random(lane, place, random, seed + lane)
                for lane, place in enumerate(layout)
            ]
        except InputError as refusal:
            self.refusal = self.refusal or refusal
            return None
        return _Member(layout, chains, np.zeros(len(chains)), random)

    def screened(
        self, lane: int, nodes: Sequence[int], random: np.random.Generator
    ) -> LanePlacement:
        """Choose the best of several cuts over these nodes, and their best order on its stages.

        Raises:
            InputError: if the rules allow paths for none of them.
        """
        found: dict[float, LanePlacement] = {}
        refusals = []
        for cut in self.drawn_cuts(len(nodes), random):
            place = LanePlacement(cut, tuple(random.permutation(nodes).tolist()))
            try:
                chain = self.chains.random(lane, place, random, int(random.integers(2**62)))
            except InputError as refusal:
                refusals.append(refusal)
                continue
            self.chains.anneal_alone(lane, cut, chain, SCREENING_STEPS)
            order = tuple(chain.candidate.node_of_slot.tolist())
            found[float(chain.costs[1])] = replace(place, nodes=order)
        if not found:
            raise refusals[0]
        return found[min(found)]

    def child(self, parent: _Member, seed: int) -> _Member | None:
        """Make a member with a small change; unchanged lanes continue from their state."""
        random = np.random.default_rng(seed)
        before = parent.found
        try:
            layout = self.changed_layout(before, parent.ends.tolist(), random)
            if layout is None:
                return None
            chains = []
            for lane, place in enumerate(layout):
                # Continue each lane from the previous one that shares most of its nodes.
                shared = [len({*place.nodes} & {*other.nodes}) for other in before]
                origin = int(np.argmax(shared))
                old, chain = before[origin], parent.chains[origin]
                chain = self.chains.carried(old, chain, lane, place, random, seed + lane)
                if old.cut.model != place.cut.model:  # Its paths were drawn at random.
                    self.chains.anneal_alone(lane, place.cut, chain, STEPS_OF_LANE)
                chains.append(chain)
        except InputError:
            return None
        return _Member(layout, chains, np.zeros(len(chains)), random)

    def anneal(self, member: _Member, steps: int, hottest: float) -> None:
        """Anneal all lanes of a member together."""
        problems = [
            self.chains.problem(lane, place.cut) for lane, place in enumerate(member.layout)
        ]
        lanes = len(problems)

        def ends(mean_weight: float) -> np.ndarray:
            costs = [
                dispatched_s(problem, chain, mean_weight)
                for problem, chain in zip(problems, member.chains, strict=True)
            ]
            return self.weights[:lanes] * costs

        now = ends(MEAN_WEIGHT)
        scale = float(now.max())
        pieces = max(1, steps // PIECE)
        cooling = (COLDEST / hottest) ** (1 / (pieces * PIECE))
        for done in range(pieces):
            first, second = member.random.permutation(lanes)[:2] if lanes > 1 else (0, 0)
            fast(trade)(
                problems[first], member.chains[first], problems[second], member.chains[second],
                now, np.array([first, second]), self.weights,
                Cooling(
                    min(PIECE, steps), scale * hottest * cooling ** (done * PIECE), cooling,
                    WEIGHTS, MEAN_WEIGHT,
                ),
            )  # fmt: skip
        member.ends = ends(0.0)
        member.last = float(member.ends.max())

    def planned(self, member: _Member, share: float) -> Division:
        """Make the division of a member, with the plans of all its experts."""
        parts = []
        for lane, place, chain in zip(self.lanes, member.found, member.chains, strict=True):
            plans = {
                kind: self.plan(place, chain, training, share)
                for kind, training in _kinds(lane).items()
            }
            of_trainings = tuple(plans[_kind(training)] for training in lane.trainings)
            parts.append(Part(lane, tuple(sorted(place.nodes)), of_trainings))
        return Division(tuple(parts))

    def plan(
        self, place: LanePlacement, chain: ChainState, training: LaneTraining, share: float
    ) -> Plan:
        """Plan an expert by `joint`, starting from the annealed paths."""
        case, stages = self.chains.on_stages(place, training)
        paths = tuple(map(tuple, place.local[chain.candidate.paths].tolist()))
        begin = with_prediction(case, "joint", Routes(stages, paths))
        found = make_plan(case, "joint", replace(self.search.part(share), begin=begin))
        return min(begin, found, key=lambda plan: plan.predicted.iteration_s)

    # Layouts: initial ones, and ones with small changes.

    def drawn_layout(self, random: np.random.Generator) -> Layout:
        """Place nodes about in proportion to the work, in the order of a tour or in any order."""
        counts = self.counts(random)
        is_tour = random.random() < 0.5
        nodes = random.permutation(len(self.whole.case.nodes)).tolist()
        nodes = self.tour(nodes) if is_tour else nodes
        places = [LanePlacement(LaneCut(1, (), 1), ())] * len(counts)
        for lane in random.permutation(len(counts)):
            own, nodes = nodes[: counts[lane]], nodes[counts[lane] :]
            places[lane] = self.screened(int(lane), own, random)
        return tuple(places)

    def counts(self, random: np.random.Generator) -> np.ndarray:
        """Share out all nodes, equally or by the work; return the number of each lane."""
        lanes = len(self.work)
        share = self.work ** (0.0 if random.random() < EQUAL_SHARE else random.uniform(0.0, 2.0))
        counts = np.full(lanes, self.whole.fewest_nodes)
        first = random.permutation(lanes)
        for _ in range(len(self.whole.case.nodes) - counts.sum()):
            counts[first[np.argmax((share / counts)[first])]] += 1
        return counts

    def tour(self, left: list[int]) -> list[int]:
        """Order nodes as a tour that starts at the last one and always visits the nearest next."""
        nodes = [left.pop()]
        while left:
            nodes.append(left.pop(int(np.argmin(self.near_s[nodes[-1], left]))))
        return nodes

    def drawn_cuts(self, nodes: int, random: np.random.Generator) -> list[LaneCut]:
        """Draw some of the cuts that this number of nodes may have, preferring promising ones."""
        merges = self.whole.merges
        possible = [merged for merged in merges if self.whole.can_cut(nodes, merged)] or merges
        found: dict[LaneCut, None] = {}
        for _ in range(SCREENED):
            cuts = self.whole.cuts(nodes, possible[random.integers(len(possible))])
            found[cuts[int(len(cuts) * random.random() ** 2)]] = None
        return list(found)

    def changed_layout(
        self, layout: Layout, ends: Sequence[float], random: np.random.Generator
    ) -> Layout | None:
        """Return a copy with one or two changes; None if none is found."""
        for _ in range(TRIES):
            other = layout
            for _ in range(1 + random.integers(2)):
                other = self.with_change(other, ends, random)
            if other != layout:
                return other
        return None

    def with_change(
        self, layout: Layout, ends: Sequence[float], random: np.random.Generator
    ) -> Layout:
        """Let two lanes exchange all nodes, cut one anew, or move a node to another stage.

        If the change is impossible, the layout is returned as it is.
        """
        places = list(layout)
        lanes = len(places)
        kind = random.random()
        # The lane that ends last is changed more often than others.
        lane = int(np.argmax(ends)) if random.random() < 0.4 else int(random.integers(lanes))
        if kind < 0.15 and lanes > 1:
            one, other = random.permutation(lanes)[:2]
            places[one], places[other] = places[other], places[one]
        elif kind < 0.4:
            places[lane] = self.screened(lane, places[lane].nodes, random)
        else:
            sizes = places[lane].cut.sizes
            sources = [stage for stage, size in enumerate(sizes) if size > 1]
            target = int(random.integers(len(sizes))) if random.random() < 0.7 else 0
            # Each data node sends a microbatch.
            has_room = target > 0 or sizes[0] < sum(self.whole.case.microbatches)
            if sources and has_room:
                source = places[lane].stage(sources[random.integers(len(sources))])
                replicas = places[lane].nodes[source]
                node = replicas[random.integers(len(replicas))]
                places[lane] = places[lane].moved(node, target)
        return tuple(places)


class _Chains:
    """Annealing chains: the nodes of a lane on their stages, and its paths.

    All cover the nodes of the whole case, so that lanes can trade. A lane has the mean of its
    trainings.
    """

    def __init__(self, whole: Whole, lanes: Sequence[Lane]):
        self.whole = whole
        self.trainings = [lane.mean for lane in lanes]
        self.microbatches = sum(whole.case.microbatches)
        self.all_nodes = problem_of(whole.case)
        self.problem = cache(self._problem)

    def random(
        self, lane: int, place: LanePlacement, random: np.random.Generator, seed: int
    ) -> ChainState:
        """Draw balanced paths at random.

        Raises:
            InputError: if the rules allow none.
        """
        case, stages = self.on_stages(place, self.trainings[lane])
        return self.started(lane, place, random_paths(case, stages, random), seed)

    def started(
        self, lane: int, place: LanePlacement, paths: Sequence[NodePath] | np.ndarray, seed: int
    ) -> ChainState:
        """Start a chain at these paths, with the numbers of nodes in the lane's own case."""
        problem = self.problem(lane, place.cut)
        slot_of = np.argsort(place.local)
        candidate = candidate_of(problem, np.array(place.nodes), slot_of[np.array(paths)])
        return chain_from(problem, candidate, seed)

    def carried(
        self,
        before: LanePlacement,
        chain: ChainState,
        lane: int,
        place: LanePlacement,
        random: np.random.Generator,
        seed: int,
    ) -> ChainState:
        """Make a chain on other nodes whose microbatches visit the same stages if possible."""
        if place == before:
            return chain_from(self.problem(lane, place.cut), copy_of(chain.candidate), seed)
        if before.cut.model != place.cut.model:
            return self.random(lane, place, random, seed)
        case, stages = self.on_stages(place, self.trainings[lane])
        old = chain.candidate
        on_stages = self.problem(lane, before.cut).stage_of_slot[old.paths]
        number = dict(zip(place.nodes, place.local.tolist(), strict=True))
        paths = np.array([number.get(node, -1) for node in old.node_of_slot.tolist()])[old.paths]
        paths[:, 0] = data_node_of_microbatches(case, stages)
        for stage, replicas in enumerate(stages[1:], start=1):
            visits = np.argwhere(on_stages == stage)
            left = visits_of_replicas(case, stage, replicas, len(visits))
            moved = []
            for m, i in random.permutation(visits).tolist():
                node = int(paths[m, i])
                if left.get(node, 0) > 0:
                    left[node] -= 1
                else:
                    moved.append((m, i))
            free = [node for node, count in left.items() for _ in range(count)]
            for (m, i), node in zip(moved, free, strict=True):
                paths[m, i] = node
        return self.started(lane, place, paths, seed)

    def anneal_alone(self, lane: int, cut: LaneCut, chain: ChainState, steps: int) -> None:
        """Anneal a lane independently of the others, on its own nodes."""
        problem = self.problem(lane, cut)
        chain.costs[:] = dispatched_s(problem, chain, MEAN_WEIGHT)
        hottest = HOTTEST * chain.costs[0]
        cooling = (COLDEST / HOTTEST) ** (1 / steps)
        fast(anneal)(problem, chain, Cooling(steps, hottest, cooling, WEIGHTS, MEAN_WEIGHT))
        copy(chain.best, chain.candidate)

    def on_stages(self, place: LanePlacement, training: LaneTraining) -> tuple[Case, Placement]:
        """Return the case of a lane's nodes, and their numbers in it by stage."""
        case = self.whole.part(sorted(place.nodes), place.cut, training)
        return case, place_in_order(case, place.local.tolist())

    def _problem(self, lane: int, cut: LaneCut) -> Problem:
        """Return the arrays of a lane with a cut, on any of the nodes of the whole case."""
        training, nodes = self.trainings[lane], self.whole.case.nodes
        part = problem_of(self.whole.part(range(cut.nodes), cut, training))
        memory = [min(node.memory // cut.merged, self.microbatches) for node in nodes]
        return self.all_nodes._replace(
            forward_s=self.all_nodes.forward_s * training.compute,
            memory=np.array(memory),
            stage_of_slot=part.stage_of_slot,
            first_slot=part.first_slot,
            stage_cost=part.stage_cost,
            ring_bytes=part.ring_bytes,
            rules=part.rules,
        )


def _unlike(members: Sequence[_Member]) -> list[_Member]:
    """Drop members whose cuts all equal those of `ALIKE` members before them."""
    seen: Counter[tuple[LaneCut, ...]] = Counter()
    kept = []
    for member in members:
        cuts = tuple(place.cut for place in member.layout)
        seen[cuts] += 1
        if seen[cuts] <= ALIKE:
            kept.append(member)
    return kept


def _kind(training: LaneTraining) -> tuple[float, float]:
    """Return the values on which the plan of a training depends."""
    return training.compute, training.bytes


def _kinds(lane: Lane) -> dict[tuple[float, float], LaneTraining]:
    """Return a training of each kind."""
    return {_kind(training): training for training in lane.trainings}
