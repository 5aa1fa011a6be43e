"""What drives the rules on an event loop, which may wait for nothing that hangs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.consensus import control
from skippipe_jax.consensus.control import Control
from skippipe_jax.consensus.decisions import first_state
from skippipe_jax.consensus.generations import Generation, Heartbeat, Message
from skippipe_jax.storage.files import unusable
from tests.consensus import exploration

RULES = replace(exploration.RULES, host_of=(0, 1))
FIRST = Generation(1, (0, 1), (7, 7), 0, 4, placement=((0, 1),))


def test_a_host_shows_that_it_lives_while_storage_fails_and_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Lose one of two hosts, so that storage has to decide on the next generation."""
    monkeypatch.setattr(control, "TICK_S", 0.01)
    monkeypatch.setattr(control, "STORES_AGAIN_S", 0.0)
    asks = list[Generation]()
    answers = threading.Event()

    def store(generation: Generation) -> Generation:
        asks.append(generation)
        if len(asks) == 1:
            raise unusable(Path("run"), OSError(116, "Stale file handle"))
        assert answers.wait(20.0), "the loop waits for storage"
        return generation

    async def live() -> None:
        beats, entered = asyncio.Queue[Any](), asyncio.Queue[Any]()

        def send(host: int, kind: str, message: Message) -> None:
            if isinstance(message, Heartbeat) and len(asks) == 2:
                beats.put_nowait(message)

        own = Control(
            first_state(0, RULES, FIRST, 0), send, entered.put_nowait, store, DaemonThreads()
        )
        own.is_missed(1)
        for _ in range(5):
            await asyncio.wait_for(beats.get(), 10.0)
        assert (len(asks), entered.empty()) == (2, True), "it is asked once at a time"
        answers.set()
        assert (await asyncio.wait_for(entered.get(), 10.0)).generation.members == (0,)
        own._ticking.cancel()

    asyncio.run(live())
    said = "cannot write generation 2: run_dir cannot be used: Stale file handle; retrying"
    assert said in capfd.readouterr().err


def test_a_host_whose_storage_fails_for_good_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "TICK_S", 0.01)
    monkeypatch.setattr(control, "STORES_AGAIN_S", 0.0)
    ends = asyncio.Queue[Any]()

    def store(generation: Generation) -> Generation:
        raise unusable(Path("run"), OSError(116, "Stale file handle"))

    async def live() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: ends.put_nowait(context.get("exception")))
        state = first_state(0, RULES, FIRST, 0)
        own = Control(state, lambda *_: None, lambda _: None, store, DaemonThreads())
        own.is_missed(1)
        assert isinstance(await asyncio.wait_for(ends.get(), 10.0), TemporaryError)
        own._ticking.cancel()

    asyncio.run(live())
