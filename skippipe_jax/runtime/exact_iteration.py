"""Event-driven iteration with gradient averaging: operations, averaging, totals, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from skippipe_sched.timing.timeline import Averaging

from skippipe_jax.cluster.membership import Group
from skippipe_jax.program.compiler import Compute
from skippipe_jax.runtime.buddies import BuddyCheckpoints
from skippipe_jax.runtime.iteration import TrainingIteration
from skippipe_jax.runtime.ring import RingPart
from skippipe_jax.runtime.totals import Outcome, Sums, add_up, split_sums, sum_by_collective


@dataclass(kw_only=True, eq=False)
class ExactIteration(TrainingIteration):
    """Iteration in which replicas average gradients, synchronous over all hosts.

    It returns when the totals of all hosts have arrived, and the updates are dispatched. In an
    elastic run, the step is committed once all hosts of the `group` hold their averaged gradients
    and this iteration's parts of the copies for `buddies`. Rings send sums as `averaging_dtype`, by
    default float32.

    Attributes:
        unsummed: local replicas whose sums are not complete.
        parts: parts in the rings that have begun and not ended, by replica.
    """

    buddies: BuddyCheckpoints
    group: Group
    averaging_dtype: str | None

    def __post_init__(self) -> None:
        """Begin without inputs."""
        super().__post_init__()
        self.instructions = deque(self.program.instructions)
        self.unsummed = set(self.replicas.states)
        self.begun: set[int] = set()
        self.parts: dict[int, RingPart] = {}
        self.waits_for_totals = False

    def _begin(self) -> None:
        self.buddies.begin(self.iteration)

    # Averaging.

    def _node_done(self, node: int) -> None:
        """Begin the ring of a node's stage once all nodes that share the replica are done."""
        replica_of = self.topology.replica_of
        replica, connections = replica_of[node], self.connections
        sharing = [other for other in self.nodes if replica_of[other] == replica]
        if not all(self.nodes[other].is_done for other in sharing):
            return
        if connections is None:
            self._begin_ring(replica)
        else:  # Wait until these nodes' connections have sent all hops.
            now_s = self.loop.last_event_s
            left_s = max(connections.all_left_s(other, now_s) for other in sharing)
            self.loop.at(left_s, lambda _: self._begin_ring(replica))

    def _begin_ring(self, replica: int) -> None:
        """Begin a replica's part in the ring of its stage, if there is one and it has not begun."""
        ring = self.topology.rings.get(self.replicas.stage_of(replica))
        if ring is None or replica in self.begun:
            return
        self.begun.add(replica)
        dtype = jnp.dtype(self.averaging_dtype or np.float32)
        here = self.topology.sharding(replica)
        # No variable holds the gradients, which the blocks of the part replace.
        part = RingPart(ring, replica, self.replicas.to_sum(replica), dtype, here)
        self.parts[replica] = part
        start_s = time.perf_counter()

        def ended(_: float) -> None:
            del self.parts[replica]
            self.replicas.states[replica].gradients = part.result()
            self._when_summed(replica, start_s)

        self.exchange.run_ring(part, self.iteration, ended)

    def _start_ready(self) -> None:
        """Begin collectives that may begin, then operations.

        A collective may begin once all operations before it in this host's program have ended. It
        blocks its device until all replicas have joined it. As all programs follow one global
        order, and nothing before the collective is left, hosts cannot deadlock.
        """
        while self.instructions:
            step = self.instructions[0]
            if isinstance(step, Compute):
                if step.operation not in self.ended:
                    break
            elif step.stage not in self.topology.rings:
                self._begin_collective(step.stage)
            self.instructions.popleft()
        super()._start_ready()

    def _begin_collective(self, stage: int) -> None:
        start_s = time.perf_counter()
        self.replicas.sum_by_collective(stage)
        for replica in self.replicas.states:
            if self.replicas.stage_of(replica) == stage:
                self._when_summed(replica, start_s)

    def _when_summed(self, replica: int, start_s: float) -> None:
        stage = self.replicas.stage_of(replica)

        def summed(end_s: float) -> None:
            if self.emulation is not None:
                end_s = self.emulation.averaging_end_s(stage, end_s)
            self.loop.at(end_s, lambda _: end(end_s))

        def end(end_s: float) -> None:
            self.averagings.append(Averaging(stage, start_s, end_s))
            self.unsummed.remove(replica)
            if not self.unsummed:
                self._sum_totals()

        # All arrays of a sum are ready at the same time.
        array = jax.tree.leaves(self.replicas.states[replica].gradients)[0]
        self.loop.when_computed(array, summed)

    # Totals over all hosts.

    def _sum_totals(self) -> None:
        """Sum the totals over all hosts: by consensus in an elastic run, else by a collective."""
        self.waits_for_totals = True
        norms = [n for stage in self.replicas.stages for n in self.replicas.squared_norms(stage)]
        parts = [*self.operations.totals.values(), *norms]
        noted = self.replicas.squared_norms_of_blocks()
        local = add_up(self.topology, parts, self.stop, self._busy_s(), noted)
        if self.group.is_elastic:
            self.loop.when_computed(local, lambda _: self._contribute(np.asarray(local)))
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

    def _finish(self, summed: jax.Array) -> None:
        sums = split_sums(summed, len(self.topology.devices))
        if not self.loop.waits:
            # The times of operations were not measured.
            sums = Sums(sums.totals)
        self.waits_for_totals = False
        self.replicas.update(sums.totals)
        self.outcome = Outcome(lambda: sums, self._gauges())

    # Waits, for timeout messages.

    def _waits(self) -> Iterator[tuple[str, float]]:
        yield from super()._waits()
        since_s = self.loop.last_event_s
        if copies := [*self.buddies.waits()]:
            yield from ((what, since_s) for what in copies)
        elif self.waits_for_totals:
            yield f"the global sums from {self.topology.others_text()}", since_s
        elif self.is_done or self.parts:
            for part in self.parts.values():
                source = part.ring.nodes[part.position - 1]
                sender = self.topology.node_text(source)
                what = f"a chunk of the gradient average of stage {part.ring.stage} from {sender}"
                yield what, since_s
            if self.unsummed and not self.parts:
                stage = min(map(self.replicas.stage_of, self.unsummed))
                yield f"the gradient average of stage {stage}", since_s
