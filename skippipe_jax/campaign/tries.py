"""When a process is started again that has ended, and how often."""

from __future__ import annotations

import signal

from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TRY_AGAIN_EXIT_CODE,
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""So long a process is waited with that is to be started again: each time twice as long."""

SETTLED_S = 60.0
"""Once it has lived for so long, its next pause is as short as the first."""

MOST_FAULTS = 5
"""So often one is started again that has ended by a fault of its own."""

FORGOTTEN_S = 3600.0
"""For each time that it has lived for so long, one of its faults is forgotten."""

HAS_LEFT = 128 + signal.SIGTERM
"""So a host ends that was told to leave: the others go on without it, or have ended as it has."""

FOR_GOOD = (0, INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, HAS_LEFT)
"""After these it is not: it has done its work, would end so again, or was told to stop."""


class Tries:
    """Says of one process whether it is started again once it has ended, and how soon."""

    def __init__(self, most: int = MOST_FAULTS) -> None:
        """It has not been started again yet; that is done after `most` faults at most."""
        self._most = most
        self._last_s = 0.0
        self._faults = 0

    def pause_s(self, code: int, lived_s: float, *, misses_others: bool) -> float | None:
        """How many seconds later it is started again; None if it is not.

        Args:
            code: by which it has ended, or minus the signal that has ended it.
            lived_s: how long it has lived.
            misses_others: whether another stays away for good, so that 75 counts as a fault:
                without it the rest may be too few.
        """
        if as_of_a_shell(code) in FOR_GOOD:
            return None
        self._faults = max(0, self._faults - int(lived_s // FORGOTTEN_S))
        if code > 0 and (misses_others or code != TRY_AGAIN_EXIT_CODE):
            self._faults += 1
            if self._faults > self._most:
                return None
        grown_s = 0.0 if lived_s >= SETTLED_S else min(2 * self._last_s, LONGEST_PAUSE_S)
        self._last_s = max(FIRST_PAUSE_S, grown_s)
        return self._last_s


def as_of_a_shell(code: int) -> int:
    """An exit code, of a process that a signal has ended as a shell has it."""
    return code if code >= 0 else 128 - code
