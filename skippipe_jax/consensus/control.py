"""Drives the rules of `generations` over the connections of a host, and tells the run of it.

The rules live on the event loop of the control plane. The run lives in another thread, which tells
what it holds and has saved by methods that any thread may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from skippipe_jax import log
from skippipe_jax.consensus import wire
from skippipe_jax.consensus.decisions import advance
from skippipe_jax.consensus.generations import (
    Decision,
    Event,
    Generation,
    Presence,
    Received,
    Send,
    State,
    Stored,
    Tick,
    Told,
    Writes,
)
from skippipe_jax.consensus.next_generation import is_the_end

TICK_S = 0.5
"""How often what may have been lost is sent again."""

SOON_S = 0.05
"""So long after a host is missed the rest begin to do without it: more may be missed as well."""

STORES_AGAIN_S = 1.0
"""Seconds after which storage that has failed is asked again to decide on a generation."""


Store = Callable[[Generation], Generation]
"""Writes a generation where only the first can, and returns what is there then."""


class Control:
    """A host's part in what the hosts decide together. Lives on an event loop."""

    def __init__(
        self,
        state: State,
        send: Callable[..., None],
        follow: Callable[[Decision], None],
        store: Store,
        storing: Executor | None = None,
    ):
        """Begin with a state; `send` takes a host and the parts of a message to it.

        `follow` is called with what was decided, on the loop's thread, and `store` by `storing`, by
        default a pool of threads that the process waits for.
        """
        self._storing, self._stores = storing, dict[int, asyncio.Task[None]]()
        self._state, self._send, self._follow, self._store = state, send, follow, store
        self._loop = asyncio.get_running_loop()
        self._ticking = self._loop.create_task(self._tick_for_ever())
        self._ticking.add_done_callback(_raise_its_error)

    def received(self, source: int, given: list[Any]) -> bool:
        """Take a message of another host; tell whether it is one of the consensus."""
        try:
            message = wire.parse(given)
        except ValueError:
            return False
        self._happens(Received(source, message))
        return True

    def goes_on_without(self, host: int) -> bool:
        """Tell whether a generation goes on here of which that host is no member."""
        return self._state.is_member and host not in self._state.members

    def is_there(self, host: int) -> None:
        """Note that a host that was missed is heard of again."""
        self._happens(Presence(host, is_there=True))

    def is_missed(self, host: int) -> None:
        """Note that a host is gone, or has been silent for too long."""
        self._happens(Presence(host, is_there=False))
        self._loop.call_later(SOON_S, self._happens, Tick())

    def tell(self, *events: Event) -> None:
        """Note what the run has come to, or wishes. Any thread may call this."""
        for event in events:
            self._loop.call_soon_threadsafe(self._happens, event)

    def told_to_leave(self, grace_s: float, late: Callable[[], None]) -> None:
        """Leave, as this host was told to; call `late` if it has not left after some seconds.

        Any thread may call this; `late` is called on the event loop's.
        """
        self.tell(Told(), Tick())  # So that the others hear of it at once.
        self._loop.call_soon_threadsafe(self._loop.call_later, grace_s, late)

    @property
    def state(self) -> State:
        """What this host knows of the run. For any thread."""
        return self._state

    @property
    def is_the_end(self) -> bool:
        """Whether so many hosts are told to leave that the run has to end. For any thread."""
        return is_the_end(self._state)

    @property
    def waiting(self) -> frozenset[int]:
        """The hosts that are in no generation, and ask to be taken in. For any thread."""
        return frozenset(self._state.waiting)

    async def _tick_for_ever(self) -> None:
        while True:
            self._happens(Tick())
            await asyncio.sleep(TICK_S)

    def _happens(self, event: Event) -> None:
        self._state, effects = advance(self._state, event)
        for effect in effects:
            match effect:
                case Send(target, message):
                    self._send(target, "control", wire.to_json(message))
                case Writes(generation) if generation.number not in self._stores:
                    task = self._loop.create_task(self._write(generation))
                    task.add_done_callback(_raise_its_error)
                    self._stores[generation.number] = task
                case Writes():
                    pass  # Storage has yet to answer, and may hang.
                case _:
                    self._follow(effect)

    async def _write(self, generation: Generation) -> None:
        while True:
            try:
                stored = await self._loop.run_in_executor(self._storing, self._store, generation)
                break
            except OSError as error:
                problem = f"the run's folder does not take generation {generation.number}"
                log.warning(f"{problem}: {error}")
            await asyncio.sleep(STORES_AGAIN_S)
        del self._stores[generation.number]
        self._happens(Stored(stored))


def _raise_its_error(task: asyncio.Task[None]) -> None:
    """Hand the error that has ended a task to the loop: what nobody waits for fails unheard."""
    if not task.cancelled():
        task.result()
