"""Watchdog of the training thread: a host whose training hangs exits, and the others continue.

Its heartbeats continue, so without the watchdog the others would wait until `network.deadline_s`
ends the run. A host that only waits for others does not hang: it hangs if the thread is at work on
an event or a computation without progress. Silence is counted in polls, so that a suspended process
does not time out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skippipe_jax.runtime.events import EventLoop

POLL_S = 1.0
"""Seconds between two checks of the training thread."""

MAX_SLOWDOWN = 20.0
"""Limit without progress, as a multiple of an iteration's duration."""

MIN_LIMIT_S = 60.0
"""Lower bound of the limit in seconds; the upper bound is `MAX_SHARE` of `network.deadline_s`."""

MAX_SHARE = 0.8


class Watchdog:
    """Watchdog of a host's iterations, in a thread of its own."""

    def __init__(
        self,
        loop: EventLoop,
        planned_s: float,
        deadline_s: float,
        on_hang: Callable[[str], object],
        poll_s: float = POLL_S,
    ):
        """Check every `poll_s` seconds; call `on_hang` once, with a sentence, from that thread.

        `loop` runs the iterations, each of which takes `planned_s` seconds by the plan.
        """
        self._loop, self._on_hang, self._poll_s = loop, on_hang, poll_s
        self._longest_s, self._most_s = planned_s, MAX_SHARE * deadline_s
        # The first iteration has no limit, as devices load programs in it.
        self._iterations, self._is_iterating = 0, False
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="skippipe-watchdog", daemon=True).start()

    @property
    def limit_s(self) -> float:
        """Seconds that an iteration may make no progress."""
        return min(max(MIN_LIMIT_S, MAX_SLOWDOWN * self._longest_s), self._most_s)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Watch the iteration that runs in the block."""
        began_s = time.monotonic()
        self._is_iterating = self._iterations > 0
        try:
            yield
        finally:
            if self._is_iterating:
                self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            self._is_iterating = False
            self._iterations += 1

    def close(self) -> None:
        """Stop watching."""
        self._is_closed.set()

    def _watch(self) -> None:
        silent_s, before = 0.0, None
        while not self._is_closed.wait(self._poll_s):
            now = self._iterations, self._loop.events
            is_stuck = self._is_iterating and self._loop.is_at_work and now == before
            silent_s, before = silent_s + self._poll_s if is_stuck else 0.0, now
            if silent_s > self.limit_s:
                self._on_hang(f"its training thread has made no progress for {silent_s:.0f} s")
                return
