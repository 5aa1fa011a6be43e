"""Says what this host waits for, if that takes long."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skippipe_jax import log

FIRST_S, EACH_S = 10.0, 30.0
"""A host that waits says so after so many seconds, and then each time after so many more."""


@contextmanager
def telling(what: Callable[[float], str], timeout_s: float) -> Iterator[None]:
    """Print in the block, which waits for `timeout_s` seconds at most, what it waits for.

    `what` makes the line; it takes the seconds that are left, and is called in another thread.
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
    """Say in a few words why a connection was not made."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    if error.errno is None:
        return str(error) or "no answer"
    return os.strerror(error.errno).lower()
