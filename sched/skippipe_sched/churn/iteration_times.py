"""Duration of an iteration on the nodes that are present, by the planner and the simulator.

As in the runtime, the remaining nodes get a repair plan without a search (`methods.repair`),
which is simulated. The better plans that a search finds later are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate_plan

# Planning time for a placement, per operation of an iteration, on one core of an EPYC [s]: half of
# this for 20 nodes, twice as much for 1,000.
PLANNING_S = 1e-4
# In outer mode, planning also simulates some cycles of iterations: each of their operations costs
# about this share.
STEADY_SHARE = 0.1
# Limit on the operations that are planned; this many take minutes.
OPERATIONS_PLANNED = 2_000_000


def planning_s(plan: Plan) -> float:
    """Estimate the time of a repair plan after nodes of a plan are lost [s]."""
    return PLANNING_S * _planned(plan)


def max_planned_placements(plan: Plan) -> int:
    """Return the number of placements that can be planned in acceptable time."""
    return max(1, int(OPERATIONS_PLANNED / _planned(plan)))


def _planned(plan: Plan) -> float:
    """Compute the planning cost of a placement, in operations of a single iteration."""
    cycle = plan.case.averaging.every if plan.case.averaging.is_outer else 0
    return sum(map(len, plan.order)) * (1.0 + STEADY_SHARE * cycle)


class IterationTimes:
    """Seconds of an iteration by placement; each placement is planned once.

    At most `most` placements are planned; this limit may be raised. Beyond it, the time of a
    placement is the mean over the most similar planned placements. The difference between two
    placements is counted by the number of nodes that each stage has at each location: nodes of one
    stage and location have the same links, and where they are equally fast, a plan for one is a
    plan for the other.

    Attributes:
        most: limit on the number of placements that are planned.
        planned: number of placements planned so far.
        estimated_placements: number of other placements, which have the time of similar ones.
    """

    def __init__(self, plan: Plan, most: int, watch: Callable[[int], None] | None = None):
        """Take the `plan` for all nodes; `watch` is called with the number of plans."""
        self.most = most
        self.planned = self.estimated_placements = 0
        self._plan = plan
        self._watch = watch
        self._seconds: dict[Placement, float] = {}
        self._times: list[float] = []
        self._counts: list[np.ndarray] = []
        self._location, *_ = plan.case.location_matrices

    def __call__(self, placement: Placement) -> float:
        """Return the seconds of an iteration with these nodes on each stage; skip empty stages.

        The first stage must have a node, as every path begins there.
        """
        if placement not in self._seconds:
            if self.planned < self.most:
                self._seconds[placement] = self.planned_s(placement)
                self.planned += 1
                self._times.append(self._seconds[placement])
                self._counts.append(self._count(placement))
                if self._watch is not None:
                    self._watch(self.planned)
            else:
                self._seconds[placement] = self._similar_s(placement)
        return self._seconds[placement]

    def planned_s(self, placement: Placement) -> float:
        """Simulate an iteration with these nodes on each stage, by a new plan [s]."""
        if placement == self._plan.stages:
            return simulate_plan(self._plan).iteration_s
        skipped_stages = [stage for stage, nodes in enumerate(placement) if not nodes]
        kept = [node for nodes in placement for node in nodes]
        return repair_plan(self._plan, kept, placement, skipped_stages).predicted.iteration_s

    def _similar_s(self, placement: Placement) -> float:
        self.estimated_placements += 1
        distances = np.abs(np.stack(self._counts) - self._count(placement)).sum(axis=(1, 2))
        return float(np.array(self._times)[distances == distances.min()].mean())

    def _count(self, placement: Placement) -> np.ndarray:
        """Count the nodes that each stage has at each location."""
        locations = self._location.max() + 1
        of_stages = [
            np.bincount(self._location[list(nodes)], minlength=locations) for nodes in placement
        ]
        return np.array(of_stages)
