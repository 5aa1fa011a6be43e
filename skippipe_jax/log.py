"""Printed lines of a run: events on stderr, requested results on stdout.

Once `configure` has started the printing threads, a slow reader blocks no caller, such as the
heartbeat thread. Before, lines are printed at once, as notebooks and forked processes need it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from skippipe_sched.errors import LINES, printable

MAX_WAITING = 10_000
"""Maximum number of lines in the queue; further lines are dropped."""
FLUSH_S = 1.0
"""Seconds that an ending process waits for its last lines to be printed."""
SECONDS_BETWEEN_LINES = 10.0
"""Seconds between lines that report the progress of one activity without a terminal."""
LEVELS = ("info", "warning", "error")
CLEAR_BAR = "\r\x1b[K"
"""Control characters that clear a progress bar on the cursor's line; the next iteration draws it
again."""


class Stream:
    """Queue of lines for stdout or stderr."""

    def __init__(self, name: str, descriptor: int):
        """Print to `sys.NAME`; once a thread runs, to the descriptor."""
        self._name, self._descriptor = name, descriptor
        # `SimpleQueue.put` takes no lock, so a signal handler may print too.
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def _has_thread(self) -> bool:
        """True if a printing thread runs; in a forked process it does not."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread that prints from now on."""
        if not self._has_thread:
            name = f"skippipe-{self._name}"
            self._thread = threading.Thread(target=self._print, name=name, daemon=True)
            self._thread.start()

    def put(self, text: str) -> None:
        """Print a line, without control characters except line breaks and tabs."""
        line = f"{printable(text, kept=LINES)}\n"
        if self._has_thread:
            if self._waiting.qsize() < MAX_WAITING:
                clear = CLEAR_BAR if os.isatty(self._descriptor) else ""
                self._waiting.put(f"{clear}{line}".encode(errors="backslashreplace"))
            return
        stream = getattr(sys, self._name)
        with suppress(OSError):  # A full disk does not end the run.
            coding = stream.encoding or "utf-8"
            line = line.encode(coding, "backslashreplace").decode(coding)
            stream.write(f"{CLEAR_BAR if stream.isatty() else ''}{line}")
            stream.flush()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all lines are printed; return whether they are."""
        if not self._has_thread:
            return True
        is_printed = threading.Event()
        self._waiting.put(is_printed)
        return is_printed.wait(timeout_s)

    def _print(self) -> None:
        # Not through sys.stderr: a thread that hangs in it holds its lock.
        while True:
            line = self._waiting.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with suppress(OSError):  # The reader is gone; others may follow.
                while line:
                    line = line[os.write(self._descriptor, line) :]


STDOUT, STDERR = Stream("stdout", 1), Stream("stderr", 2)
_printed = frozenset(LEVELS)


def set_level(level: str) -> None:
    """Set the lowest level in `LEVELS` whose lines are printed on stderr."""
    global _printed
    _printed = frozenset(LEVELS[LEVELS.index(level) :])


def configure() -> None:
    """Start the threads that print from now on."""
    STDOUT.start()
    STDERR.start()
    atexit.register(drain, FLUSH_S)


def output(text: str) -> None:
    """Print a requested result on stdout."""
    STDOUT.put(text)


def info(text: str) -> None:
    """Print an event."""
    if "info" in _printed:
        STDERR.put(text)


def warning(text: str) -> None:
    """Print a possible problem that does not end the run."""
    if "warning" in _printed:
        STDERR.put(f"warning: {text}")


def error(text: str) -> None:
    """Print the reason for which this process ends."""
    STDERR.put(text)


def on_leader(rank: int, text: str, log_line: Callable[[str], None] = info) -> None:
    """Print a line that concerns all hosts, on the leader only."""
    if rank == 0:
        log_line(text)


def final_error(text: str, timeout_s: float = FLUSH_S) -> None:
    """Print the reason for which this process ends, before `os._exit` drops queued lines."""
    error(text)
    flush(timeout_s)


def drain(timeout_s: float) -> None:
    """Wait until all lines are printed, up to the timeout for each stream."""
    STDOUT.drain(timeout_s)
    STDERR.drain(timeout_s)


def flush(timeout_s: float = FLUSH_S) -> None:
    """Print all lines and flush the streams, in a thread because a reader may hang."""

    def write() -> None:
        drain(timeout_s)
        with suppress(OSError, ValueError):  # A closed stream has no reader to lose.
            sys.stdout.flush()
            sys.stderr.flush()

    flushing = threading.Thread(target=write, name="skippipe-flush", daemon=True)
    flushing.start()
    flushing.join(timeout_s)
