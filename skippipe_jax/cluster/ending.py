"""How a process ends that cannot go on without the others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

LOST_HOST_EXIT_CODE = 75
"""With this code a process ends because another host was lost, or it waited too long for something
(EX_TEMPFAIL: run it again)."""

LINGER_S = 2.0
"""How long a process that must end waits for others to read why."""


def exit_at_once(code: int) -> NoReturn:
    """End the process at once, with what it has printed but not what it is waiting for."""
    try:
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(LINGER_S / 2)
    finally:
        os._exit(code)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stream has no reader to lose
        sys.stdout.flush()
        sys.stderr.flush()
