"""Hosts that are called until they answer, after longer and longer pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
"""How long to wait before a host is called again: twice as long each time, up to the longest."""


class Calls:
    """Those that one host is making, one to each other at a time."""

    def __init__(self, call: Callable[[int, bool], Coroutine[Any, Any, bool]], longest_s: float):
        """Make none yet; no pause is longer than `longest_s` either.

        `call` calls a host once, which has or has not come back to the run itself, and says whether
        that is enough.
        """
        self._call, self._longest_s = call, min(LONGEST_PAUSE_S, longest_s)
        self._tasks = dict[int, asyncio.Task[None]]()

    def begin(self, host: int, *, comes_back: bool = False) -> None:
        """Call a host, unless it is being called."""
        if host not in self._tasks or self._tasks[host].done():
            task = self._tasks[host] = asyncio.create_task(self._go_on(host, comes_back))
            # A fault of its own goes to the loop: nobody waits for it.
            task.add_done_callback(lambda task: task.cancelled() or task.result())

    def end(self, host: int) -> None:
        """Call a host no more."""
        if (task := self._tasks.pop(host, None)) is not None:
            task.cancel()

    def close(self) -> None:
        """Call nobody any more."""
        for host in [*self._tasks]:
            self.end(host)

    async def _go_on(self, host: int, comes_back: bool) -> None:
        pause_s = FIRST_PAUSE_S
        while not await self._call(host, comes_back):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._longest_s)
