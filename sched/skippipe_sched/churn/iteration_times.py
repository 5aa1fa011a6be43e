"""How long an iteration takes on the nodes that are there, by the planner and the simulator.

It is what the runtime does: the instant plan (`methods.without_nodes`) of the nodes that are left,
simulated. Better plans, which a search finds later, are not reckoned with.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skippipe_sched.methods.without_nodes import plan_without
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate_plan

# What planning a placement takes for each operation of an iteration, on a core of an EPYC [s]: half
# of this for 20 nodes, twice as much for 1,000.
PLANNING_S = 1e-4
# Where iterations do not wait for averaging, some cycles of them are gone through besides: each of
# their operations takes about so much of that.
STEADY_SHARE = 0.1
# So many operations are planned at most, which takes minutes.
OPERATIONS_PLANNED = 2_000_000


def planning_s(plan: Plan) -> float:
    """Estimate how long the instant plan takes when nodes of a plan are lost [s]."""
    return PLANNING_S * _planned(plan)


def affordable(plan: Plan) -> int:
    """Count the placements that may be planned before one waits for too long."""
    return max(1, int(OPERATIONS_PLANNED / _planned(plan)))


def _planned(plan: Plan) -> float:
    """Compute what planning a placement takes, in operations of an iteration by itself."""
    cycle = plan.case.averaging.every if plan.case.averaging.is_outer else 0
    return sum(map(len, plan.order)) * (1.0 + STEADY_SHARE * cycle)


class IterationTimes:
    """Seconds of an iteration by who serves which stage; each placement is planned once.

    `most` bounds how many are planned; it may be raised. Beyond it a placement takes as long as
    the ones planned that are most like it do, in the mean. How much two differ is counted by how
    many nodes each stage has at each location: nodes of one stage and location have the same links,
    and where they are as fast as each other, a plan for one is a plan for the other.

    Attributes:
        most: how many placements are planned at most.
        planned: how many have been.
        likened: how many others have the time of those that are like them.
    """

    def __init__(self, plan: Plan, most: int, watch: Callable[[int], None] | None = None):
        """Take the `plan` for all nodes; `watch` is told how many placements are planned."""
        self.most = most
        self.planned = self.likened = 0
        self._plan = plan
        self._watch = watch
        self._seconds: dict[Placement, float] = {}
        self._times: list[float] = []
        self._counts: list[np.ndarray] = []
        names = sorted({node.location for node in plan.case.nodes})
        self._location = np.array([names.index(node.location) for node in plan.case.nodes])
        self._locations = len(names)

    def __call__(self, placement: Placement) -> float:
        """Return the seconds of an iteration with these nodes on each stage; skip empty stages.

        The first stage has a node, for every path begins there.
        """
        known = self._seconds.get(placement)
        if known is None:
            known = self._planned(placement) if self.planned < self.most else self._like(placement)
            self._seconds[placement] = known
        return known

    def _planned(self, placement: Placement) -> float:
        seconds = self.planned_s(placement)
        self.planned += 1
        self._times.append(seconds)
        self._counts.append(self._count(placement))
        if self._watch is not None:
            self._watch(self.planned)
        return seconds

    def planned_s(self, placement: Placement) -> float:
        """Simulate an iteration with these nodes on each stage, by a plan made anew [s]."""
        if placement == self._plan.stages:
            return simulate_plan(self._plan).iteration_s
        left_out = [stage for stage, nodes in enumerate(placement) if not nodes]
        kept = [node for nodes in placement for node in nodes]
        return plan_without(self._plan, kept, placement, left_out).predicted.iteration_s

    def _like(self, placement: Placement) -> float:
        self.likened += 1
        apart = np.abs(np.stack(self._counts) - self._count(placement)).sum(axis=(1, 2))
        return float(np.array(self._times)[apart == apart.min()].mean())

    def _count(self, placement: Placement) -> np.ndarray:
        """Count the nodes that each stage has at each location."""
        counts = np.zeros((len(placement), self._locations), int)
        for stage, nodes in enumerate(placement):
            np.add.at(counts[stage], self._location[list(nodes)], 1)
        return counts
