"""Event-driven iteration with gradient averaging: operations, averaging, totals, update."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from jaxtyping import Float
from skippipe_sched.problem.plan import Operation
from skippipe_sched.timing.timeline import Averaging

from skippipe_jax.cluster.group import Group
from skippipe_jax.program.compiler import Compute
from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.averaging import GradientAveraging
from skippipe_jax.runtime.buddies import BuddyCheckpoints
from skippipe_jax.runtime.iteration import Iteration, IterationSetup
from skippipe_jax.runtime.reduction import sum_of_trees
from skippipe_jax.runtime.totals import Outcome, add_up, apart, sum_by_collective


class ExactIteration(Iteration):
    """Iteration in which replicas average gradients, synchronous over all hosts.

    It returns when the totals of all hosts have arrived, and the updates are dispatched.
    """

    def __init__(
        self,
        setup: IterationSetup,
        *,
        buddies: BuddyCheckpoints,
        group: Group,
        averaging_dtype: str | None = None,
    ):
        """Begin without batches.

        In an elastic run, the step is committed once all hosts of the `group` hold their averaged
        gradients and this iteration's parts of the copies for `buddies`.
        """
        super().__init__(setup)
        self.group = group
        self.buddies = buddies
        self.averaging = GradientAveraging(
            self.exchange,
            self.replicas,
            self.iteration,
            averaging_dtype,
            self.emulation,
            self._sum_totals,
        )
        self.instructions = deque(self.program.instructions)
        self.totals_of_hosts: dict[int, jax.Array] = {}
        self.waits_for_totals = False

    def _begin(self) -> None:
        self.buddies.begin(self.iteration)
        for node, progress in self.flow.nodes.items():
            if progress.is_done:
                self._begin_ring_of(node)
        self._begin_collectives()

    def _averagings(self) -> list[Averaging]:
        return self.averaging.averagings

    def _operation_ended(self, operation: Operation) -> None:
        if self.flow.nodes[operation.node].is_done:
            self._begin_ring_of(operation.node)
        self._begin_collectives()

    def _begin_ring_of(self, node: int) -> None:
        """Begin the ring of a node's stage once all nodes that share the replica are done."""
        replica_of = self.topology.replica_of
        sharing = [other for other in self.flow.nodes if replica_of[other] == replica_of[node]]
        if not all(self.flow.nodes[other].is_done for other in sharing):
            return
        replica, connections = replica_of[node], self.flow.connections
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
                if step.operation not in self.flow.ended:
                    return
            else:
                self.averaging.begin_collective(step.stage)
            self.instructions.popleft()

    # Totals over all hosts.

    def _sum_totals(self) -> None:
        """Sum the totals over all hosts."""
        self.waits_for_totals = True
        norms = [n for stage in self.replicas.stages for n in self.replicas.squared_norms(stage)]
        busy_s = {node: progress.busy_s for node, progress in self.flow.nodes.items()}
        parts = [*self.operations.totals.values(), *norms]
        noted = self.replicas.squared_norms_of_blocks()
        local = add_up(self.topology, parts, self.stop, busy_s, noted)
        like = jax.ShapeDtypeStruct(local.shape, local.dtype)
        if self.group.is_elastic:
            self.loop.when_computed(local, lambda _: self._contribute(np.asarray(local)))
        elif not self.topology.sums_totals_by_links:
            summed = sum_by_collective(self.topology, local)
            self.loop.when_ready(summed, lambda _: self._finish(summed))
        elif self.topology.host == 0:
            self._hear(0, self.loop.last_event_s, local)
            for host in self.topology.hosts[1:]:
                then = partial(self._hear, host)
                self.exchange.ask(self._totals_hop(host), self.iteration, like, then)
        else:
            own = self.topology.host
            self.exchange.give(self._totals_hop(own), self.iteration, local)
            hop = self._answer_hop(own)
            self.exchange.ask(hop, self.iteration, like, lambda _, summed: self._finish(summed))

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

    def _totals_hop(self, host: int) -> Hop:
        first_nodes = self.topology.first_nodes
        return Hop(self.topology.totals[host], first_nodes[host], first_nodes[0])

    def _answer_hop(self, host: int) -> Hop:
        first_nodes = self.topology.first_nodes
        number = self.topology.totals[len(first_nodes) + host]
        return Hop(number, first_nodes[0], first_nodes[host])

    def _hear(self, host: int, at_s: float, totals: jax.Array) -> None:
        """Store the totals of a host on host 0; once all have arrived, send the sum to all."""
        self.totals_of_hosts[host] = totals
        hosts = self.topology.hosts
        if len(self.totals_of_hosts) == len(hosts):
            summed = sum_of_trees([self.totals_of_hosts[host] for host in hosts])
            for other in hosts[1:]:
                self.exchange.give(self._answer_hop(other), self.iteration, summed)
            self._finish(summed)

    def _finish(self, summed: jax.Array) -> None:
        sums = apart(summed, len(self.topology.devices))
        self.waits_for_totals = False
        self.replicas.update(sums.totals)
        gauges = {node: state.gauge for node, state in self.operations.nodes.items()}
        self.outcome = Outcome(lambda: sums, gauges)

    # Waits, for timeout messages.

    def _waits(self) -> Iterator[tuple[str, float]]:
        yield from self.flow.waits()
        if copies := [*self.buddies.waits()]:
            yield from ((what, self.loop.last_event_s) for what in copies)
        elif self.waits_for_totals:
            hears_all = self.topology.host == 0 or self.group.is_elastic
            known = {self.topology.host, *self.totals_of_hosts}
            hosts = self.topology.hosts if hears_all else [0]
            missing = [str(host) for host in hosts if host not in known]
            yield f"the global sums from host {', '.join(missing)}", self.loop.last_event_s
        elif self.flow.is_done or self.averaging.parts:
            for what in self.averaging.waits():
                yield what, self.loop.last_event_s
