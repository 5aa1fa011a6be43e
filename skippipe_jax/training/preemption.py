"""SIGINT and SIGTERM during training: the host stops the run, or leaves it.

On SIGTERM a host leaves an elastic run after the current or the next step, once its state has been
transferred to others where it is the only owner. If too many hosts are told to leave for the rest
to continue, the run ends instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from skippipe_sched.errors import raise_terminated

from skippipe_jax import log
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE, exit_at_once, resume_hint_in_time
from skippipe_jax.cluster.inbox import NOBODY
from skippipe_jax.cluster.membership import Membership

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Preemption:
    """Handler of the signals that tell this host to stop or to leave.

    Attributes:
        received: the signal received during training; None without one.
        must_stay: whether the run is ending, so that this host stays until the last checkpoint is
            saved.
    """

    def __init__(self, membership: Membership, grace_s: float):
        """Store the grace: after SIGTERM, this process exits within `grace_s` seconds."""
        self.received: signal.Signals | None = None
        self.must_stay = False
        # A single host, or hosts in `distributed` mode, cannot leave.
        self._can_leave = membership.count > 1 and not membership.is_distributed
        self._membership = membership
        self._grace_s = grace_s
        self._is_leaving = False

    @contextmanager
    def handling(self, numbers: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
        """Handle the first of these signals; a second one ends the program as without a handler.

        Only the main thread receives signals: in any other thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: Any) -> None:
            if self.received and number == signal.SIGTERM:
                raise_terminated()  # Some schedulers send it at the start and end of a grace.
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
        """Record a signal; SIGTERM makes a host leave if it can."""
        self.received = number
        if number == signal.SIGTERM and self._can_leave:
            self._is_leaving = True
            self._membership.control.start_leaving(self._grace_s, self._exit)

    def votes_to_end(self) -> bool:
        """Return whether this host votes to end the run, given its signals and those of others."""
        if not self._can_leave:
            return self.received is not None
        is_asked = self.received not in (None, signal.SIGTERM)
        return is_asked or self._membership.control.is_the_end

    def has_left(self) -> bool:
        """Return whether the others continue without this host; then its grace has no effect."""
        left = self._is_leaving and self._membership.generation_number == NOBODY
        self.must_stay = self.must_stay or left
        return left

    def _exit(self) -> None:
        """Exit although the others have not continued, as the preemption does not wait."""
        if self.must_stay or self._membership.control.is_the_end:
            return
        log.error(
            f"host {self._membership.index}: graceful leave exceeded cluster.grace_s = "
            f"{self._grace_s:g} s; exiting, the others will see a failure. "
            f"{resume_hint_in_time(self._membership.resume_hint, LOST_HOST_EXIT_CODE)}"
        )
        exit_at_once(LOST_HOST_EXIT_CODE)
