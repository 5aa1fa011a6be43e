"""Log messages about long waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skippipe_jax import log

FIRST_S, EACH_S = 10.0, 30.0
"""Seconds before a wait is logged first, and between later messages about it."""


@contextmanager
def telling(what: Callable[[float], str], timeout_s: float) -> Iterator[None]:
    """Log what the block waits for, while it runs; it waits for at most `timeout_s` seconds.

    `what(left_s)` returns the message for the seconds left; it is called in another thread.
    """
    is_over, until_s = threading.Event(), time.monotonic() + timeout_s

    def tell() -> None:
        pause_s = FIRST_S
        while not is_over.wait(pause_s):
            log.info(what(max(0.0, until_s - time.monotonic())))
            pause_s = EACH_S

    threading.Thread(target=tell, name="skippipe-waiting", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def why_unreachable(error: OSError) -> str:
    """Describe in a few words why a connection failed."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    if error.errno is None:
        return str(error) or "no answer"
    return os.strerror(error.errno).lower()
