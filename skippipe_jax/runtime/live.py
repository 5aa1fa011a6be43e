"""Event-driven iteration with gradient averaging: operations, averaging, totals, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from skippipe_sched.problem.plan import Operation
from skippipe_sched.timing.timeline import Averaging

from skippipe_jax.cluster.membership import Group
from skippipe_jax.program.compiler import Compute
from skippipe_jax.runtime.buddies import BuddyCheckpoints
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.iteration import TrainingIteration
from skippipe_jax.runtime.reduction import sum_of_trees
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.ring import RingPart
from skippipe_jax.runtime.totals import Outcome, Sums, add_up, apart, sum_by_collective


@dataclass(kw_only=True, eq=False)
class ExactIteration(TrainingIteration):
    """Iteration in which replicas average gradients, synchronous over all hosts.

    It returns when the totals of all hosts have arrived, and the updates are dispatched. In an
    elastic run, the step is committed once all hosts of the `group` hold their averaged gradients
    and this iteration's parts of the copies for `buddies`.
    """

    buddies: BuddyCheckpoints
    group: Group
    averaging_dtype: str | None

    def __post_init__(self) -> None:
        """Begin without inputs."""
        super().__post_init__()
        self.averaging = GradientAveraging(
            self.exchange,
            self.replicas,
            self.iteration,
            self.averaging_dtype,
            self.emulation,
            self._sum_totals,
        )
        self.instructions = deque(self.program.instructions)
        self.totals_of_hosts: dict[int, jax.Array] = {}
        self.waits_for_totals = False

    def _begin(self) -> None:
        self.buddies.begin(self.iteration)
        for node, progress in self.nodes.items():
            if progress.is_done:
                self._begin_ring_of(node)
        self._begin_collectives()

    def _averagings(self) -> list[Averaging]:
        return self.averaging.averagings

    def _operation_ended(self, operation: Operation) -> None:
        if self.nodes[operation.node].is_done:
            self._begin_ring_of(operation.node)
        self._begin_collectives()

    def _begin_ring_of(self, node: int) -> None:
        """Begin the ring of a node's stage once all nodes that share the replica are done."""
        replica_of = self.topology.replica_of
        sharing = [other for other in self.nodes if replica_of[other] == replica_of[node]]
        if not all(self.nodes[other].is_done for other in sharing):
            return
        replica, connections = replica_of[node], self.connections
        if connections is None:
            self.averaging.begin_ring(replica)
        else:  # Wait until these nodes' connections have sent all hops.
            now_s = self.loop.last_event_s
            left_s = max(connections.all_left_s(other, now_s) for other in sharing)
            self.loop.at(left_s, lambda _: self.averaging.begin_ring(replica))

    def _begin_collectives(self) -> None:
        """Begin each collective whose preceding operations in this host's program have ended.

        A collective blocks its device until all replicas have joined it. As all programs follow one
        global order, and nothing before the collective is left, hosts cannot deadlock.
        """
        while self.instructions:
            step = self.instructions[0]
            if isinstance(step, Compute):
                if step.operation not in self.ended:
                    return
            else:
                self.averaging.begin_collective(step.stage)
            self.instructions.popleft()

    # Totals over all hosts.

    def _sum_totals(self) -> None:
        """Sum the totals over all hosts."""
        self.waits_for_totals = True
        norms = [n for stage in self.replicas.stages for n in self.replicas.squared_norms(stage)]
        parts = [*self.operations.totals.values(), *norms]
        noted = self.replicas.squared_norms_of_blocks()
        local = add_up(self.topology, parts, self.stop, self._busy_s(), noted)
        if self.group.is_elastic:
            self.loop.when_computed(local, lambda _: self._contribute(np.asarray(local)))
        elif self.topology.sums_totals_by_links:
            own, like = self.topology.host, jax.ShapeDtypeStruct(local.shape, local.dtype)
            hops = {
                other: self.topology.hops_of_totals(other)
                for other in self.topology.hosts
                if other != own
            }
            # Offered to all first: the first request of a host opens a connection, which may wait.
            for there, _ in hops.values():
                self.exchange.give(there, self.iteration, local)
            for other, (_, back) in hops.items():
                self.exchange.ask(back, self.iteration, like, partial(self._hear, other))
            self._hear(own, self.loop.last_event_s, local)
        else:
            summed = sum_by_collective(self.topology, local)
            self.loop.when_ready(summed, lambda _: self._finish(summed))

    def _contribute(self, totals: Float[np.ndarray, " all"]) -> None:
        """Contribute totals to the group, as this host holds all averaged gradients.

        Waits for this iteration's parts of the copies that this host keeps for other stages.
        """

        def committed(outcome: tuple[float, ...]) -> None:
            summed = np.asarray(outcome, np.float32)
            self.loop.post(lambda _: self._finish(jax.device_put(summed)))

        step, own = self.iteration + 1, totals.tolist()
        self.buddies.when_complete(
            lambda copies: self.group.contribute(step, own, committed, copies)
        )

    def _hear(self, host: int, at_s: float, totals: jax.Array) -> None:
        """Store the totals of a host; once all have arrived, sum them in the order of hosts."""
        self.totals_of_hosts[host] = totals
        if len(self.totals_of_hosts) == len(self.topology.hosts):
            self._finish(sum_of_trees([self.totals_of_hosts[own] for own in self.topology.hosts]))

    def _finish(self, summed: jax.Array) -> None:
        sums = apart(summed, len(self.topology.devices))
        if not self.loop.waits:
            # The times of operations were not measured.
            sums = Sums(sums.totals)
        self.waits_for_totals = False
        self.replicas.update(sums.totals)
        self.outcome = Outcome(lambda: sums, self._gauges())

    # Waits, for timeout messages.

    def _waits(self) -> Iterator[tuple[str, float]]:
        yield from super()._waits()
        if copies := [*self.buddies.waits()]:
            yield from ((what, self.loop.last_event_s) for what in copies)
        elif self.waits_for_totals:
            known = {self.topology.host, *self.totals_of_hosts}
            missing = [str(host) for host in self.topology.hosts if host not in known]
            yield f"the global sums from host {', '.join(missing)}", self.loop.last_event_s
        elif self.is_done or self.averaging.parts:
            for what in self.averaging.waits():
                yield what, self.loop.last_event_s


@dataclass(eq=False)
class GradientAveraging:
    """Gradient averaging of all stages in one iteration, each stage begun separately.

    Rings send sums as `dtype`, by default float32. `when_done` is called when all stages are
    averaged.

    Attributes:
        left: local replicas whose sums are not complete.
        averagings: stage, start and end of each complete averaging.
    """

    exchange: Exchange
    replicas: Replicas
    iteration: int
    dtype: str | None
    emulation: Emulation | None
    when_done: Callable[[], None]

    def __post_init__(self) -> None:
        """Begin no stage yet."""
        self.loop, self.topology = self.exchange.loop, self.exchange.topology
        self.left = set(self.replicas.states)
        self.begun: set[int] = set()
        self.parts: dict[int, RingPart] = {}
        self.averagings: list[Averaging] = []

    def begin_collective(self, stage: int) -> None:
        """Begin the collective sum of a stage, unless the stage has a ring."""
        if stage in self.topology.rings:
            return
        start_s = time.perf_counter()
        self.replicas.sum_by_collective(stage)
        for replica in self.replicas.states:
            if self.replicas.stage_of(replica) == stage:
                self._when_summed(replica, start_s)

    def begin_ring(self, replica: int) -> None:
        """Begin a replica's part in the ring of its stage, if there is one and it has not begun."""
        ring = self.topology.rings.get(self.replicas.stage_of(replica))
        if ring is None or replica in self.begun:
            return
        self.begun.add(replica)
        spread = self.topology.spread(replica)
        dtype = jnp.dtype(self.dtype or np.float32)
        part = RingPart(ring, replica, self.replicas.to_sum(replica), dtype, spread)
        self.parts[replica] = part
        start_s = time.perf_counter()

        def ended(_: float) -> None:
            del self.parts[replica]
            self.replicas.states[replica].gradients = part.result()
            self._when_summed(replica, start_s)

        self.exchange.run_ring(part, self.iteration, ended)

    def waits(self) -> Iterator[str]:
        """Yield descriptions of the sums that are waited for."""
        for part in self.parts.values():
            source = part.ring.nodes[part.position - 1]
            sender = f"node {source} on host {self.topology.host_of[source]}"
            yield f"a chunk of the gradient average of stage {part.ring.stage} from {sender}"
        if self.left and not self.parts:
            stage = min(self.replicas.stage_of(replica) for replica in self.left)
            yield f"the gradient average of stage {stage}"

    def _when_summed(self, replica: int, start_s: float) -> None:
        stage = self.replicas.stage_of(replica)

        def summed(end_s: float) -> None:
            if self.emulation is not None:
                end_s = self.emulation.averaging_end_s(stage, end_s)
            self.loop.at(end_s, lambda _: end(end_s))

        def end(end_s: float) -> None:
            self.averagings.append(Averaging(stage, start_s, end_s))
            self.left.remove(replica)
            if not self.left:
                self.when_done()

        # All arrays of a sum are ready at the same time.
        array = jax.tree.leaves(self.replicas.states[replica].gradients)[0]
        self.loop.when_computed(array, summed)
