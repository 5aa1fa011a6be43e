"""Mailbox of values from other hosts until they are read or their generation ends."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from skippipe_jax.errors import GenerationEnded, PeerTimeout

MOST_VALUES = 10_000
MOST_CHARACTERS = 1 << 23
"""Limits of one host's unread values: their number, and their characters altogether.
Beyond them the oldest values of that host are dropped."""

_LONGEST_NUMBER = 18
"""Most digits of a generation's number."""

NOBODY = -1
"""Generation of a host that is in none, while others continue."""


class Mailboxes:
    """Values by host and key, each of which is read once; thread-safe.

    Attributes:
        generation: number of this host's generation; 0 before the first.
    """

    def __init__(self):
        """Start without values."""
        self.generation = 0
        self._mailboxes: defaultdict[int, _Mailbox] = defaultdict(_Mailbox)
        self._changed = threading.Condition()

    def post(self, source: int, key: str, value: str) -> None:
        """Store a value of a host, replacing its earlier one of the same key."""
        with self._changed:
            self._mailboxes[source].put(key, value)
            self._changed.notify_all()

    def take(self, key: str, timeout_s: float, source: int | None, generation: int) -> str:
        """Wait for the value of a key and remove it; with a `source`, only from that host.

        Raises:
            PeerTimeout: names the key, the host, and the start of the wait.
            GenerationEnded: if this host enters another generation first.
        """
        since = time.strftime("%H:%M:%S")

        def mailbox() -> _Mailbox | None:
            sources = [*self._mailboxes] if source is None else [source]
            candidates = (self._mailboxes[host] for host in sources)
            return next((box for box in candidates if key in box.values), None)

        with self._changed:
            self._changed.wait_for(lambda: mailbox() or self.generation != generation, timeout_s)
            if self.generation != generation:
                raise GenerationEnded
            box = mailbox()
            if box is None:
                sender = "any host" if source is None else f"host {source}"
                raise PeerTimeout(
                    f"timed out after {round(timeout_s, 1):g} s waiting for {key!r} from {sender} "
                    f"(since {since})"
                )
            value = box.values[key]
            box.drop(key)
            return value

    def begin(self, generation: int) -> None:
        """Enter another generation and drop the values of earlier ones."""
        with self._changed:
            self.generation = generation
            for box in self._mailboxes.values():
                for key in [key for key in box.values if _generation_of(key) < generation]:
                    box.drop(key)
            self._changed.notify_all()

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a condition on the generation holds; return whether it does in time."""
        with self._changed:
            return self._changed.wait_for(is_there, timeout_s)


class _Mailbox:
    """Values of one host by key, the oldest first."""

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
    """Return the generation in which a key was sent; 0 before the first."""
    number, _, _ = key.partition(":")
    is_number = number.isdecimal() and len(number) <= _LONGEST_NUMBER
    return int(number) if is_number else 0
