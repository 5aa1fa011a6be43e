"""What happens in one iteration, and when: simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from skippipe_sched.problem.plan import Operation, Predicted


@dataclass(frozen=True)
class Run:
    """One operation and when its node ran it [s]. `arrived_s`: when its input was there."""

    operation: Operation
    arrived_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Transfer:
    """An activation or gradient on its way [s]: ready at the source, on the link, arrived."""

    source: int
    target: int
    operation: Operation
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Averaging:
    """The replicas of one stage averaging their gradients, or a fragment of their changes [s]."""

    stage: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SteadyState:
    """Iterations that follow one another without a barrier, once they are steady [s].

    `iteration_s` is the mean over a cycle, `pipeline_s` the same if rings took no time,
    `averaging_s` the longest ring of a fragment, and `late_s` by how much one is longer than its
    delay allows at most: how long the last replica waits for it that has to apply it.
    """

    iteration_s: float
    pipeline_s: float
    averaging_s: float
    late_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Everything that happens in one iteration, each list in the order of starting.

    With `steady` it is one iteration among others like it, which overlap with it: it counts from
    the first thing that is shown, and its figures are those of the steady state. `free_s` is when
    each node has ended the one before; all are free from the start where it is empty.
    """

    nodes: int
    runs: tuple[Run, ...]
    transfers: tuple[Transfer, ...]
    averagings: tuple[Averaging, ...]
    steady: SteadyState | None = None
    free_s: tuple[float, ...] = ()

    @cached_property
    def pipeline_s(self) -> float:
        """When the last backward ends."""
        return self.steady.pipeline_s if self.steady else max(run.end_s for run in self.runs)

    @cached_property
    def averaging_s(self) -> float:
        """The longest averaging of one stage."""
        if self.steady:
            return self.steady.averaging_s
        return max((own.end_s - own.start_s for own in self.averagings), default=0.0)

    @cached_property
    def iteration_s(self) -> float:
        """When the last stage has averaged."""
        if self.steady:
            return self.steady.iteration_s
        return max((own.end_s for own in self.averagings), default=self.pipeline_s)

    @property
    def late_s(self) -> float:
        """By how much a ring is longer than its delay allows; 0 where iterations wait for it."""
        return self.steady.late_s if self.steady else 0.0

    @cached_property
    def end_s(self) -> float:
        """Until when something is shown."""
        if not self.steady:
            return self.iteration_s
        return max(own.end_s for own in (*self.runs, *self.averagings))

    @cached_property
    def order(self) -> tuple[tuple[Operation, ...], ...]:
        """What each node runs, in order."""
        order: list[list[Operation]] = [[] for _ in range(self.nodes)]
        for run in self.runs:
            order[run.operation.node].append(run.operation)
        return tuple(tuple(operations) for operations in order)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each node spends on operations."""
        busy = [0.0] * self.nodes
        for run in self.runs:
            busy[run.operation.node] += run.end_s - run.start_s
        return tuple(busy)

    @property
    def idle_share(self) -> float:
        """The share of the pipeline's time that the nodes do not compute."""
        return 1.0 - sum(self.busy_s) / (self.nodes * self.pipeline_s)

    def predicted(self, lower_bound_s: float | None) -> Predicted:
        """Return the figures that a plan carries."""
        return Predicted(
            self.iteration_s, self.pipeline_s, self.averaging_s, lower_bound_s, self.late_s
        )


@dataclass(frozen=True, eq=False)
class Stretch:
    """How many times as long everything takes as the timing model says.

    An operation is known by its microbatch and its position in the microbatch's chain (see
    `microbatch_chain`); `hops` stretches the transfer that brings its input, if one does.
    """

    operations: Float[np.ndarray, "microbatches positions"]
    hops: Float[np.ndarray, "microbatches positions"]
    averagings: Float[np.ndarray, " stages"]


def no_stretch(microbatches: int, positions: int, stages: int) -> Stretch:
    """Return a stretch by which everything takes as long as the timing model says."""
    ones = np.ones((microbatches, positions))
    return Stretch(ones, ones, np.ones(stages))
