"""Hosts that are threads of one process, and speak through one dictionary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class ThreadHost:
    """One of them; nothing is told twice under one key."""

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        board: tuple[dict[str, str], threading.Condition] | None = None,
    ):
        self.index = index
        self.count = count
        self.hosts: Sequence[int] = range(5, 5 + count)  # Ids in a run of more hosts.
        self._said, self._changed = board or ({}, threading.Condition())

    def peer(self, index: int) -> ThreadHost:
        return ThreadHost(index, self.count, (self._said, self._changed))

    def put(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self._said, f"{key} was put already"
            self._said[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float, source: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._said, timeout_s):
                raise TimeoutError(f"{key} of host {source}")
            return self._said[key]


def on_hosts(count: int, action: Callable[[ThreadHost], Result]) -> list[Result | Exception]:
    """What an action that all hosts take together returns on each of them, or raises."""
    first = ThreadHost(count=count)

    def act(index: int) -> Result | Exception:
        try:
            return action(first.peer(index))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(act, range(count)))
