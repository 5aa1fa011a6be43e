"""Nobody waits for ever for a thread that hangs, nor does the end of a process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from skippipe_jax.cluster import membership
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections import threads
from skippipe_jax.connections.threads import DaemonThreads, result, wait_for
from skippipe_jax.errors import PeerTimeout


def test_a_process_ends_whose_calls_hang():
    program = """
import threading
from skippipe_jax.connections.threads import DaemonThreads
DaemonThreads().submit(threading.Event().wait)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_a_wait_that_is_cancelled_leaves_no_error(monkeypatch: pytest.MonkeyPatch):
    errors, called, goes_on = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def call() -> None:
        called.append(threading.current_thread())
        goes_on.wait()

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(loop.run_in_executor(DaemonThreads(), call), 0.05)

    asyncio.run(wait())
    goes_on.set()
    called[0].join()
    assert errors == []


def test_who_asks_an_event_loop_that_hangs_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "ANSWERS_S", 0.05)
    host = Membership(ClusterConfig(), 1, 3)
    host._loop = asyncio.new_event_loop()  # It does not run.

    async def answer() -> None: ...

    asked = answer()
    with pytest.raises(PeerTimeout, match=r"has not answered for 0\.05 s"):
        host._done(asked)
    asked.close()
    host._loop.close()


class Interrupted(Exception):
    """Raised by a signal's handler."""


def wait_for_a_change() -> None:
    changed = threading.Condition()
    with changed:
        wait_for(changed, bool, 30.0)


@pytest.mark.parametrize("waits", [lambda: result(Future()), wait_for_a_change])
def test_a_signal_that_does_not_interrupt_a_wait_is_handled_soon(
    waits: Callable[[], object], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(threads, "SIGNAL_CHECK_S", 0.2)

    def handle(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)

    def send() -> None:
        time.sleep(0.1)
        # Delivered to this thread, it does not interrupt the wait of the main thread.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(Interrupted):
            waits()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
