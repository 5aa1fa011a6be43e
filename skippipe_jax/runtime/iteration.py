"""Event-driven iterations: each operation starts when its input has arrived.

An output for another host is offered as soon as its operation is dispatched, and is sent while the
node continues with its next operation. If the hops of a node share its connection, each is offered
when the previous ones have been sent, as planned: sent in parallel, all of them would arrive late.
If the event loop does not wait, as on a single host, all operations are dispatched at once, in the
order of the program.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Operation
from skippipe_sched.timing.timeline import Averaging, TimedOperation

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import seconds_since
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.operations import Operations, TrainingOperations
from skippipe_jax.runtime.ready_queue import ReadyQueue
from skippipe_jax.runtime.stage_functions import Gauge
from skippipe_jax.runtime.totals import Outcome
from skippipe_jax.storage.recording import Recording

# Inputs that a node requests in advance: enough that the sender always has a request, and few
# enough to bound the memory of arrays that have arrived.
INPUTS_REQUESTED_AHEAD = 8
# Number of waits that a timeout message names, the oldest first.
MAX_NAMED_WAITS = 5


@dataclass(kw_only=True, eq=False)
class Iteration:
    """Execution of the operations of a program on the nodes of this host.

    Times are of `time.perf_counter` [s]. Every node keeps to the program's order, even if inputs
    are late, unless `ready_first`.

    Attributes:
        case: case of the plan, which limits the microbatches in flight on a node, and says whether
            hops share connections; None if the order of the operations is limit enough.
        name: name of the iteration in timeout messages.
        nodes: operations that each node has left, and their inputs.
        ended: operations that have ended.
        runs: times of each ended operation.
    """

    exchange: Exchange
    operations: Operations
    program: Program
    iteration: int
    case: Case | None = None
    ready_first: bool = False
    emulation: Emulation | None = None

    def __post_init__(self) -> None:
        """Begin without inputs."""
        self.name = f"step {self.iteration + 1}"
        self.loop = self.exchange.loop
        self.topology = self.exchange.topology
        self.loop.begin()
        self.connections = None
        if self.case is not None and self.emulation is None:
            self.connections = self.exchange.connections(self.case)
        computes = [step for step in self.program.instructions if isinstance(step, Compute)]
        self.computes = {compute.operation: compute for compute in computes}
        self.in_order = iter(self.computes)
        by_node: dict[int, list[Compute]] = {node: [] for node in self.program.nodes}
        for compute in computes:
            by_node[compute.operation.node].append(compute)
        self.nodes = {
            node: ReadyQueue(
                [compute.operation for compute in own],
                math.inf if self.case is None else self.case.nodes[node].memory,
                ready_first=self.ready_first,
                idle_since_s=self.loop.last_event_s,
            )
            for node, own in by_node.items()
        }
        self.ended: set[Operation] = set()
        self.runs: list[TimedOperation] = []

    @property
    def is_done(self) -> bool:
        """True once all nodes of this host are done."""
        return all(queue.is_done for queue in self.nodes.values())

    @property
    def has_ended(self) -> bool:
        """True once this host has nothing left to do in the iteration."""
        return self.is_done

    def execute(self, batches: Mapping[int, Batch]) -> None:
        """Execute the program; `batches` are those of microbatches with a local data node.

        Raises:
            PeerTimeout: if nothing arrived from other hosts for `network.deadline_s`.
        """
        for operation, compute in self.computes.items():
            if operation.kind == "F" and compute.arrives is None:
                batch = batches[operation.microbatch]
                self._store_input(operation, self.loop.last_event_s, batch)
        for queue in self.nodes.values() if self.loop.waits else ():
            requests = [
                (arrives, self.operations.arriving(own), partial(self._store_input, own))
                for own in queue.left
                if (arrives := self.computes[own].arrives) is not None
                and not self.topology.is_local_node(arrives.source)
            ]
            self.exchange.ask_in_turn(iter(requests), self.iteration, INPUTS_REQUESTED_AHEAD)
        self._begin()
        for node, queue in self.nodes.items():
            if queue.is_done:
                self._node_done(node)
        while not self.has_ended:
            self._start_ready()
            self.loop.run_one(self._describe_waits)

    def _begin(self) -> None:
        """Begin work that does not depend on any operation."""

    def _node_done(self, node: int) -> None:
        """Continue with work that depends on a node, which has run all its operations."""

    def _waits(self) -> Iterator[tuple[str, float]]:
        """Yield a description of each pending wait, and its start time."""
        for queue in self.nodes.values():
            if queue.left and queue.idle_since_s is not None:
                operation = queue.left[0]
                arrives = self.computes[operation].arrives
                sender = ""
                if arrives is not None:
                    sender = f" from {self.topology.node_text(arrives.source)}"
                yield f"the input of the {operation}{sender}", queue.idle_since_s

    def _describe_waits(self) -> str | None:
        """Describe the pending waits for a timeout message; return None while a node computes."""
        if any(queue.idle_since_s is None for queue in self.nodes.values()):
            return None
        return timeout_text(self.name, self._waits(), self.loop.deadline_s)

    def _store_input(self, operation: Operation, at_s: float, value: jax.Array | Batch) -> None:
        self.nodes[operation.node].arrive(operation, at_s, value)

    def _start_ready(self) -> None:
        """Start an operation on every idle node that has a ready one.

        If the loop does not wait, start the next operation of the program once all that depends on
        the previous ones is dispatched.
        """
        if self.loop.waits:
            for queue in self.nodes.values():
                if queue.inputs and queue.idle_since_s is not None:
                    self._start_next(queue)
        elif not self.loop.has_events:
            for operation in itertools.islice(self.in_order, 1):
                self._start_next(self.nodes[operation.node])

    def _start_next(self, queue: ReadyQueue) -> None:
        operation = queue.take()
        if operation is None:
            return
        arrived_s, value = queue.inputs.pop(operation)
        start_s = time.perf_counter()
        if self.emulation is not None:
            ready_s = max(arrived_s, queue.idle_since_s or 0.0)
            start_s = self.emulation.operation_start_s(ready_s, start_s)
        queue.idle_since_s = None
        leaves = self.computes[operation].leaves
        result, at_the_end = self.operations.dispatch(operation, value, leaves=leaves is not None)
        is_late = self.emulation is not None or self.connections is not None
        if leaves is not None and not is_late and not self.topology.is_local_node(leaves.target):
            # Offered while it is still being computed.
            self.exchange.give(leaves, self.iteration, result)

        def computed(end_s: float) -> None:
            if self.emulation is not None:
                end_s = self.emulation.operation_end_s(operation, start_s, end_s)
            run = TimedOperation(operation, arrived_s, start_s, end_s)
            if self.emulation is None:
                self._end(run, result)
            else:
                self.loop.at(end_s, lambda _: self._end(run, result))

        self.loop.when_computed(at_the_end, computed)

    def _end(self, run: TimedOperation, result: jax.Array | None) -> None:
        """Pass on the result of an operation that has ended, and free its node."""
        self.runs.append(run)
        node, end_s = run.operation.node, run.end_s
        queue = self.nodes[node]
        queue.busy_s += end_s - run.start_s
        queue.idle_since_s = end_s
        self.ended.add(run.operation)
        following = self.computes[run.operation].following
        if following is not None and result is not None:
            self._pass_on(run.operation, following, end_s, result)
        if queue.is_done:
            self._node_done(node)

    def _pass_on(
        self, operation: Operation, following: Operation, end_s: float, result: jax.Array
    ) -> None:
        leaves = self.computes[operation].leaves
        is_local = leaves is None or self.topology.is_local_node(leaves.target)

        def give(at_s: float) -> None:
            if leaves is None:
                self._store_input(following, at_s, result)
            elif is_local:
                self._store_input(following, at_s, self.exchange.put(leaves, result))
            else:
                self.exchange.give(leaves, self.iteration, result)

        if leaves is not None and self.emulation is not None:
            arrival_s = self.emulation.hop_end_s(operation.node, following, end_s)
            self.loop.at(arrival_s, give)
        elif is_local:
            give(end_s)
        elif self.connections is not None:
            hop = following.kind, operation.node, following.node
            self.loop.at(self.connections.offer_s(*hop, end_s), give)


@dataclass(kw_only=True, eq=False)
class TrainingIteration(Iteration):
    """Iteration of training, which also averages and updates.

    Attributes:
        stop: whether this host has a request to stop.
        averagings: averagings that ended in this iteration.
        outcome: result, or None until the iteration has ended on this host.
    """

    operations: TrainingOperations  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        """Begin without inputs."""
        super().__post_init__()
        self.replicas = self.operations.replicas
        self.stop = False
        self.averagings: list[Averaging] = []
        self.outcome: Outcome | None = None

    @property
    def has_ended(self) -> bool:
        """True once this host has nothing left to do in the iteration."""
        return self.outcome is not None

    def run(
        self, batches: Mapping[int, Batch], stop: bool = False, offset_s: float | None = None
    ) -> Outcome:
        """Run the iteration; `batches` are the batches of microbatches with a local data node.

        `stop` adds to the totals that this host has a request to stop. Returns when this host has
        no work left in the iteration. With the offset of host 0's clock to the local `time.time()`,
        the outcome includes a recording.

        Raises:
            PeerTimeout: if nothing arrived from other hosts for `network.deadline_s`.
        """
        self.stop = stop
        if self.emulation is not None:
            self.emulation.begin(self.iteration)
        self.execute(batches)
        assert self.outcome is not None
        if offset_s is None:
            return self.outcome
        by_s = time.time() - time.perf_counter() + offset_s
        return replace(self.outcome, recording=self._recording(by_s))

    def _busy_s(self) -> dict[int, float]:
        return {node: queue.busy_s for node, queue in self.nodes.items()}

    def _gauges(self) -> dict[int, Gauge]:
        return {node: state.gauge for node, state in self.operations.nodes.items()}

    def _recording(self, by_s: float) -> Recording:
        """Return the operations and averagings of this host, with `by_s` added to all times."""
        return Recording(
            tuple(
                TimedOperation(
                    run.operation, run.arrived_s + by_s, run.start_s + by_s, run.end_s + by_s
                )
                for run in self.runs
            ),
            tuple(
                Averaging(own.stage, own.start_s + by_s, own.end_s + by_s)
                for own in self.averagings
            ),
        )


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
