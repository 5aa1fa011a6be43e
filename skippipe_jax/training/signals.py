"""How SIGINT and SIGTERM are taken in while a run trains."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from skippipe_sched.errors import raise_terminated

T = TypeVar("T")

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(
    numbers: Sequence[signal.Signals] = STOPPING,
    when_received: Callable[[signal.Signals], None] = lambda _: None,
) -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM, or other signals, and tells of the first.

    A second one ends the program at once, as if it had come alone.

    Only a main thread gets signals: in another, nothing is collected.
    """
    received: list[signal.Signals] = []
    if not _is_main_thread():
        yield received
        return

    def receive(number: int, _: Any) -> None:
        if received and number == signal.SIGTERM:
            raise_terminated()  # Some schedulers send it when a grace begins, and when it ends.
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))
        when_received(received[0])

    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_interruptibly(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, and let SIGTERM cancel it as SIGINT does there.

    Within the event loop an exception could come to a task that nobody asks for it.
    """

    async def heeding() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "runs"
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(cancel, task))
        try:
            return await coroutine
        finally:
            signal.signal(signal.SIGTERM, raise_terminated)

    is_told = False

    def cancel(task: asyncio.Task[Any]) -> None:
        nonlocal is_told
        is_told = True
        task.cancel()

    if not _is_main_thread() or signal.getsignal(signal.SIGTERM) is not raise_terminated:
        return asyncio.run(coroutine)
    try:
        return asyncio.run(heeding())
    except asyncio.CancelledError:
        if is_told:
            raise_terminated()
        raise


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
