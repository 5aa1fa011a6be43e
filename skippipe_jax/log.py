"""Lines that a run prints: what happens on stderr, what was asked for on stdout.

A line is printed at once, as notebooks and forked processes need it, until `configure` starts the
threads that print. From then on no caller waits for a slow reader: the heartbeat thread goes on.
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
"""So many lines wait to be printed; more are dropped, as nobody reads them."""
FLUSH_S = 1.0
"""How long a process that ends waits for its last lines to be printed."""
LEVELS = ("info", "warning", "error")
CLEAR_BAR = "\r\x1b[K"
"""Clears a progress bar on the line of a terminal's cursor; the next iteration draws it again."""


class Stream:
    """The lines of stdout or stderr."""

    def __init__(self, name: str, descriptor: int):
        """Print by `sys.NAME`, and once there is a thread to the descriptor."""
        self._name, self._descriptor = name, descriptor
        # Its `put` takes no lock, so that a signal handler may print, too.
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def _has_thread(self) -> bool:
        """Whether a thread prints, which a process that was forked does not have."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Print in a thread from now on."""
        if not self._has_thread:
            name = f"skippipe-{self._name}"
            self._thread = threading.Thread(target=self._print, name=name, daemon=True)
            self._thread.start()

    def put(self, text: str) -> None:
        """Print a line, in which nothing but line breaks and tabs moves a terminal's cursor."""
        line = f"{printable(text, kept=LINES)}\n"
        if self._has_thread:
            if self._waiting.qsize() < MAX_WAITING:
                clear = CLEAR_BAR if os.isatty(self._descriptor) else ""
                self._waiting.put(f"{clear}{line}".encode(errors="backslashreplace"))
            return
        stream = getattr(sys, self._name)
        with suppress(OSError):  # What does not fit on a full disk ends no run.
            coding = stream.encoding or "utf-8"
            line = line.encode(coding, "backslashreplace").decode(coding)
            stream.write(f"{CLEAR_BAR if stream.isatty() else ''}{line}")
            stream.flush()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all lines are printed; returns whether they are."""
        if not self._has_thread:
            return True
        is_printed = threading.Event()
        self._waiting.put(is_printed)
        return is_printed.wait(timeout_s)

    def _print(self) -> None:
        # Not by sys.stderr, whose lock a thread may hold for ever that hangs in it.
        while True:
            line = self._waiting.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with suppress(OSError):  # Its reader has gone, and others may read the next one.
                while line:
                    line = line[os.write(self._descriptor, line) :]


STDOUT, STDERR = Stream("stdout", 1), Stream("stderr", 2)
_printed = frozenset(LEVELS)


def set_level(level: str) -> None:
    """Print lines of this level on stderr, and of those after it in `LEVELS`."""
    global _printed
    _printed = frozenset(LEVELS[LEVELS.index(level) :])


def configure() -> None:
    """Print in threads from now on."""
    STDOUT.start()
    STDERR.start()
    atexit.register(drain, FLUSH_S)


def output(text: str) -> None:
    """Print on stdout what was asked for."""
    STDOUT.put(text)


def info(text: str) -> None:
    """Print what happens."""
    if "info" in _printed:
        STDERR.put(text)


def warning(text: str) -> None:
    """Print what may be wrong, but ends nothing."""
    if "warning" in _printed:
        STDERR.put(f"warning: {text}")


def error(text: str) -> None:
    """Print why this process ends."""
    STDERR.put(text)


def on_leader(rank: int, text: str, tell: Callable[[str], None] = info) -> None:
    """Print what all hosts know, on the one that leads."""
    if rank == 0:
        tell(text)


def last_words(text: str, timeout_s: float = FLUSH_S) -> None:
    """Print why this process ends, before `os._exit` drops what waits."""
    error(text)
    flush(timeout_s)


def drain(timeout_s: float) -> None:
    """Wait until all lines are printed, but not for ever."""
    STDOUT.drain(timeout_s)
    STDERR.drain(timeout_s)


def flush(timeout_s: float = FLUSH_S) -> None:
    """Print all lines and whatever else was printed, in a thread, since a reader may hang."""

    def write() -> None:
        drain(timeout_s)
        with suppress(OSError, ValueError):  # A closed stream has no reader to lose.
            sys.stdout.flush()
            sys.stderr.flush()

    flushing = threading.Thread(target=write, name="skippipe-flush", daemon=True)
    flushing.start()
    flushing.join(timeout_s)
