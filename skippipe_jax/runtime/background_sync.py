"""Communication of `outer` mode, which overlaps with later iterations of this host.

The messages of replicas pass round the rings of their stages, and totals are summed over all hosts,
on the event loop that also runs the iterations and validations. A step is committed once all hosts
have made it and have received all messages sent after it. Only then may a host apply these
messages.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Float
from skippipe_sched.timing.timeline import Averaging

from skippipe_jax.cluster.membership import Group
from skippipe_jax.errors import GenerationEnded
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import Then
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.iteration import timeout_text
from skippipe_jax.runtime.ring import Gathering
from skippipe_jax.runtime.state import FragmentInTransit

T = TypeVar("T")
Summed = Future[Float[np.ndarray, " all"]]
"""Future sum over all hosts of the vectors of `totals.add_up`, ready some iterations later."""


@dataclass
class _LocalStep:
    """Step that this host has made, with its contribution to the totals."""

    step: int
    local: jax.Array
    summed: Summed
    is_computed: bool = False


@dataclass(eq=False)
class _Part:
    """Part of a replica in the ring of its stage; an emulated ring `takes_s` seconds longer."""

    step: int
    own: FragmentInTransit
    gathering: Gathering
    takes_s: float
    start_s: float = field(default_factory=time.perf_counter)


class BackgroundSync:
    """Gathers messages and sums totals while the loop of `exchange` runs.

    Attributes:
        topology: assignment of nodes, replicas and devices to hosts.
        group: the hosts that commit steps together.
        committed_step: the last committed step that this host has been notified of.
    """

    def __init__(self, exchange: Exchange, group: Group, step: int):
        """Begin after `step`, which is committed."""
        self.committed_step = step
        self.group = group
        self.topology, self._loop, self._exchange = exchange.topology, exchange.loop, exchange
        self._local_steps: deque[_LocalStep] = deque()
        self._contributed = step
        # Another thread puts them here.
        self._commits: queue.SimpleQueue[tuple[_LocalStep, tuple[float, ...]]] = queue.SimpleQueue()
        # Of unfinished rings.
        self._parts: list[_Part] = []
        self._averagings: list[Averaging] = []
        self._awaited: tuple[int, Then] | None = None
        self._is_closed = False

    def send(
        self, replica: int, step: int, own: FragmentInTransit, emulation: Emulation | None = None
    ) -> None:
        """Send a replica's message of a step round its ring, and gather the other messages.

        For each step, call this for all sending replicas of the host before `end`.
        """
        ring = self.topology.gatherings[self.topology.stage_of[replica]]
        gathering = Gathering(ring, replica, own.message)
        # Computed now, from 0 on: when the ring ends, `emulation` is in a later iteration.
        takes_s = emulation.averaging_end_s(ring.stage, 0.0) if emulation else 0.0
        part = _Part(step, own, gathering, takes_s)
        self._parts.append(part)
        self._loop.post(partial(self._begin, part))

    def end(self, step: int, local: jax.Array) -> Summed:
        """Contribute a step of this host; return the future sum of all hosts."""
        made = _LocalStep(step, local, Future())
        self._local_steps.append(made)
        self._loop.when_ready(local, partial(self._computed, made))
        return made.summed

    def when_committed(self, step: int, then: Then) -> None:
        """Call `then` once a step is committed, so that its messages may be applied.

        Call this again only after that.
        """
        self._awaited = step, then
        self._notify_commit()

    def wait_for(self, future: Future[T], step: int) -> T:
        """Return the result of a future that depends on the totals of a step.

        Raises:
            PeerTimeout: if nothing has arrived from other hosts within the deadline.
        """
        self._loop.begin()
        future.add_done_callback(lambda _: self._loop.post(lambda _: None))
        while not (future.done() or self._is_closed):
            self._loop.run_one(
                lambda: timeout_text(f"step {step}", self.waits(step), self._loop.deadline_s)
            )
        return future.result()

    def waits(self, step: int) -> Iterator[tuple[str, float]]:
        """Yield a description of each wait for the commit of a step, and its start time."""
        parts = [part for part in self._parts if part.step <= step]
        for part in sorted(parts, key=lambda part: part.step):
            ring = part.gathering.ring
            source = ring.nodes[part.gathering.position - 1]
            yield (
                f"the message of stage {ring.stage} sent after step {part.step} from "
                f"{self.topology.node_text(source)}",
                part.start_s,
            )
        if not parts:
            what = f"the commit of step {step} on {self.topology.others_text()}"
            yield what, self._loop.last_event_s

    def take_averagings(self) -> list[Averaging]:
        """Return the averagings that have ended since the last call."""
        done, self._averagings = self._averagings, []
        return done

    def close(self) -> None:
        """Take the last commits; the totals of all other steps raise `GenerationEnded`.

        The loop must not run any more.
        """
        self._is_closed = True
        self._take_commits()
        while self._local_steps:
            self._local_steps.popleft().summed.set_exception(GenerationEnded())

    def _begin(self, part: _Part, at_s: float) -> None:
        part.start_s = at_s

        def ended(ended_s: float) -> None:
            self._loop.at(ended_s + part.takes_s, partial(self._end_part, part))

        self._exchange.run_ring(part.gathering, part.step, ended)

    def _end_part(self, part: _Part, at_s: float) -> None:
        part.own.messages = part.gathering.messages()
        self._averagings.append(Averaging(part.gathering.ring.stage, part.start_s, at_s))
        self._parts.remove(part)
        self._contribute()

    def _computed(self, made: _LocalStep, _: float) -> None:
        made.is_computed = True
        self._contribute()

    def _contribute(self) -> None:
        """Contribute to the next step once its totals and all its messages are complete."""
        if not self._local_steps or self._contributed == self._local_steps[0].step:
            return
        made = self._local_steps[0]
        if not made.is_computed or any(part.step <= made.step for part in self._parts):
            return
        self._contributed = made.step

        def committed(sums: tuple[float, ...]) -> None:
            self._commits.put((made, sums))
            self._loop.post(lambda _: self._take_commits())

        self.group.contribute(made.step, np.asarray(made.local).tolist(), committed)

    def _take_commits(self) -> None:
        while not self._commits.empty():
            made, sums = self._commits.get()
            self._commit(made, np.asarray(sums, np.float32))

    def _commit(self, made: _LocalStep, summed: Float[np.ndarray, " all"]) -> None:
        self.committed_step = made.step
        self._local_steps.popleft()
        made.summed.set_result(summed)
        self._notify_commit()
        self._contribute()

    def _notify_commit(self) -> None:
        if self._awaited is not None and self._awaited[0] <= self.committed_step:
            (_, then), self._awaited = self._awaited, None
            self._loop.post(then)
