"""Event loop of a host, run by the thread of the caller.

For each array in transit or in computation, a helper thread waits and then queues a callback; the
thread that runs the loop calls all callbacks. No wait exceeds the deadline. A loop is used for many
iterations.
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
from jaxtyping import PyTree

from skippipe_jax.connections.threads import SIGNAL_CHECK_S
from skippipe_jax.errors import TransferTimeout

Then = Callable[[float], None]
"""Callback with the time of its event."""


class EventLoop:
    """Queue of events in the order of their times, which are of `time.perf_counter` [s].

    Attributes:
        waits: whether the loop waits for arrays; otherwise they count as ready once dispatched.
        last_event_s: time of the last handled event.
        events: number of handled events.
    """

    def __init__(self, deadline_s: float, *, waits: bool = True):
        """Allow `deadline_s` between two events, unless this host computes."""
        self.deadline_s = deadline_s
        self.waits = waits
        self.last_event_s = time.perf_counter()
        self.events = 0
        self._computing, self._is_waiting = 0, False
        self._happened: queue.SimpleQueue[tuple[float, Then]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Then]] = []
        self._timer_count = itertools.count()

    def at(self, time_s: float, then: Then) -> None:
        """Call `then` at a given time, or as soon as possible after it."""
        heapq.heappush(self._timers, (time_s, next(self._timer_count), then))

    def post(self, then: Then) -> None:
        """Queue `then` as an event of now. Any thread may call this."""
        self._happened.put((time.perf_counter(), then))

    @property
    def is_at_work(self) -> bool:
        """True while an event is handled, or this host computes. Any thread may read this."""
        return self._computing > 0 or not self._is_waiting

    @property
    def has_events(self) -> bool:
        """True if an event is due, or will be at a known time."""
        return bool(self._timers) or not self._happened.empty()

    def when_computed(self, array: jax.Array, then: Then) -> None:
        """Call `then` once an array that this host computes is ready, as `when_ready` does."""

        def computed(at_s: float) -> None:
            self._computing -= 1
            then(at_s)

        self._computing += 1
        self.when_ready(array, computed)

    def when_ready(self, arrays: PyTree, then: Then) -> None:
        """Call `then` once arrays are ready; an error of one is raised in the loop."""
        if self.waits:
            self.when_done(partial(jax.block_until_ready, arrays), then)
        else:
            self.post(then)

    def when_done(self, work: Callable[[], object], then: Then) -> None:
        """Run `work` in a new thread, then call `then`; an error is raised in the loop."""

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
        """Restart the deadline."""
        self.last_event_s = time.perf_counter()

    def run_one(self, describe_waits: Callable[[], str | None]) -> None:
        """Wait for the next event and call its callback.

        Raises:
            TransferTimeout: if there was none within the deadline, with the message of
                `describe_waits`. If that returns None, as while this host computes, the
                wait continues without a limit.
        """
        self.last_event_s, then = self._next(describe_waits)
        self.events += 1
        then(self.last_event_s)

    def _next(self, describe_waits: Callable[[], str | None]) -> tuple[float, Then]:
        while True:
            now = time.perf_counter()
            if self._timers and self._timers[0][0] <= now:
                at_s, _, then = heapq.heappop(self._timers)
                return at_s, then
            # Queued events are handled even after the deadline: the host may have been suspended.
            if not self._happened.empty():
                return self._happened.get()
            is_late = now > self.last_event_s + self.deadline_s
            if is_late and (waits := describe_waits()) is not None:
                raise TransferTimeout(waits)
            until = min([now + SIGNAL_CHECK_S, *(entry[0] for entry in self._timers[:1])])
            self._is_waiting = True
            try:
                return self._happened.get(timeout=max(0.0, until - now))
            except queue.Empty:
                continue
            finally:
                self._is_waiting = False


def seconds_since(moment_s: float) -> float:
    """Return the seconds since a time of `time.perf_counter`."""
    return time.perf_counter() - moment_s
