"""A host whose training thread hangs exits, so that the others can go on without it.

Its heartbeat thread goes on, so they would wait for it until `network.deadline_s` ends the run. A
host that only waits for others does not hang: the thread handles an event, or something is computed
here, and nothing comes of it. Silence is counted in polls, so that a suspended process does not
time out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skippipe_jax.runtime.events import EventLoop

POLL_S = 1.0
"""How often a host checks whether its training thread makes progress."""

MAX_SLOWDOWN = 20.0
"""A training thread may take so many times an iteration without progress."""

MIN_LIMIT_S = 60.0
"""It may take so long at least, and `MAX_SHARE` of `network.deadline_s` at most."""

MAX_SHARE = 0.8


class Watchdog:
    """Watches the iterations of a host, beside the thread that runs them."""

    def __init__(
        self,
        loop: EventLoop,
        planned_s: float,
        deadline_s: float,
        on_hang: Callable[[str], object],
        poll_s: float = POLL_S,
    ):
        """Check every `poll_s`; call `on_hang` once, with a sentence, from another thread.

        `loop` is that of the iterations, of which the plan says that each takes `planned_s`.
        """
        self._loop, self._on_hang, self._poll_s = loop, on_hang, poll_s
        self._longest_s, self._most_s = planned_s, MAX_SHARE * deadline_s
        # In the first one devices load programs, which may take as long as it likes.
        self._iterations, self._is_iterating = 0, False
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="skippipe-watchdog", daemon=True).start()

    @property
    def limit_s(self) -> float:
        """Return how long an iteration may make no progress."""
        return min(max(MIN_LIMIT_S, MAX_SLOWDOWN * self._longest_s), self._most_s)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Watch what is done in the block."""
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
        """Watch no more."""
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
