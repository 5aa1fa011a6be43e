"""Lanes of experts: lanes train in parallel, the experts of a lane one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import simulate_plan


@dataclass(frozen=True)
class LaneTraining:
    """Training of one expert.

    Attributes:
        name: of the expert.
        steps: number of iterations.
        compute: duration of a forward pass as a multiple of the case's, as the model is larger.
        bytes: bytes that its replicas average, as a multiple of the case's.
    """

    name: str
    steps: int
    compute: float = 1.0
    bytes: float = 1.0


@dataclass(frozen=True)
class Lane:
    """Experts that the same nodes train one after another."""

    name: str
    trainings: tuple[LaneTraining, ...]

    @property
    def steps(self) -> int:
        """Iterations of all experts."""
        return sum(training.steps for training in self.trainings)

    @property
    def mean(self) -> LaneTraining:
        """Mean training, by which a lane's end is estimated."""

        def mean_of(key: str) -> float:
            return sum(one.steps * getattr(one, key) for one in self.trainings) / self.steps

        return LaneTraining(self.name, self.steps, mean_of("compute"), mean_of("bytes"))

    @property
    def work(self) -> float:
        """Iterations in units of the case's own model."""
        return self.steps * self.mean.compute


def checked(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """Return the lanes after checking them.

    Raises:
        InputError: if there are none, two have the same name, or a value of an expert is out of
            bounds.
    """
    for place, lane in enumerate(fields.sequence(lanes, "lanes")):
        field = f"lanes[{place}]"
        fields.text(lane.name, f"{field}.name")
        if lane.name in [other.name for other in lanes[:place]]:
            problem = "is also the name of another lane"
            raise InputError(f"{field}.name", lane.name, problem, "Give each lane a unique name")
        for number, one in enumerate(fields.sequence(lane.trainings, f"{field}.trainings")):
            at = f"{field}.trainings[{number}]"
            fields.text(one.name, f"{at}.name")
            fields.integer(one.steps, f"{at}.steps", 1)
            fields.number(one.compute, f"{at}.compute", 0.0, above=True)
            fields.number(one.bytes, f"{at}.bytes", 0.0)
    return tuple(lanes)


@dataclass(frozen=True, eq=False)
class Part:
    """A lane on its nodes.

    Attributes:
        lane: the experts.
        nodes: their numbers in the whole case, ascending: node k of the plans is the k-th of them.
        plans: of each training of the lane.
    """

    lane: Lane
    nodes: tuple[int, ...]
    plans: tuple[Plan, ...]

    @cached_property
    def iteration_s(self) -> tuple[float, ...]:
        """Simulated seconds of an iteration of each training."""
        of_plan = {id(plan): simulate_plan(plan).iteration_s for plan in self.plans}
        return tuple(of_plan[id(plan)] for plan in self.plans)

    @property
    def training_s(self) -> tuple[float, ...]:
        """Seconds of each training."""
        pairs = zip(self.lane.trainings, self.iteration_s, strict=True)
        return tuple(training.steps * seconds for training, seconds in pairs)

    @property
    def seconds(self) -> float:
        """Seconds until the lane's last expert is done."""
        return sum(self.training_s)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without the plans, which are files of their own."""
        return {
            "name": self.lane.name,
            "nodes": list(self.nodes),
            "seconds": self.seconds,
            "trainings": [
                asdict(training)
                | {
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
    """All lanes on their nodes."""

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last expert of all is done."""
        return max(part.seconds for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object without the plans."""
        return {"seconds": self.seconds, "lanes": [part.to_json() for part in self.parts]}
