"""Calls that may block for ever, in threads that keep neither an event loop nor a process.

Storage may hang. The event loop that shows the others that this host lives does not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """A thread for each call: those of other executors are waited for when the process ends."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call it."""
        future: Future[T] = Future()
        # Or whoever waits could cancel it, and its result could not be set.
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
