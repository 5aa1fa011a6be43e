"""What trains side by side: lanes of experts, one after the other in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippipe_sched import fields
from skippipe_sched.errors import InputError


@dataclass(frozen=True)
class Training:
    """The training of one expert.

    Attributes:
        name: of the expert.
        steps: iterations of it.
        compute: how many times as long as the case says a forward takes, as its model is larger.
        bytes: how many times as much as the case says its replicas average.
    """

    name: str
    steps: int
    compute: float = 1.0
    bytes: float = 1.0


@dataclass(frozen=True)
class Lane:
    """Experts that the same nodes train one after the other."""

    name: str
    trainings: tuple[Training, ...]

    @property
    def steps(self) -> int:
        """Iterations of all experts."""
        return sum(training.steps for training in self.trainings)

    @property
    def mean(self) -> Training:
        """One training in place of all, by which a lane's end is guessed."""

        def mean_of(key: str) -> float:
            return sum(one.steps * getattr(one, key) for one in self.trainings) / self.steps

        return Training(self.name, self.steps, mean_of("compute"), mean_of("bytes"))

    @property
    def work(self) -> float:
        """Iterations in the unit of the case's own model."""
        return self.steps * self.mean.compute


def checked(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """The lanes, if they make sense.

    Raises:
        InputError: if there are none, two have one name, or what an expert says is out of bounds.
    """
    for place, lane in enumerate(fields.sequence(lanes, "lanes")):
        field = f"lanes[{place}]"
        fields.text(lane.name, f"{field}.name")
        if lane.name in [other.name for other in lanes[:place]]:
            problem = "another lane has this name"
            raise InputError(f"{field}.name", lane.name, problem, "Give each a name of its own")
        for number, one in enumerate(fields.sequence(lane.trainings, f"{field}.trainings")):
            at = f"{field}.trainings[{number}]"
            fields.text(one.name, f"{at}.name")
            fields.integer(one.steps, f"{at}.steps", 1)
            fields.number(one.compute, f"{at}.compute", 0.0, above=True)
            fields.number(one.bytes, f"{at}.bytes", 0.0)
    return tuple(lanes)
