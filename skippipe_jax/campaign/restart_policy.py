"""Restart policy of processes: whether and when an ended process is restarted."""

from __future__ import annotations

import signal

from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, TEMPORARY_EXIT_CODE

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses in seconds before restarts: the first, doubled each time, up to the longest."""

SETTLED_S = 60.0
"""Lifetime in seconds after which the next pause is the first again."""

MOST_FAULTS = 5
"""Maximum number of restarts after faults of the process itself."""

FORGOTTEN_S = 3600.0
"""Lifetime in seconds that cancels one fault."""

HAS_LEFT = 128 + signal.SIGTERM
"""Exit code of a host that left; the others continue without it or have ended too."""

FOR_GOOD = (0, INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, HAS_LEFT)
"""Exit codes without a restart: done, would fail again, or told to stop."""


class RestartPolicy:
    """Counter of the faults of one process, which decides how soon it is restarted."""

    def __init__(self, most: int = MOST_FAULTS) -> None:
        """Allow `most` restarts after faults of the process itself."""
        self._most = most
        self._last_s = 0.0
        self._faults = 0

    def pause_s(self, code: int, lived_s: float, *, misses_others: bool) -> float | None:
        """Return the seconds until the process is restarted; None if it is not.

        Args:
            code: its exit code, or minus the signal that ended it.
            lived_s: its lifetime in seconds.
            misses_others: whether another process has ended for good, so that exit code 75 counts
                as a fault: the remaining processes may be too few.
        """
        if shell_exit_code(code) in FOR_GOOD:
            return None
        self._faults = max(0, self._faults - int(lived_s // FORGOTTEN_S))
        if code > 0 and (misses_others or code != TEMPORARY_EXIT_CODE):
            self._faults += 1
            if self._faults > self._most:
                return None
        grown_s = 0.0 if lived_s >= SETTLED_S else min(2 * self._last_s, LONGEST_PAUSE_S)
        self._last_s = max(FIRST_PAUSE_S, grown_s)
        return self._last_s


def shell_exit_code(code: int) -> int:
    """Return the exit code as in a shell: 128 plus the number of the signal that ended it."""
    return code if code >= 0 else 128 - code
