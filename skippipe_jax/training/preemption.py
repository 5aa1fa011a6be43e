"""SIGINT and SIGTERM to a host that trains: it stops the run, or leaves it to the others.

By SIGTERM it leaves a run that outlives its hosts, after the step that is under way or the next
one: what it alone holds the others take first. Where so many are told to leave that the rest could
not go on, the run ends instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from skippipe_sched.errors import raise_terminated

from skippipe_jax import log
from skippipe_jax.cluster.board import NOBODY
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE, exit_at_once, told_in_time
from skippipe_jax.cluster.membership import Membership

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Preemption:
    """Whether this host was told to stop or to leave, and what follows from it.

    Attributes:
        received: the signal that has come while it trains, if one has.
        must_stay: whether the run is ending: this host stays until the last checkpoint is saved.
    """

    def __init__(self, membership: Membership, grace_s: float):
        """After SIGTERM, this process exits within `grace_s` seconds."""
        self.received: signal.Signals | None = None
        self.must_stay = False
        # Alone, or within one JAX, no host can go without the others.
        self._can_leave = membership.count > 1 and not membership.is_distributed
        self._membership = membership
        self._grace_s = grace_s
        self._is_told = False

    @contextmanager
    def heeding(self, numbers: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
        """Take the first of these signals; a second one ends the program, as if it came alone.

        Only a main thread gets signals: in another, none is taken.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: Any) -> None:
            if self.received and number == signal.SIGTERM:
                raise_terminated()  # Some schedulers send it when a grace begins, and when it ends.
            if self.received:
                raise KeyboardInterrupt
            self.receive(signal.Signals(number))

        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def receive(self, number: signal.Signals) -> None:
        """Take a signal: only SIGTERM tells a host to leave."""
        self.received = number
        if number == signal.SIGTERM and self._can_leave:
            self._is_told = True
            self._membership.control.told_to_leave(self._grace_s, self._exit)

    def ends_the_run(self) -> bool:
        """Tell whether this host wants the run to end, after signals and what others were told."""
        if not self._can_leave:
            return self.received is not None
        is_asked = self.received not in (None, signal.SIGTERM)
        return is_asked or self._membership.control.is_the_end

    def has_left(self) -> bool:
        """Tell whether the others do without this host, as it was told; then no grace ends it."""
        left = self._is_told and self._membership.generation_number == NOBODY
        self.must_stay = self.must_stay or left
        return left

    def _exit(self) -> None:
        """Exit although the others have not gone on: whoever preempts this host will not wait."""
        if self.must_stay or self._membership.control.is_the_end:
            return
        log.error(
            f"host {self._membership.index} was told to leave, and the others have not gone on "
            f"without it within cluster.grace_s = {self._grace_s:g} s: it goes, and is lost to "
            f"them. {told_in_time(self._membership.last_words, LOST_HOST_EXIT_CODE)}"
        )
        exit_at_once(LOST_HOST_EXIT_CODE)
