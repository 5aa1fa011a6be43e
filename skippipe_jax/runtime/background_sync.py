"""Background communication of `outer` mode, in a separate thread.

The messages of replicas pass round the rings of their stages, and totals are summed over all hosts,
while the host computes, validates or saves. A step is committed once all hosts have made it and
have received all messages sent after it. Only then may a host apply these messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jaxtyping import Float
from skippipe_sched.timing.timeline import Averaging

from skippipe_jax.cluster.membership import Group
from skippipe_jax.errors import GenerationEnded, PeerTimeout
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import EventLoop, Then, seconds_since
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.iteration import timeout_text
from skippipe_jax.runtime.ring import Gathering
from skippipe_jax.runtime.state import FragmentInTransit

T = TypeVar("T")
# Interval at which a waiting thread checks for errors and for the deadline.
CHECK_INTERVAL_S = 1.0
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
    since_s: float = field(default_factory=time.perf_counter)
    start_s: float = 0.0


class BackgroundSync:
    """Background thread that gathers messages and sums totals.

    One other thread calls the public methods.

    Attributes:
        topology: assignment of nodes, replicas and devices to hosts.
        group: the hosts that commit steps together.
        committed_step: the last committed step that this host has been notified of.
    """

    def __init__(
        self,
        exchange: Exchange,
        group: Group,
        step: int,
    ):
        """Begin after `step`, which is committed, with the links of `exchange`."""
        self.committed_step = step
        self.group = group
        self.topology, self._post = exchange.topology, exchange.loop.post
        # The loop itself has no deadline: `wait_for` and the iterations check it.
        self._deadline_s = exchange.loop.deadline_s
        self._loop = EventLoop(deadline_s=0.0)
        self._exchange = Exchange(self._loop, exchange.topology, exchange.links)
        self._local_steps: deque[_LocalStep] = deque()
        self._contributed = step
        # Of unfinished rings.
        self._parts: list[_Part] = []
        self._averagings: list[Averaging] = []
        self._error: Exception | None = None
        self._has_ended = False
        self._when_committed: list[tuple[int, Then]] = []
        # Guards the fields that both threads use.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="skippipe-behind", daemon=True)
        self._thread.start()

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
        with self._lock:
            self._parts.append(part)
        self._loop.post(partial(self._begin, part))

    def end(self, step: int, local: jax.Array) -> Summed:
        """Contribute a step of this host; return the future sum of all hosts."""
        made = _LocalStep(step, local, Future())
        with self._lock:
            if self._has_ended:
                made.summed.set_exception(GenerationEnded())
                return made.summed
            self._local_steps.append(made)
        self._loop.post(lambda _: self._loop.when_ready(local, partial(self._computed, made)))
        return made.summed

    def when_committed(self, step: int, then: Then) -> None:
        """Call `then` once a step is committed, so that its messages may be applied."""
        with self._lock:
            self._when_committed.append((step, then))
        self._notify_commits()

    def wait_for(self, future: Future[T], step: int) -> T:
        """Return the result of a future that depends on the totals of a step.

        Raises:
            PeerTimeout: if nothing has arrived from other hosts within the deadline.
        """
        since_s = time.perf_counter()
        while not future.done():
            wait([future], CHECK_INTERVAL_S)
            if self._error is not None and not (self._has_ended or future.done()):
                raise self._error
            if seconds_since(max(since_s, self._loop.last_event_s)) > self._deadline_s:
                operation = f"step {step}"
                raise PeerTimeout(timeout_text(operation, self.waits(step), self._deadline_s))
        return future.result()

    def waits(self, step: int) -> Iterator[tuple[str, float]]:
        """Yield a description of each wait for the commit of a step, and its start time."""
        with self._lock:
            hosts = self.topology.host_of
            parts = [part for part in self._parts if part.step <= step]
            for part in sorted(parts, key=lambda part: part.step):
                ring = part.gathering.ring
                source = ring.nodes[part.gathering.position - 1]
                yield (
                    f"the message of stage {ring.stage} sent after step {part.step} from node "
                    f"{source} on host {hosts[source]}",
                    part.since_s,
                )
            if not parts:
                others = [str(host) for host in self.topology.hosts if host != self.topology.host]
                yield (
                    f"the commit of step {step} on host {', '.join(others)}",
                    self._loop.last_event_s,
                )

    @property
    def last_event_s(self) -> float:
        """Time of the last event of the background loop."""
        return self._loop.last_event_s

    def at(self, time_s: float, then: Then) -> None:
        """Call `then` in the background thread at a given time."""
        self._loop.post(lambda _: self._loop.at(time_s, then))

    def take_averagings(self) -> list[Averaging]:
        """Return the averagings that have ended since the last call."""
        with self._lock:
            done, self._averagings = self._averagings, []
            return done

    def stop(self) -> None:
        """Stop the thread; pending totals raise `GenerationEnded`."""
        self._loop.post(_end)

    def close(self) -> None:
        """Stop the thread and join it."""
        self.stop()
        self._thread.join()

    # The methods below run in the background thread.

    def _run(self) -> None:
        while True:
            try:
                self._loop.run_one(lambda: None)
            except GenerationEnded as error:
                with self._lock:
                    self._has_ended, made = True, [*self._local_steps]
                for own in made:
                    own.summed.set_exception(error)
                return
            except Exception as error:
                # The thread continues, as a step that all hosts have made may still be committed.
                self._error = error
                self._post(partial(_raise, error))

    def _begin(self, part: _Part, at_s: float) -> None:
        part.start_s = at_s

        def ended(ended_s: float) -> None:
            self._loop.at(ended_s + part.takes_s, partial(self._end_part, part))

        self._exchange.run_ring(part.gathering, part.step, ended)

    def _end_part(self, part: _Part, at_s: float) -> None:
        part.own.messages = part.gathering.messages()
        with self._lock:
            self._averagings.append(Averaging(part.gathering.ring.stage, part.start_s, at_s))
            self._parts.remove(part)
        self._contribute()

    def _computed(self, made: _LocalStep, _: float) -> None:
        made.is_computed = True
        self._contribute()

    def _contribute(self) -> None:
        """Contribute to the next step once its totals and all its messages are complete."""
        with self._lock:
            if not self._local_steps or self._contributed == self._local_steps[0].step:
                return
            made = self._local_steps[0]
            lacks = any(part.step <= made.step for part in self._parts)
            if lacks or not made.is_computed:
                return
            self._contributed = made.step

        def committed(sums: tuple[float, ...]) -> None:
            summed = np.asarray(sums, np.float32)
            self._loop.post(lambda _: self._commit(made, summed))

        self.group.contribute(made.step, np.asarray(made.local).tolist(), committed)

    def _commit(self, made: _LocalStep, summed: Float[np.ndarray, " all"]) -> None:
        with self._lock:
            self.committed_step = made.step
            self._local_steps.popleft()
        made.summed.set_result(summed)
        self._notify_commits()
        self._contribute()

    def _notify_commits(self) -> None:
        with self._lock:
            waiting, self._when_committed = self._when_committed, []
            for step, then in waiting:
                if step <= self.committed_step:
                    self._post(then)
                else:
                    self._when_committed.append((step, then))


def _raise(error: Exception, _: float) -> NoReturn:
    raise error


def _end(_: float) -> NoReturn:
    raise GenerationEnded
