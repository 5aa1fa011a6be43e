"""Driver of the consensus: runs `decisions` over the connections of a host and a timer.

It runs on the event loop of the control plane. The training thread reports its progress by methods
that any thread may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import msgspec
from skippipe_sched.errors import TemporaryError

from skippipe_jax import log
from skippipe_jax.consensus.decisions import advance
from skippipe_jax.consensus.generations import (
    ConsensusState,
    Decision,
    Event,
    Generation,
    Message,
    Presence,
    Received,
    Send,
    Stored,
    Tick,
    Told,
    Writes,
)
from skippipe_jax.consensus.next_generation import is_the_end

TICK_S = 0.5
"""Seconds between ticks, which send beats and possibly lost messages."""

SOON_S = 0.05
"""Seconds from a detected loss to the tick that acts on it: more losses may follow at once."""

STORES_AGAIN_S, STORE_ATTEMPTS = 1.0, 30
"""Seconds between attempts to write a generation to storage that fails, and their number."""


Store = Callable[[Generation], Generation]
"""Function that writes a generation unless there is one, and returns the one that is there.

It raises `TemporaryError` if the storage fails."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Message in a struct, as msgspec prepares the types of a union without one at each call."""

    message: Message


class Control:
    """Consensus of one host with the others. Runs on an event loop."""

    def __init__(
        self,
        state: ConsensusState,
        send: Callable[..., None],
        follow: Callable[[Decision], None],
        store: Store,
        storing: Executor | None = None,
    ):
        """Start ticking from a state; `send` takes a host and the parts of a message to it.

        `follow` is called with each decision, on the loop's thread. `store` is called in the
        executor `storing`, by default the loop's pool, whose threads delay the process's exit.
        """
        self._storing, self._stores = storing, dict[int, asyncio.Task[None]]()
        self._state, self._send, self._follow, self._store = state, send, follow, store
        self._loop = asyncio.get_running_loop()
        self._ticking = self._loop.create_task(self._tick_forever())
        self._ticking.add_done_callback(_raise_its_error)

    def received(self, source: int, given: list[Any]) -> bool:
        """Process a message of another host; return False if it is not valid."""
        try:
            message = msgspec.convert([given], _Envelope).message
        except ValueError:
            return False
        self._process(Received(source, message))
        return True

    def goes_on_without(self, host: int) -> bool:
        """Return True if this host is in a generation of which `host` is not a member."""
        return self._state.is_member and host not in self._state.members

    def is_there(self, host: int) -> None:
        """Note that a host that was missed is present again."""
        self._process(Presence(host, is_there=True))

    def is_missed(self, host: int) -> None:
        """Note that a host is gone, or has been silent for too long."""
        self._process(Presence(host, is_there=False))
        self._loop.call_later(SOON_S, self._process, Tick())

    def tell(self, *events: Event) -> None:
        """Process events of the run. Any thread may call this."""
        for event in events:
            self._loop.call_soon_threadsafe(self._process, event)

    def start_leaving(self, grace_s: float, late: Callable[[], None]) -> None:
        """Start to leave the run; call `late` after `grace_s` seconds.

        Any thread may call this. `late` is called on the event loop's thread.
        """
        self.tell(Told(), Tick())  # The tick notifies the others at once.
        self._loop.call_soon_threadsafe(self._loop.call_later, grace_s, late)

    @property
    def state(self) -> ConsensusState:
        """State of the consensus on this host. For any thread."""
        return self._state

    @property
    def is_the_end(self) -> bool:
        """True if so many hosts were asked to leave that the run has to end. For any thread."""
        return is_the_end(self._state)

    async def _tick_forever(self) -> None:
        while True:
            self._process(Tick())
            await asyncio.sleep(TICK_S)

    def _process(self, event: Event) -> None:
        self._state, effects = advance(self._state, event)
        for effect in effects:
            match effect:
                case Send(target, message):
                    self._send(target, "control", message)
                case Writes(generation) if generation.number not in self._stores:
                    task = self._loop.create_task(self._write(generation))
                    task.add_done_callback(_raise_its_error)
                    self._stores[generation.number] = task
                case Writes():
                    pass  # A write is in progress; storage may hang.
                case _:
                    self._follow(effect)

    async def _write(self, generation: Generation) -> None:
        failures = 0
        while True:
            try:
                stored = await self._loop.run_in_executor(self._storing, self._store, generation)
                break
            except TemporaryError as error:
                failures += 1
                if failures == STORE_ATTEMPTS:
                    raise
                name = f"generation {generation.number}"
                log.warning(f"cannot write {name}: run_dir {error.problem}; retrying")
            await asyncio.sleep(STORES_AGAIN_S)
        del self._stores[generation.number]
        self._process(Stored(stored))


def _raise_its_error(task: asyncio.Task[None]) -> None:
    """Raise the error of a task to the event loop: a task that is not awaited hides it."""
    if not task.cancelled():
        task.result()
