"""Batches of the next iteration are made while the current one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Looks items up by number, of which those that were announced may be there already.

    One thread makes what was announced last, and so never more than one iteration's items lie
    ready. What it could not make is raised where the item is asked for.
    """

    def __init__(self, read: Callable[[int], Item], active: bool):
        """`read` makes an item; where not `active`, it does so when the item is asked for."""
        self._read = read
        self._active = active
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read_ahead")
        self._announced: dict[int, Future[Item]] = {}

    def __getitem__(self, number: int) -> Item:
        """Return the item, made now unless it was announced."""
        future = self._announced.pop(number, None)
        return self._read(number) if future is None else future.result()

    def announce(self, numbers: Iterable[int]) -> None:
        """Begin to make the items that will be asked for next; forget those announced before."""
        if not self._active:
            return
        for future in self._announced.values():
            future.cancel()
        self._announced = {number: self._thread.submit(self._read, number) for number in numbers}

    def close(self) -> None:
        """End the thread, after the item that it is making."""
        self._thread.shutdown(cancel_futures=True)
