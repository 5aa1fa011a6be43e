"""Nobody who speaks waits for who reads it, nor does the end of a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from skippipe_jax.cluster import attendance
from skippipe_jax.cluster.agreement import DeadlinePassed
from skippipe_jax.cluster.attendance import Attendance
from skippipe_jax.cluster.board import Board
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.threads import Lines

LINE = b"x" * 1000 + b"\n"
LINES = 200  # More than a pipe holds.


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def test_lines_that_nobody_reads_hold_nobody_up(pipe: tuple[int, int]):
    reads, writes = pipe
    lines = Lines(writes)
    lines.begin()

    def put() -> None:
        for _ in range(LINES):
            lines.put(LINE)

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    putting.join(10.0)
    assert not putting.is_alive()
    assert not lines.drain(0.1)
    came = b""
    while len(came) < LINES * len(LINE):
        came += os.read(reads, 1 << 16)
    assert came == LINES * LINE
    assert lines.drain(10.0)


def test_a_process_ends_whose_calls_and_lines_hang():
    """And what it has said last is printed where somebody reads it."""
    program = """
import threading
from skippipe_jax.connections.links import say
from skippipe_jax.connections.threads import STDERR, DaemonThreads
DaemonThreads().submit(threading.Event().wait)
STDERR.begin()
say("the last words")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=True
    )
    assert done.stderr == b"the last words\n"


def test_who_asks_an_event_loop_that_hangs_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attendance, "ANSWERS_S", 0.05)
    host = Attendance(ClusterConfig(), 1, 3, Board())
    host._loop = asyncio.new_event_loop()  # It does not run.

    async def answer() -> None: ...

    asked = answer()
    with pytest.raises(DeadlinePassed, match=r"has not answered for 0\.05 s"):
        host._done(asked)
    asked.close()
    host._loop.close()
