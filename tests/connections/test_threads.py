"""Nobody waits for ever for a thread that hangs, nor does the end of a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from skippipe_jax.cluster import membership
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.errors import PeerTimeout


def test_a_process_ends_whose_calls_hang():
    program = """
import threading
from skippipe_jax.connections.threads import DaemonThreads
DaemonThreads().submit(threading.Event().wait)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_a_wait_that_is_cancelled_leaves_no_error(monkeypatch: pytest.MonkeyPatch):
    errors, threads, goes_on = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def call() -> None:
        threads.append(threading.current_thread())
        goes_on.wait()

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(loop.run_in_executor(DaemonThreads(), call), 0.05)

    asyncio.run(wait())
    goes_on.set()
    threads[0].join()
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
