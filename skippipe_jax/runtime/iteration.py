"""Base class of event-driven iterations on the nodes of a host."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from skippipe_sched.problem.plan import Operation, Plan
from skippipe_sched.timing.timeline import Averaging, Run

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Program
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import Then, seconds_since
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.flow import Flow
from skippipe_jax.runtime.operations import TrainingOperations
from skippipe_jax.runtime.totals import Outcome
from skippipe_jax.storage.recording import Recording

# Number of waits that a timeout message names, the oldest first.
MAX_NAMED_WAITS = 5


@dataclass(frozen=True)
class Clock:
    """Offset from `time.perf_counter()` to seconds since the epoch by host 0's clock."""

    offset_s: float

    @classmethod
    def with_offset(cls, host_offset_s: float) -> Clock:
        """Make a clock from the offset of host 0's clock to the local `time.time()`."""
        return cls(time.time() - time.perf_counter() + host_offset_s)


@dataclass(frozen=True)
class IterationSetup:
    """Inputs of an iteration of either kind: its number, and the `program` of its `plan`.

    Every node keeps to the plan's order, unless `ready_first`.
    """

    exchange: Exchange
    operations: TrainingOperations
    plan: Plan
    program: Program
    iteration: int
    ready_first: bool
    emulation: Emulation | None = None


class Iteration(ABC):
    """One iteration on the nodes of this host. Times are of `time.perf_counter` [s].

    Attributes:
        flow: progress of its operations.
        stop: whether this host has a request to stop.
        outcome: result, or None until the iteration has ended on this host.
    """

    def __init__(self, setup: IterationSetup, send_at: Callable[[float, Then], None] | None = None):
        """Begin without batches; `send_at` is passed to `Flow`."""
        self.exchange = exchange = setup.exchange
        self.loop = exchange.loop
        self.topology = exchange.topology
        self.operations = setup.operations
        self.replicas = setup.operations.replicas
        self.program = setup.program
        self.iteration = setup.iteration
        self.emulation = setup.emulation
        self.loop.begin()
        self.flow = Flow(
            exchange,
            setup.operations,
            setup.program,
            setup.iteration,
            lambda node: setup.plan.case.nodes[node].memory,
            ready_first=setup.ready_first,
            emulation=setup.emulation,
            connections=None if setup.emulation else exchange.connections(setup.plan.case),
            when_ended=self._operation_ended,
            send_at=send_at,
        )
        self.stop = False
        self.outcome: Outcome | None = None

    def run(
        self, batches: Mapping[int, Batch], stop: bool = False, clock: Clock | None = None
    ) -> Outcome:
        """Run the iteration; `batches` are the batches of microbatches with a local data node.

        `stop` adds to the totals that this host has a request to stop. Returns when this host has
        no work left in the iteration. With a `clock`, the outcome includes a recording.

        Raises:
            PeerTimeout: if nothing arrived from other hosts for `network.deadline_s`.
        """
        self.stop = stop
        if self.emulation is not None:
            self.emulation.begin(self.iteration)
        self.flow.begin(batches)
        self._begin()
        while self.outcome is None:
            self.flow.start_ready()
            self.loop.run_one(self._describe_waits)
        if clock is None:
            return self.outcome
        return replace(self.outcome, recording=self._recording(clock))

    @abstractmethod
    def _begin(self) -> None:
        """Begin work that does not depend on any operation."""

    @abstractmethod
    def _operation_ended(self, operation: Operation) -> None:
        """Continue with work that depends on an operation, which has ended."""

    @abstractmethod
    def _waits(self) -> Iterator[tuple[str, float]]:
        """Yield a description of each pending wait, and its start time."""

    @abstractmethod
    def _averagings(self) -> list[Averaging]:
        """Return the averagings of this iteration."""

    def _recording(self, clock: Clock) -> Recording:
        """Return the operations and averagings of this host, in epoch seconds by host 0's clock."""
        by = clock.offset_s
        return Recording(
            tuple(
                Run(run.operation, run.arrived_s + by, run.start_s + by, run.end_s + by)
                for run in self.flow.runs
            ),
            tuple(Averaging(a.stage, a.start_s + by, a.end_s + by) for a in self._averagings()),
        )

    def _describe_waits(self) -> str | None:
        """Describe the pending waits for a timeout message; return None while a node computes."""
        if not self.flow.is_idle:
            return None
        operation = f"step {self.iteration + 1}"
        return timeout_text(operation, self._waits(), self.loop.deadline_s)


def timeout_text(operation: str, found: Iterator[tuple[str, float]], deadline_s: float) -> str:
    """Return the timeout message that names the waits of a host, the oldest first."""
    waits = sorted(found, key=lambda wait: wait[1])
    named = ", ".join(what for what, _ in waits[:MAX_NAMED_WAITS])
    more = f" and {len(waits) - MAX_NAMED_WAITS} more" if len(waits) > MAX_NAMED_WAITS else ""
    since_s = waits[0][1]
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_since(since_s)))
    return (
        f"{operation}: timed out after {seconds_since(since_s):.0f} s waiting for {named}{more} "
        f"(network.deadline_s = {deadline_s:g} s, since {clock})"
    )
