"""Executor for calls that may block forever, without blocking an event loop or process exit.

Storage may hang. The event loop that sends this host's heartbeats must not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Executor with a daemon thread for each call; other executors delay the process's exit."""

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
