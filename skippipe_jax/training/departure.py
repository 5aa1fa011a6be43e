"""SIGTERM to a host of a run that outlives its hosts: it leaves, and the others go on without it.

What it alone holds the others take first. So it leaves after the step that is under way, or after
the next one. Where so many are told to leave that the rest could not go on, the run ends instead.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from skippipe_jax.cluster.board import NOBODY
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE, exit_at_once, told_in_time
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.connections.links import say


class HasLeft(Exception):
    """This host was told to leave, and the others go on without it."""


class Departure:
    """Whether this host was told to leave, and what follows from it.

    Attributes:
        is_too_late: whether the run ends anyway, for which this host stays.
    """

    def __init__(self, membership: Membership, grace_s: float):
        """Stay; once told to leave, for `grace_s` seconds at most."""
        self.is_too_late = False
        # Alone, or within one JAX, no host can go without the others.
        self._can_leave = membership.count > 1 and not membership.is_distributed
        self._membership = membership
        self._grace_s = grace_s
        self._is_told = False

    def receive(self, number: signal.Signals) -> None:
        """A signal has come, whose handler calls this: only SIGTERM tells a host to leave."""
        if number == signal.SIGTERM and self._can_leave:
            self._is_told = True
            self._membership.control.told_to_leave(self._grace_s, self._goes)

    def ends_the_run(self, received: Sequence[signal.Signals]) -> bool:
        """Whether this host wants the run to end, after these signals and what others were told."""
        if not self._can_leave:
            return bool(received)
        is_asked = any(number != signal.SIGTERM for number in received)
        return is_asked or self._membership.control.is_the_end

    def require_stays(self) -> None:
        """Raise `HasLeft` if the others do without this host, as it was told to leave."""
        if self._is_told and self._membership.generation == NOBODY:
            self.is_too_late = True
            raise HasLeft

    def _goes(self) -> None:
        """Go, ready or not: whoever has told this host to leave will not wait for ever."""
        if self.is_too_late or self._membership.control.is_the_end:
            return
        say(
            f"host {self._membership.index} was told to leave, and the others have not gone on "
            f"without it within cluster.grace_s = {self._grace_s:g} s: it goes, and is lost to "
            f"them. {told_in_time(self._membership.last_words, LOST_HOST_EXIT_CODE)}"
        )
        exit_at_once(LOST_HOST_EXIT_CODE)
