"""Annealing chain of a lane: its nodes on their stages, and its paths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from skippipe_sched.division.lanes import Lane, Training
from skippipe_sched.division.layout import Place
from skippipe_sched.division.parts import Cut, Whole
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.joint import dealt
from skippipe_sched.methods.routes import (
    data_node_of_microbatches,
    place_in_order,
    visits_of_replicas,
)
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Plan
from skippipe_sched.search.annealer import MEAN_WEIGHT, WEIGHTS
from skippipe_sched.search.annealing import ChainState, Piece, anneal, chain_from, cost_of
from skippipe_sched.search.arrays import Problem, candidate_of, copy, copy_of, problem_of
from skippipe_sched.search.budget import Placement
from skippipe_sched.search.compiled import fast

# Temperatures as shares of the cost that is minimized.
HOTTEST, COLDEST = 0.05, 0.0005


class ChainFactory:
    """Factory of the lanes' chains; all cover the nodes of the whole case, so lanes can trade."""

    def __init__(self, whole: Whole, lanes: Sequence[Lane]):
        """Prepare the lanes, each with the mean of its trainings."""
        self.whole = whole
        self.trainings = [lane.mean for lane in lanes]
        self.microbatches = sum(whole.case.microbatches)
        self.all_nodes = problem_of(whole.case)
        self.problem = cache(self._problem)

    def random(self, lane: int, place: Place, random: np.random.Generator, seed: int) -> ChainState:
        """Draw balanced paths at random.

        Raises:
            InputError: if the rules allow none.
        """
        case, stages = self.on_stages(place, self.trainings[lane])
        return self.started(lane, place, random_paths(case, stages, random), seed)

    def of_plan(self, lane: int, place: Place, plan: Plan, seed: int) -> ChainState:
        """Make a chain from the paths of a plan."""
        return self.started(lane, place, dealt(plan.case, plan), seed)

    def started(
        self, lane: int, place: Place, paths: Sequence[NodePath] | np.ndarray, seed: int
    ) -> ChainState:
        """Start a chain at these paths, with the numbers of nodes in the lane's own case."""
        problem = self.problem(lane, place.cut)
        slot_of = np.argsort(place.local)
        candidate = candidate_of(problem, np.array(place.nodes), slot_of[np.array(paths)])
        return chain_from(problem, candidate, seed)

    def carried(
        self,
        before: Place,
        chain: ChainState,
        lane: int,
        place: Place,
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

    def anneal_alone(self, lane: int, cut: Cut, chain: ChainState, steps: int) -> None:
        """Anneal a lane independently of the others, on its own nodes."""
        problem = self.problem(lane, cut)
        chain.costs[:] = fast(cost_of)(problem, chain.candidate, chain.scratch, np.inf, MEAN_WEIGHT)
        hottest = HOTTEST * chain.costs[0]
        cooling = (COLDEST / HOTTEST) ** (1 / steps)
        fast(anneal)(problem, chain, Piece(steps, hottest, cooling, WEIGHTS, MEAN_WEIGHT))
        copy(chain.best, chain.candidate)

    def on_stages(self, place: Place, training: Training) -> tuple[Case, Placement]:
        """Return the case of a lane's nodes, and their numbers in it by stage."""
        case = self.whole.part(sorted(place.nodes), place.cut, training)
        return case, place_in_order(case, place.local.tolist())

    def _problem(self, lane: int, cut: Cut) -> Problem:
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
