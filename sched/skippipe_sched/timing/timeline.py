"""Events of one iteration and their times: simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from skippipe_sched.problem.plan import Operation, Predicted


@dataclass(frozen=True)
class TimedOperation:
    """One operation and its times on its node [s]. `arrived_s`: arrival of its input."""

    operation: Operation
    arrived_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Transfer:
    """Transfer of an activation or gradient [s]: ready at the source, on the link, arrived."""

    source: int
    target: int
    operation: Operation
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Averaging:
    """Averaging of a stage's gradients, or of a fragment of its outer gradients [s]."""

    stage: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events of one iteration, each list in order of their starts.

    With `steady`, the figures of a steady state, it is one of many equal iterations, which overlap
    with it: times count from the first event that is shown. `free_s` is when each node has ended
    the previous iteration; if empty, all are free from the start.
    """

    nodes: int
    runs: tuple[TimedOperation, ...]
    transfers: tuple[Transfer, ...]
    averagings: tuple[Averaging, ...]
    steady: Predicted | None = None
    free_s: tuple[float, ...] = ()

    @cached_property
    def pipeline_s(self) -> float:
        """End of the last backward [s]."""
        return self.steady.pipeline_s if self.steady else max(run.end_s for run in self.runs)

    @cached_property
    def averaging_s(self) -> float:
        """Longest averaging of one stage [s]."""
        if self.steady:
            return self.steady.averaging_s
        return max((own.end_s - own.start_s for own in self.averagings), default=0.0)

    @cached_property
    def iteration_s(self) -> float:
        """End of the last stage's averaging [s]."""
        if self.steady:
            return self.steady.iteration_s
        return max((own.end_s for own in self.averagings), default=self.pipeline_s)

    @property
    def late_s(self) -> float:
        """Most by which a ring exceeds its delay [s]; 0 where iterations wait for it."""
        return self.steady.late_s if self.steady else 0.0

    @cached_property
    def end_s(self) -> float:
        """End of the last shown event [s]."""
        if not self.steady:
            return self.iteration_s
        return max(own.end_s for own in (*self.runs, *self.averagings))

    @cached_property
    def order(self) -> tuple[tuple[Operation, ...], ...]:
        """Operations of each node, in order."""
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
        """Share of the pipeline's time in which the nodes do not compute."""
        return 1.0 - sum(self.busy_s) / (self.nodes * self.pipeline_s)

    def predicted(self, lower_bound_s: float | None) -> Predicted:
        """Return the figures that a plan stores."""
        times_s = self.iteration_s, self.pipeline_s, self.averaging_s
        return Predicted(*times_s, lower_bound_s, self.late_s)


@dataclass(frozen=True, eq=False)
class TimeFactors:
    """Factors on all times of the timing model.

    An operation is identified by its microbatch and its position in the microbatch's chain (see
    `microbatch_chain`); `hops` applies to the transfer of its input, if there is one.
    """

    operations: Float[np.ndarray, "microbatches positions"]
    hops: Float[np.ndarray, "microbatches positions"]
    averagings: Float[np.ndarray, " stages"]


def unit_factors(microbatches: int, positions: int, stages: int) -> TimeFactors:
    """Return a stretch with all factors 1."""
    ones = np.ones((microbatches, positions))
    return TimeFactors(ones, ones, np.ones(stages))
