"""What a division says: which nodes train which lane by which plans, and when each ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skippipe_sched.division.lanes import Lane
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import simulate_plan


@dataclass(frozen=True, eq=False)
class Part:
    """A lane on its nodes.

    Attributes:
        lane: what is trained.
        nodes: their numbers in the whole case, ascending: node k of the plans is the k-th of them.
        plans: of each training of the lane.
    """

    lane: Lane
    nodes: tuple[int, ...]
    plans: tuple[Plan, ...]

    @cached_property
    def iteration_s(self) -> tuple[float, ...]:
        """Seconds of an iteration of each training, simulated."""
        of_plan = {id(plan): simulate_plan(plan).iteration_s for plan in self.plans}
        return tuple(of_plan[id(plan)] for plan in self.plans)

    @property
    def training_s(self) -> tuple[float, ...]:
        """Seconds of each training."""
        pairs = zip(self.lane.trainings, self.iteration_s, strict=True)
        return tuple(training.steps * seconds for training, seconds in pairs)

    @property
    def seconds(self) -> float:
        """When the lane's last expert is done."""
        return sum(self.training_s)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, without the plans, which are files of their own."""
        return {
            "name": self.lane.name,
            "nodes": list(self.nodes),
            "seconds": self.seconds,
            "trainings": [
                {
                    "name": training.name,
                    "steps": training.steps,
                    "compute": training.compute,
                    "bytes": training.bytes,
                    "stages": list(plan.case.stages),
                    "path_length": plan.case.path_length,
                    "iteration_s": iteration_s,
                    "seconds": training.steps * iteration_s,
                }
                for training, plan, iteration_s in zip(
                    self.lane.trainings, self.plans, self.iteration_s, strict=True
                )
            ],
        }


@dataclass(frozen=True, eq=False)
class Division:
    """All lanes on their nodes; `idle` are the nodes of the case that are of no use to any."""

    parts: tuple[Part, ...]
    idle: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """When the last expert of all is done."""
        return max(part.seconds for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, without the plans."""
        return {
            "seconds": self.seconds,
            "idle": list(self.idle),
            "lanes": [part.to_json() for part in self.parts],
        }


def soonest(divisions: Sequence[Division]) -> Division:
    """The one whose last expert is done first; among equals the first."""
    return min(divisions, key=lambda division: division.seconds)
