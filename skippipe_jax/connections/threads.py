"""Calls that may block for ever, in threads that keep neither an event loop nor a process.

Storage may hang, and so may whoever reads what this process prints. The event loop that shows the
others that this host lives waits for neither.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST_LINES = 10_000
"""So many lines wait to be printed; more are dropped, as nobody reads them."""

DRAINED_S = 1.0
"""How long a process that ends waits for what it has said to be printed."""


class DaemonThreads(Executor):
    """A thread for each call: those of other executors are waited for when the process ends."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call it."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="skippipe-call", daemon=True).start()
        return future


class Lines:
    """Prints lines to a descriptor: at once, or once it has begun in a thread of its own."""

    def __init__(self, descriptor: int):
        """Print at once."""
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_LINES)
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Print in a thread from now on, so that nobody waits for who reads it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._print, name="skippipe-say", daemon=True)
            self._thread.start()
            atexit.register(self.drain, DRAINED_S)

    def put(self, line: bytes) -> None:
        """Print a line. A process that was forked has not the thread, and prints at once."""
        if self._thread is None or not self._thread.is_alive():
            os.write(self._descriptor, line)
            return
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            return  # Nobody has read the last ones.

    def drain(self, timeout_s: float) -> bool:
        """Wait until all lines are printed; whether they are."""
        done = self._waiting.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._waiting.unfinished_tasks, timeout_s)

    def _print(self) -> None:
        while True:
            line: Any = self._waiting.get()
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:  # Its reader has gone, and others may read the next one.
                pass
            finally:
                self._waiting.task_done()


STDERR = Lines(2)
