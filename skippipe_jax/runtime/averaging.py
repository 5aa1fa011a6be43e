"""Event-driven gradient averaging: rings and collectives over the replicas of the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from skippipe_sched.timing.timeline import Averaging

from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.ring import RingPart


class GradientAveraging:
    """Gradient averaging of all stages in one iteration, each stage begun separately.

    Attributes:
        left: local replicas whose sums are not complete.
        averagings: stage, start and end of each complete averaging.
    """

    def __init__(
        self,
        exchange: Exchange,
        replicas: Replicas,
        iteration: int,
        dtype: str | None,
        emulation: Emulation | None,
        when_done: Callable[[], None],
    ):
        """Begin no stage yet; rings send sums as `dtype`, by default float32.

        `when_done` is called when all stages are averaged.
        """
        self.exchange = exchange
        self.loop = exchange.loop
        self.topology = exchange.topology
        self.replicas = replicas
        self.iteration = iteration
        self.dtype = jnp.dtype(dtype or np.float32)
        self.emulation = emulation
        self.when_done = when_done
        self.left = set(replicas.states)
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
        part = RingPart(ring, replica, self.replicas.to_sum(replica), self.dtype, spread)
        self.parts[replica] = part
        start_s = time.perf_counter()

        def ended(_: float) -> None:
            del self.parts[replica]
            self.replicas.take_sum(replica, part.result())
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
        # All arrays of a sum are ready at the same time.
        array = self.replicas.summed_array(replica)
        self.loop.when_computed(array, lambda at_s: self._summed(replica, start_s, at_s))

    def _summed(self, replica: int, start_s: float, at_s: float) -> None:
        if self.emulation is not None:
            at_s = self.emulation.averaging_end_s(self.replicas.stage_of(replica), at_s)
        self.loop.at(at_s, lambda _: self._end(replica, start_s, at_s))

    def _end(self, replica: int, start_s: float, end_s: float) -> None:
        self.averagings.append(Averaging(self.replicas.stage_of(replica), start_s, end_s))
        self.left.remove(replica)
        if not self.left:
            self.when_done()
