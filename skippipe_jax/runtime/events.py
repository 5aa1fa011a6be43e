"""What happens on a host, one event after another, in the thread that asks for it.

A thread waits for each array that is on its way or being computed, and puts what has to follow into
a queue; all else happens in the thread that takes it out. Nothing is waited for longer than the
deadline. The loop outlives an iteration.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import jax

from skippipe_jax.errors import PeerTimeout

Then = Callable[[float], None]
"""Called with the moment at which it was its turn."""


class EventLoop:
    """Events in the order in which they happen. Times are of `time.perf_counter` [s].

    Attributes:
        last_event_s: when the event that was taken last happened.
        events: how many have been taken.
    """

    def __init__(self, deadline_s: float):
        """Allow `deadline_s` between two events, unless something is computed here."""
        self.deadline_s = deadline_s
        self.last_event_s = time.perf_counter()
        self.events = 0
        self._computing, self._is_waiting = 0, False
        self._happened: queue.SimpleQueue[tuple[float, Then]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Then]] = []
        self._timer_count = itertools.count()

    def at(self, time_s: float, then: Then) -> None:
        """Call `then` at a moment, or as soon as possible after it."""
        heapq.heappush(self._timers, (time_s, next(self._timer_count), then))

    def post(self, then: Then) -> None:
        """Call `then` in its turn. Any thread may call this."""
        self._happened.put((time.perf_counter(), then))

    @property
    def is_at_work(self) -> bool:
        """Whether an event is handled, or something is computed here. Any thread may ask."""
        return self._computing > 0 or not self._is_waiting

    def when_computed(self, array: jax.Array, then: Then) -> None:
        """Call `then` once an array is there that this host computes, as `when_ready` does."""

        def computed(at_s: float) -> None:
            self._computing -= 1
            then(at_s)

        self._computing += 1
        self.when_ready(array, computed)

    def when_ready(self, array: jax.Array, then: Then) -> None:
        """Call `then` once an array is there; an error that comes in its place is raised."""
        self.when_done(array.block_until_ready, then)

    def when_done(self, work: Callable[[], object], then: Then) -> None:
        """Do some work in a thread of its own, and call `then`; an error in the work is raised."""

        def raise_error(error: Exception, _: float) -> None:
            raise error

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.post(partial(raise_error, error))
            else:
                self.post(then)

        threading.Thread(target=run, name="skippipe-wait", daemon=True).start()

    def begin(self) -> None:
        """Count the deadline from now on."""
        self.last_event_s = time.perf_counter()

    def run_one(self, what_is_waited_for: Callable[[], str | None]) -> None:
        """Wait for the next event and do what follows.

        Raises:
            PeerTimeout: if none came in time, with what is waited for. That is None while
                something is computed here, which may take as long as it likes.
        """
        self.last_event_s, then = self._next(what_is_waited_for)
        self.events += 1
        then(self.last_event_s)

    def _next(self, what_is_waited_for: Callable[[], str | None]) -> tuple[float, Then]:
        while True:
            now = time.perf_counter()
            if self._timers and self._timers[0][0] <= now:
                at_s, _, then = heapq.heappop(self._timers)
                return at_s, then
            deadline = self.last_event_s + self.deadline_s
            # What has come counts, however late this thread looks: the host may have slept.
            is_late = now > deadline and self._happened.empty()
            if is_late and (waits := what_is_waited_for()) is not None:
                raise PeerTimeout(waits)
            until = min([max(deadline, now + 1.0), *(entry[0] for entry in self._timers[:1])])
            self._is_waiting = True
            try:
                return self._happened.get(timeout=max(0.0, until - now))
            except queue.Empty:
                continue
            finally:
                self._is_waiting = False


def seconds_since(moment_s: float) -> float:
    """Return how long ago a moment of `time.perf_counter` is."""
    return time.perf_counter() - moment_s
