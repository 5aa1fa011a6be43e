"""Clock that tests can replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time, in seconds."""

    def now(self) -> float:
        """Return the seconds since an arbitrary moment; they never decrease."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait for this number of seconds."""
        ...


class SystemClock:
    """Monotonic clock of the system."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = SystemClock()
