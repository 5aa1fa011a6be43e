"""What SIGINT and SIGTERM do: end a run after a last checkpoint, and its planning at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM; a second one ends the program at once.

    Only a main thread gets signals: in another, nothing is collected.
    """
    received: list[signal.Signals] = []
    if not _is_main_thread():
        yield received
        return

    def receive(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_that_end() -> Iterator[None]:
    """Let Ctrl-C end the program at once, without the exception that is its usual way.

    numba compiles the search by callbacks from C, in which exceptions get lost.
    """
    if not (_is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
