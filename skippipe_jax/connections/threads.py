"""Threads for calls that may block forever, and waits of the main thread that signals interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SIGNAL_CHECK_S = 1.0
"""Longest single wait of the main thread. A signal interrupts only a wait that has begun: one that
arrives between Python's last check for signals and the wait is handled after the wait."""


def result(future: Future[T]) -> T:
    """Wait for the result of a future, and let the handlers of signals run meanwhile."""
    while not wait([future], SIGNAL_CHECK_S).done:
        pass
    return future.result()


def wait_for(changed: threading.Condition, predicate: Callable[[], T], timeout_s: float) -> T:
    """Do as `changed.wait_for`, and let the handlers of signals run meanwhile."""
    until_s = time.monotonic() + timeout_s
    while not (found := predicate()) and (left_s := until_s - time.monotonic()) > 0:
        changed.wait(min(left_s, SIGNAL_CHECK_S))
    return found


class DaemonThreads(Executor):
    """Executor with a daemon thread for each call; other executors delay the process's exit.

    Storage may hang. The event loop that sends this host's heartbeats must not wait for it.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a new thread; return the future of its result."""
        future: Future[T] = Future()
        # Else a waiter could cancel the future, and setting its result would raise.
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="skippipe-call", daemon=True).start()
        return future
