"""What hosts have told each other and nobody has asked for yet; it ends with its generation."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from skippipe_jax.errors import GenerationEnded, PeerTimeout

MOST_VALUES = 10_000
MOST_CHARACTERS = 1 << 23
"""Limits of what waits to be asked for: values of one host, and characters of them all together.
The oldest of that host go for those that are more, since nobody has wanted them for long."""

_LONGEST_NUMBER = 18
"""No generation's number has so many digits."""

NOBODY = -1
"""The generation of a host that is in none, while others go on."""


class Board:
    """Values by hosts and keys, each of which is asked for once. All threads may use it.

    Attributes:
        generation: that in which this host is; 0 before there is one.
    """

    def __init__(self):
        """Begin with nothing."""
        self.generation = 0
        self._told: defaultdict[int, _Told] = defaultdict(_Told)
        self._news = threading.Condition()

    def post(self, source: int, key: str, value: str) -> None:
        """Put a value of a host there, in place of an earlier one of that host."""
        with self._news:
            self._told[source].put(key, value)
            self._news.notify_all()

    def take(self, key: str, timeout_s: float, source: int | None, generation: int) -> str:
        """Wait for the value of a key, and forget it; with a `source`, only one from that host.

        Raises:
            PeerTimeout: says what was waited for, from whom, and since when.
            GenerationEnded: if this host is in another generation before it is there.
        """
        since = time.strftime("%H:%M:%S")

        def told() -> _Told | None:
            sources = [*self._told] if source is None else [source]
            return next((own for host in sources if key in (own := self._told[host]).values), None)

        with self._news:
            self._news.wait_for(lambda: told() or self.generation != generation, timeout_s)
            if self.generation != generation:
                raise GenerationEnded
            found = told()
            if found is None:
                sender = "any host" if source is None else f"host {source}"
                raise PeerTimeout(
                    f"this host has waited for {key!r} from {sender} since {since}, "
                    f"{timeout_s:g} s, in vain"
                )
            value = found.values[key]
            found.drop(key)
            return value

    def begin(self, generation: int) -> None:
        """Be in another generation, and forget what was told in those before."""
        with self._news:
            self.generation = generation
            for told in self._told.values():
                for key in [key for key in told.values if _generation_of(key) < generation]:
                    told.drop(key)
            self._news.notify_all()

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is the case that a generation brings; whether it is in time."""
        with self._news:
            return self._news.wait_for(is_there, timeout_s)


class _Told:
    """Values of one host by their keys, the oldest first."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self._characters = 0

    def put(self, key: str, value: str) -> None:
        self.drop(key)
        self.values[key] = value
        self._characters += len(key) + len(value)
        while self._characters > MOST_CHARACTERS or len(self.values) > MOST_VALUES:
            self.drop(next(iter(self.values)))

    def drop(self, key: str) -> None:
        value = self.values.pop(key, None)
        if value is not None:
            self._characters -= len(key) + len(value)


def named(generation: int, key: str) -> str:
    """Return a key as it is sent in a generation."""
    return f"{generation}:{key}"


def _generation_of(key: str) -> int:
    """Return the generation in which a key was sent; 0 before there was one."""
    number, _, _ = key.partition(":")
    is_number = number.isdecimal() and len(number) <= _LONGEST_NUMBER
    return int(number) if is_number else 0
