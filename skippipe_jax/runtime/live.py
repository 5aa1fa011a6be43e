"""One iteration as it happens: every operation starts when its input has arrived.

A thread waits for each array that is on its way or being computed, and puts what has to follow into
a queue; all else happens in the thread that takes it out. What goes to another host is offered the
moment it is asked to be computed, and leaves while the node goes on with its next operation.
Nothing is waited for longer than the deadline.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from skippipe_sched.problem.plan import Operation
from skippipe_sched.timing.simulate import Averaging, Run

from skippipe_jax.cluster.agreement import DeadlinePassed
from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import Compute, Hop
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.executor import Executor, Outcome
from skippipe_jax.runtime.reduction import sum_over_devices
from skippipe_jax.runtime.ring import RingPart
from skippipe_jax.runtime.turns import Turns
from skippipe_jax.storage.recording import Recording

# So many inputs of a node, and chunks of a ring, are asked for ahead: enough that the other end
# always has a request, and not so many that an iteration's arrays need room all at once.
INPUTS_ASKED_AHEAD = 8
CHUNKS_ASKED_AHEAD = 32
# Of what a host waits for when the deadline has passed, so much is named, the oldest first.
WAITS_NAMED = 5


@dataclass(frozen=True)
class Clock:
    """What to add to `time.perf_counter()` for seconds since the epoch by host 0's clock."""

    offset_s: float

    @classmethod
    def with_offset(cls, host_offset_s: float) -> Clock:
        """From what is to be added to this host's `time.time()`."""
        return cls(time.time() - time.perf_counter() + host_offset_s)


@dataclass
class _NodeProgress:
    """How far a node has come. `asked` counts inputs that have been asked for and not arrived."""

    turns: Turns
    unasked: deque[Compute]
    idle_since_s: float | None
    asked: int = 0
    busy_s: float = 0.0
    inputs: dict[Operation, tuple[float, jax.Array]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return not self.turns.left and self.idle_since_s is not None


class LiveIteration:
    """One iteration on the nodes of this host. Times are of `time.perf_counter` [s]."""

    def __init__(
        self,
        executor: Executor,
        iteration: int,
        *,
        ready_first: bool,
        emulation: Emulation | None = None,
    ):
        """Without `ready_first` every node keeps to the plan's order, whatever comes late."""
        self.executor = executor
        self.iteration = iteration
        self.emulation = emulation
        self.host = executor.program.host
        self.events: queue.SimpleQueue[tuple[float, Callable[[float], None]]] = queue.SimpleQueue()
        self.timers: list[tuple[float, int, Callable[[float], None]]] = []
        self.timer_count = itertools.count()
        self.last_event_s = time.perf_counter()
        # Between nodes of this process: what was given before it was asked for, and the reverse.
        self.given: dict[Hop, jax.Array] = {}
        self.wanted: dict[Hop, Callable[[float, jax.Array], None]] = {}

        computes = [c for c in executor.program.instructions if isinstance(c, Compute)]
        self.computes = {compute.operation: compute for compute in computes}
        self.nodes = {
            node: self._progress([c for c in computes if c.operation.node == node], ready_first)
            for node in executor.program.nodes
        }
        self.totals = executor.new_totals()
        self.runs: list[Run] = []
        self.averagings: list[Averaging] = []
        # Of replicas, by their nodes.
        self.ring_parts: dict[int, RingPart] = {}
        self.not_averaged = set() if executor.updates_locally else set(executor.states)
        self.ended: set[Operation] = set()
        self.instructions = deque(executor.program.instructions)
        self.totals_of_hosts: dict[int, jax.Array] = {}
        self.updated: Outcome | None = None
        self.outcome: Outcome | None = None

    def _progress(self, computes: Sequence[Compute], ready_first: bool) -> _NodeProgress:
        order = [compute.operation for compute in computes]
        memory = self.executor.plan.case.nodes[order[0].node].memory if order else 1
        return _NodeProgress(
            Turns(order, memory, ready_first=ready_first),
            deque(compute for compute in computes if compute.arrives is not None),
            idle_since_s=self.last_event_s,
        )

    def run(self, batches: Mapping[int, Sequence[Batch]], stop: bool = False) -> Outcome:
        """Run the iteration; `batches` and `stop` are as for `Executor.run`.

        Returns when the totals of all hosts are known, the updates have been dispatched, and
        parameters, if it is their turn, are averaged.

        Raises:
            DeadlinePassed: if nothing came from other hosts for `network.deadline_s`.
        """
        self.stop = stop
        if self.emulation is not None:
            self.emulation.begin(self.iteration)
        inputs = self.executor.batches_of_microbatches(batches)
        for operation in self.computes:
            if operation.kind == "F" and self.computes[operation].arrives is None:
                first = self.executor.first_input(operation, inputs)
                self._give_input(operation, self.last_event_s, first)
        for node, progress in self.nodes.items():
            self._ask_ahead(progress)
            if progress.is_done:
                self._begin_ring_of(node)
        self._begin_collectives()
        self._end_computing()
        while self.outcome is None:
            for node, progress in self.nodes.items():
                if progress.idle_since_s is not None:
                    self._start_next(node, progress)
            at_s, then = self._next_event()
            self.last_event_s = at_s
            then(at_s)
        return self.outcome

    def recording(self, clock: Clock) -> Recording:
        """What happened on this host's nodes, in seconds since the epoch by host 0's clock."""
        by = clock.offset_s
        return Recording(
            tuple(
                Run(run.operation, run.arrived_s + by, run.start_s + by, run.end_s + by)
                for run in self.runs
            ),
            tuple(Averaging(a.stage, a.start_s + by, a.end_s + by) for a in self.averagings),
        )

    # Events.

    def _next_event(self) -> tuple[float, Callable[[float], None]]:
        while True:
            now = time.perf_counter()
            if self.timers and self.timers[0][0] <= now:
                at_s, _, then = heapq.heappop(self.timers)
                return at_s, then
            deadline = self.last_event_s + self.executor.network.deadline_s
            if now > deadline and self._only_waits():
                raise DeadlinePassed(self._what_is_waited_for())
            until = min([max(deadline, now + 1.0), *(entry[0] for entry in self.timers[:1])])
            try:
                return self.events.get(timeout=max(0.0, until - now))
            except queue.Empty:
                continue

    def _only_waits(self) -> bool:
        """Whether nothing computes here, which may take as long as it likes."""
        return all(node.idle_since_s is not None for node in self.nodes.values())

    def _at(self, time_s: float, then: Callable[[float], None]) -> None:
        heapq.heappush(self.timers, (time_s, next(self.timer_count), then))

    def _when_ready(self, array: jax.Array, then: Callable[[float], None]) -> None:
        """Call `then` once an array is there; an error that comes in its place is raised."""

        def raise_error(error: Exception, _: float) -> None:
            raise error

        def wait() -> None:
            try:
                array.block_until_ready()
            except Exception as error:
                self.events.put((time.perf_counter(), partial(raise_error, error)))
            else:
                self.events.put((time.perf_counter(), then))

        threading.Thread(target=wait, name="skippipe-wait", daemon=True).start()

    # Hops.

    def _give(self, hop: Hop, array: jax.Array) -> None:
        """Send an array, or pass it on to a node of this process."""
        host = self.executor.host_of[hop.target]
        if host != self.host:
            self.executor.links[host].send(hop, self.iteration, array)
            return
        array = jax.device_put(array, self.executor.devices[hop.target])
        if hop in self.wanted:
            self._hand_over(array, self.wanted.pop(hop))
        else:
            self.given[hop] = array

    def _ask(
        self, hop: Hop, like: jax.ShapeDtypeStruct, then: Callable[[float, jax.Array], None]
    ) -> None:
        """Call `then` with what a hop brings, and when it came."""
        host = self.executor.host_of[hop.source]
        if host != self.host:
            array = self.executor.links[host].receive(hop, self.iteration, like)
            self._when_ready(array, lambda at_s: then(at_s, array))
        elif hop in self.given:
            self._hand_over(self.given.pop(hop), then)
        else:
            self.wanted[hop] = then

    def _hand_over(self, array: jax.Array, then: Callable[[float, jax.Array], None]) -> None:
        self._at(self.last_event_s, lambda at_s: then(at_s, array))

    # Operations.

    def _ask_ahead(self, progress: _NodeProgress) -> None:
        while progress.unasked and progress.asked < INPUTS_ASKED_AHEAD:
            compute = progress.unasked.popleft()
            assert compute.arrives is not None
            progress.asked += 1
            self._ask(
                compute.arrives, self.executor.travelling, partial(self._arrive, compute.operation)
            )

    def _arrive(self, operation: Operation, at_s: float, array: jax.Array) -> None:
        progress = self.nodes[operation.node]
        progress.asked -= 1
        self._give_input(operation, at_s, self.executor.unpack(array))
        self._ask_ahead(progress)

    def _give_input(self, operation: Operation, at_s: float, array: jax.Array) -> None:
        progress = self.nodes[operation.node]
        progress.inputs[operation] = at_s, array
        progress.turns.arrive(operation)

    def _start_next(self, node: int, progress: _NodeProgress) -> None:
        operation = progress.turns.take()
        if operation is None:
            return
        arrived_s, value = progress.inputs.pop(operation)
        start_s = time.perf_counter()
        if self.emulation is not None:
            ready_s = max(arrived_s, progress.idle_since_s or 0.0)
            start_s = self.emulation.operation_start_s(ready_s, start_s)
        progress.idle_since_s = None
        result = self.executor.call(operation, value, self.totals)
        leaves = self.computes[operation].leaves
        if leaves is not None:
            result = self.executor.pack(result)
            if self._goes_at_once(leaves):
                self._give(leaves, result)
        self._when_ready(
            self.executor.nodes[node].gauge,
            lambda at_s: self._computed(Run(operation, arrived_s, start_s, at_s), result),
        )

    def _goes_at_once(self, hop: Hop) -> bool:
        """Whether a hop may be offered while its array is still being computed."""
        return self.emulation is None and self.executor.host_of[hop.target] != self.host

    def _computed(self, run: Run, result: jax.Array | None) -> None:
        end_s = run.end_s
        if self.emulation is not None:
            end_s = self.emulation.operation_end_s(run.operation, run.start_s, end_s)
        ended = Run(run.operation, run.arrived_s, run.start_s, end_s)
        self._at(end_s, lambda _: self._end(ended, result))

    def _end(self, run: Run, result: jax.Array | None) -> None:
        """An operation has ended: pass its result on, and free its node."""
        self.runs.append(run)
        node, end_s = run.operation.node, run.end_s
        progress = self.nodes[node]
        progress.busy_s += end_s - run.start_s
        progress.idle_since_s = end_s
        self.ended.add(run.operation)
        leaves = self.computes[run.operation].leaves
        following = self.executor.program.following.get(run.operation)
        if following is not None and result is not None:
            if leaves is None:
                self._give_input(following, end_s, result)
            elif self.emulation is not None:
                arrival_s = self.emulation.hop_end_s(node, following, end_s)
                self._at(arrival_s, lambda _: self._give(leaves, result))
            elif not self._goes_at_once(leaves):
                self._give(leaves, result)
        if progress.is_done:
            self._begin_ring_of(node)
        self._begin_collectives()
        self._end_computing()

    def _end_computing(self) -> None:
        """Local updates wait for nothing but the totals, and those for all nodes."""
        if self.executor.updates_locally and self._all_nodes_are_done():
            self._sum_totals()

    # Averaging.

    def _begin_ring_of(self, node: int) -> None:
        """A node is done: begin its stage's ring, unless others share the replica and are not."""
        if self.executor.updates_locally:
            return
        replica_of = self.executor.replica_of
        replica = replica_of[node]
        sharing = [own for other, own in self.nodes.items() if replica_of[other] == replica]
        if all(progress.is_done for progress in sharing):
            self._begin_ring(replica)

    def _begin_collectives(self) -> None:
        """Begin the collectives before which nothing is left in this host's program.

        A collective keeps its device until all replicas have come to it. Hosts that then lack
        nothing that comes before it in the one order of all programs do not wait in a circle.
        """
        while self.instructions:
            step = self.instructions[0]
            if isinstance(step, Compute):
                if step.operation not in self.ended:
                    return
            elif not self.executor.updates_locally:
                self._begin_collective(step.stage)
            self.instructions.popleft()

    def _begin_averaging(self) -> None:
        """Average parameters: all hosts have the totals, and begin with the same stages."""
        self.not_averaged = set(self.executor.states)
        for node in self.executor.states:
            self._begin_ring(node)
        for stage in self.executor.stages_served():
            self._begin_collective(stage)

    def _begin_collective(self, stage: int) -> None:
        """Begin the sum over a stage, unless a ring makes it."""
        if stage in self.executor.rings:
            return
        start_s = time.perf_counter()
        self.executor.sum_replicas(stage)
        for node in [n for n in self.executor.states if self.executor.stage_of[n] == stage]:
            # All arrays of a sum come at once.
            array = self.executor.summed_array(node)
            self._when_ready(array, lambda at_s, node=node: self._averaged(node, start_s, at_s))

    def _begin_ring(self, node: int) -> None:
        """Begin with a replica's part in the ring of its stage, if there is one."""
        ring = self.executor.rings.get(self.executor.stage_of[node])
        if ring is None:
            return
        dtype = jnp.dtype(self.executor.network.averaging_dtype or np.float32)
        ring_part = RingPart(ring, node, self.executor.to_sum(node), dtype)
        self.ring_parts[node] = ring_part
        start_s = time.perf_counter()
        for hop, array in ring_part.begin():
            self._give(hop, array)
        for _ in range(CHUNKS_ASKED_AHEAD):
            self._ask_for_chunk(node, ring_part, start_s)

    def _ask_for_chunk(self, node: int, ring_part: RingPart, start_s: float) -> None:
        for step, chunk, hop in itertools.islice(ring_part.unasked, 1):
            then = partial(self._chunk, node, ring_part, start_s, step, chunk)
            self._ask(hop, ring_part.travelling, then)

    def _chunk(
        self,
        node: int,
        ring_part: RingPart,
        start_s: float,
        step: int,
        chunk: int,
        _: float,
        array: jax.Array,
    ) -> None:
        """A chunk has come round the ring."""
        going_on = ring_part.arrive(step, chunk, array)
        if going_on is not None:
            self._give(*going_on)
        self._ask_for_chunk(node, ring_part, start_s)
        if ring_part.left == 0:
            del self.ring_parts[node]
            self.executor.take_sum(node, ring_part.result())
            array = self.executor.summed_array(node)
            self._when_ready(array, lambda at_s: self._averaged(node, start_s, at_s))

    def _averaged(self, node: int, start_s: float, at_s: float) -> None:
        if self.emulation is not None:
            at_s = self.emulation.averaging_end_s(self.executor.stage_of[node], at_s)
        self._at(at_s, lambda _: self._end_averaging(node, start_s, at_s))

    def _end_averaging(self, node: int, start_s: float, end_s: float) -> None:
        self.averagings.append(Averaging(self.executor.stage_of[node], start_s, end_s))
        self.not_averaged.remove(node)
        if self.not_averaged:
            return
        if self.executor.updates_locally:
            self.outcome = self.updated
        else:
            self._sum_totals()

    # Totals.

    def _sum_totals(self) -> None:
        """Sum over all hosts what every update needs to know."""
        executor = self.executor
        stages = dict.fromkeys(executor.stage_of[node] for node in executor.states)
        norms = [norm for stage in stages for norm in executor.squared_norms(stage)]
        busy_s = {node: progress.busy_s for node, progress in self.nodes.items()}
        local = executor.add_up([*self.totals.values(), *norms], self.stop, busy_s)
        like = jax.ShapeDtypeStruct(local.shape, local.dtype)
        hosts = range(len(executor.host_devices))
        if not executor.sums_totals_by_links:
            own = {executor.host_device: local}
            summed = sum_over_devices(executor.host_devices, own)[executor.host_device]
            self._when_ready(summed, lambda _: self._finish(summed))
        elif self.host == 0:
            self._hear(0, self.last_event_s, local)
            for host in hosts[1:]:
                self._ask(self._totals_hop(host), like, partial(self._hear, host))
        else:
            self._give(self._totals_hop(self.host), local)
            self._ask(self._answer_hop(self.host), like, lambda _, summed: self._finish(summed))

    def _totals_hop(self, host: int) -> Hop:
        nodes, first = self.executor.first_nodes, self.executor.first_totals_hop
        return Hop(first + host, nodes[host], nodes[0])

    def _answer_hop(self, host: int) -> Hop:
        nodes, first = self.executor.first_nodes, self.executor.first_totals_hop
        return Hop(first + len(nodes) + host, nodes[0], nodes[host])

    def _hear(self, host: int, at_s: float, totals: jax.Array) -> None:
        """Host 0 has the totals of another host; with those of all, it tells them the sum."""
        self.totals_of_hosts[host] = totals
        hosts = range(len(self.executor.host_devices))
        if len(self.totals_of_hosts) == len(hosts):
            summed = _add_all([self.totals_of_hosts[host] for host in hosts])
            for other in hosts[1:]:
                self._give(self._answer_hop(other), summed)
            self._finish(summed)

    def _finish(self, summed: jax.Array) -> None:
        self.updated = self.executor.update(summed, watched=True)
        if self.executor.averages_parameters(self.iteration):
            self._begin_averaging()
        else:
            self.outcome = self.updated

    # The deadline.

    def _what_is_waited_for(self) -> str:
        """What, from whom and since when: said when the deadline has passed."""
        waits = sorted(self._waits(), key=lambda wait: wait[1])
        named = ", ".join(what for what, _ in waits[:WAITS_NAMED])
        more = f" and {len(waits) - WAITS_NAMED} more" if len(waits) > WAITS_NAMED else ""
        since_s = waits[0][1]
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - _ago(since_s)))
        return (
            f"in iteration {self.iteration + 1}, since {clock}, {_ago(since_s):.0f} s, this host "
            f"has waited for {named}{more}; network.deadline_s is "
            f"{self.executor.network.deadline_s:g}"
        )

    def _waits(self) -> Iterator[tuple[str, float]]:
        """What is waited for, and since when."""
        for progress in self.nodes.values():
            if progress.turns.left and progress.idle_since_s is not None:
                operation = progress.turns.left[0]
                arrives = self.computes[operation].arrives
                whence = f" from {self._place(arrives.source)}" if arrives else ""
                yield f"the input of the {operation}{whence}", progress.idle_since_s
        for part in self.ring_parts.values():
            source = part.ring.nodes[part.position - 1]
            what = f"a part of the average of stage {part.ring.stage} from {self._place(source)}"
            yield what, self.last_event_s
        if not self.not_averaged and self._all_nodes_are_done():
            hosts = range(len(self.executor.host_devices)) if self.host == 0 else [0]
            missing = [str(host) for host in hosts if host not in self.totals_of_hosts]
            yield f"the totals from host {', '.join(missing)}", self.last_event_s
        elif not self.ring_parts and self._all_nodes_are_done():
            stages = sorted({self.executor.stage_of[node] for node in self.not_averaged})
            yield f"the average of stage {stages[0]}", self.last_event_s

    def _all_nodes_are_done(self) -> bool:
        return all(progress.is_done for progress in self.nodes.values())

    def _place(self, node: int) -> str:
        return f"node {node} on host {self.executor.host_of[node]}"


def _ago(moment_s: float) -> float:
    return time.perf_counter() - moment_s


@jax.jit
def _add_all(parts: list[jax.Array]) -> Any:
    return sum(parts[1:], start=parts[0])
