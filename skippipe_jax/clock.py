"""A clock that tests can replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time, in seconds."""

    def now(self) -> float:
        """Return the seconds since some moment; they never go back."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


class SystemClock:
    """The clock of the system."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = SystemClock()
