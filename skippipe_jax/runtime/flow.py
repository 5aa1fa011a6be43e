"""Event-driven execution of operations: each starts when its input has arrived.

An output for another host is offered as soon as its operation is dispatched, and is sent while the
node continues with its next operation. If the hops of a node share its connection, each is offered
when the previous ones have been sent, as planned: sent in parallel, all of them would arrive late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
from skippipe_sched.problem.plan import Operation
from skippipe_sched.timing.hops import Queues
from skippipe_sched.timing.timeline import Run

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import Then
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.operations import Operations
from skippipe_jax.runtime.turns import ReadyQueue

# Inputs that a node requests in advance: enough that the sender always has a request, and few
# enough to bound the memory of arrays that have arrived.
INPUTS_REQUESTED_AHEAD = 8


@dataclass
class NodeProgress:
    """Progress of a node. `requested` counts inputs that are requested and have not arrived."""

    turns: ReadyQueue
    unrequested: deque[Compute]
    idle_since_s: float | None
    requested: int = 0
    busy_s: float = 0.0
    inputs: dict[Operation, tuple[float, jax.Array]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """True once all operations of the node have ended."""
        return not self.turns.left and self.idle_since_s is not None


class Flow:
    """Execution of the operations of one iteration on the nodes of this host.

    Attributes:
        nodes: progress of each node.
        ended: operations that have ended.
        runs: times of each ended operation.
    """

    def __init__(
        self,
        exchange: Exchange,
        operations: Operations,
        program: Program,
        iteration: int,
        memory: Callable[[int], float],
        *,
        ready_first: bool,
        emulation: Emulation | None = None,
        connections: Queues | None = None,
        when_ended: Callable[[Operation], None] = lambda _: None,
        send_at: Callable[[float, Then], None] | None = None,
    ):
        """Begin without inputs; `memory(n)` microbatches may be in flight on node n.

        Without `ready_first` every node keeps to the program's order, even if inputs are late.
        `when_ended` is called after each operation. `connections` determine when hops that share a
        connection may be offered. `send_at` schedules sends that emulated links or `connections`
        delay; by default it is the loop's timer, which may stop before the send.
        """
        self.exchange = exchange
        self.loop = exchange.loop
        self.operations = operations
        self.program = program
        self.iteration = iteration
        self.emulation = emulation
        self.connections = connections
        self.when_ended = when_ended
        self.send_at = send_at or self.loop.at
        computes = [step for step in program.instructions if isinstance(step, Compute)]
        self.computes = {compute.operation: compute for compute in computes}
        by_node: dict[int, list[Compute]] = {node: [] for node in program.nodes}
        for compute in computes:
            by_node[compute.operation.node].append(compute)
        self.nodes = {
            node: NodeProgress(
                ReadyQueue([c.operation for c in own], memory(node), ready_first=ready_first),
                deque(compute for compute in own if compute.arrives is not None),
                idle_since_s=self.loop.last_event_s,
            )
            for node, own in by_node.items()
        }
        self.ended: set[Operation] = set()
        self.runs: list[Run] = []

    @property
    def is_done(self) -> bool:
        """True once all nodes of this host are done."""
        return all(progress.is_done for progress in self.nodes.values())

    @property
    def is_idle(self) -> bool:
        """True while no node of this host computes."""
        return all(progress.idle_since_s is not None for progress in self.nodes.values())

    def begin(self, batches: Mapping[int, Batch]) -> None:
        """Pass the batches to the data nodes, and request the first inputs from other nodes."""
        for operation, compute in self.computes.items():
            if operation.kind == "F" and compute.arrives is None:
                first = self.operations.first_input(operation, batches[operation.microbatch])
                self._store_input(operation, self.loop.last_event_s, first)
        for progress in self.nodes.values():
            self._request_ahead(progress)

    def start_ready(self) -> None:
        """Start an operation on every idle node that has a ready one."""
        for node, progress in self.nodes.items():
            if progress.idle_since_s is not None:
                self._start_next(node, progress)

    def waits(self) -> Iterator[tuple[str, float]]:
        """Yield a description of the input that each idle node waits for, and since when."""
        for progress in self.nodes.values():
            if progress.turns.left and progress.idle_since_s is not None:
                operation = progress.turns.left[0]
                arrives = self.computes[operation].arrives
                sender = ""
                if arrives is not None:
                    host = self.exchange.topology.host_of[arrives.source]
                    sender = f" from node {arrives.source} on host {host}"
                yield f"the input of the {operation}{sender}", progress.idle_since_s

    def _request_ahead(self, progress: NodeProgress) -> None:
        while progress.unrequested and progress.requested < INPUTS_REQUESTED_AHEAD:
            compute = progress.unrequested.popleft()
            assert compute.arrives is not None
            progress.requested += 1
            then = partial(self._arrive, compute.operation)
            like = self.operations.arriving(compute.operation)
            self.exchange.ask(compute.arrives, self.iteration, like, then)

    def _arrive(self, operation: Operation, at_s: float, array: jax.Array) -> None:
        progress = self.nodes[operation.node]
        progress.requested -= 1
        self._store_input(operation, at_s, array)
        self._request_ahead(progress)

    def _store_input(self, operation: Operation, at_s: float, array: jax.Array) -> None:
        progress = self.nodes[operation.node]
        progress.inputs[operation] = at_s, array
        progress.turns.arrive(operation)

    def _start_next(self, node: int, progress: NodeProgress) -> None:
        operation = progress.turns.take()
        if operation is None:
            return
        arrived_s, value = progress.inputs.pop(operation)
        start_s = time.perf_counter()
        if self.emulation is not None:
            ready_s = max(arrived_s, progress.idle_since_s or 0.0)
            start_s = self.emulation.operation_start_s(ready_s, start_s)
        progress.idle_since_s = None
        leaves = self.computes[operation].leaves
        result, at_the_end = self.operations.dispatch(operation, value, leaves=leaves is not None)
        if leaves is not None and self._may_be_offered_early(leaves):
            self.exchange.give(leaves, self.iteration, result)
        self.loop.when_computed(
            at_the_end,
            lambda at_s: self._computed(Run(operation, arrived_s, start_s, at_s), result),
        )

    def _may_be_offered_early(self, hop: Hop) -> bool:
        """Return whether a hop may be offered while its array is still being computed."""
        is_late = self.emulation is not None or self.connections is not None
        return not is_late and not self.exchange.topology.is_local_node(hop.target)

    def _computed(self, run: Run, result: jax.Array | None) -> None:
        end_s = run.end_s
        if self.emulation is not None:
            end_s = self.emulation.operation_end_s(run.operation, run.start_s, end_s)
        ended = Run(run.operation, run.arrived_s, run.start_s, end_s)
        self.loop.at(end_s, lambda _: self._end(ended, result))

    def _end(self, run: Run, result: jax.Array | None) -> None:
        """Pass on the result of an operation that has ended, and free its node."""
        self.runs.append(run)
        node, end_s = run.operation.node, run.end_s
        progress = self.nodes[node]
        progress.busy_s += end_s - run.start_s
        progress.idle_since_s = end_s
        self.ended.add(run.operation)
        following = self.program.following.get(run.operation)
        if following is not None and result is not None:
            self._pass_on(run.operation, following, end_s, result)
        self.when_ended(run.operation)

    def _pass_on(
        self, operation: Operation, following: Operation, end_s: float, result: jax.Array
    ) -> None:
        leaves = self.computes[operation].leaves
        if leaves is None:
            self._store_input(following, end_s, result)
        elif self.emulation is not None:
            arrival_s = self.emulation.hop_end_s(operation.node, following, end_s)
            # The loop receives local hops before it stops, so its own timer is enough for them.
            at = (
                self.loop.at
                if self.exchange.topology.is_local_node(leaves.target)
                else self.send_at
            )
            at(arrival_s, lambda _: self.exchange.give(leaves, self.iteration, result))
        elif self.connections is not None and not self.exchange.topology.is_local_node(
            leaves.target
        ):
            hop = following.kind, operation.node, following.node
            offer_s = self.connections.offer_s(*hop, end_s)
            self.send_at(offer_s, lambda _: self.exchange.give(leaves, self.iteration, result))
        elif not self._may_be_offered_early(leaves):
            self.exchange.give(leaves, self.iteration, result)
