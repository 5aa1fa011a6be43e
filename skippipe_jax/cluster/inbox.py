"""Inbox of a host: values from other hosts until they are read, and decisions of the consensus."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from skippipe_jax.connections.threads import wait_for
from skippipe_jax.consensus.generations import Apply, Decision, Enter, Generation, NotMember
from skippipe_jax.errors import GenerationEnded, PeerTimeout

MOST_VALUES = 10_000
MOST_CHARACTERS = 1 << 23
"""Limits of one host's unread values: their number, and their characters altogether.
Beyond them the oldest values of that host are dropped."""

NOBODY = -1
"""Generation of a host that is in none, while others continue."""

Totals = tuple[float, ...]
Counted = Callable[[Totals], None]
"""Function that is called with the totals of all hosts when a step commits."""


class Inbox:
    """Values by host, generation and key, each read once, and generations that this host enters.

    The event loop fills it, and any thread reads it. Waits end with the generation in which they
    began.

    Attributes:
        generation: number of this host's generation; 0 before the first.
        entered: the newest generation that this host has entered, or None.
    """

    def __init__(self):
        """Start without values, outside of all generations."""
        self.generation = 0
        self.entered: Generation | None = None
        self._mailboxes: defaultdict[int, _Mailbox] = defaultdict(_Mailbox)
        self._following: tuple[Generation, ...] = ()
        self._counted: Counted | None = None
        self._when_ended: Callable[[], None] | None = None
        self._changed = threading.Condition()

    def post(self, source: int, generation: int, key: str, value: str) -> None:
        """Store a value of a host, replacing its earlier one of the same generation and key."""
        with self._changed:
            self._mailboxes[source].put((generation, key), value)
            self._changed.notify_all()

    def take(self, key: str, timeout_s: float, source: int, generation: int) -> str:
        """Wait for the value of a key from a host in a generation, and remove it.

        Raises:
            PeerTimeout: names the key, the host, and the start of the wait.
            GenerationEnded: if this host enters another generation first.
        """
        since, name = time.strftime("%H:%M:%S"), (generation, key)
        with self._changed:
            box = self._mailboxes[source]
            wait_for(
                self._changed,
                lambda: name in box.values or self.generation != generation,
                timeout_s,
            )
            if self.generation != generation:
                raise GenerationEnded
            if name not in box.values:
                raise PeerTimeout(
                    f"timed out after {round(timeout_s, 1):g} s waiting for {key!r} from host "
                    f"{source} (since {since})"
                )
            return box.take(name)

    def next(self, after: int, timeout_s: float) -> Generation | None:
        """Wait for the generation that this host enters after another; None after `timeout_s`.

        Every generation is returned, even one that has ended: all hosts may have rolled back in it.
        """

        def found() -> Generation | None:
            last = self.generation
            return next((own for own in self._following if after < own.number <= last), None)

        with self._changed:
            self._following = tuple(own for own in self._following if own.number > after)
            return wait_for(self._changed, found, timeout_s)

    def expect(self, generation: int, counted: Counted) -> None:
        """Call `counted` when the next step commits, unless the generation has ended."""
        with self._changed:
            if self.generation == generation:
                self._counted = counted

    def when_ended(self, generation: int, then: Callable[[], None]) -> None:
        """Call `then` when a generation ends, or at once if it has."""
        with self._changed:
            self._when_ended = then
            has_ended = self.generation != generation
        if has_ended:
            then()

    def follow(self, decision: Decision) -> None:
        """Carry out a decision: apply a step, enter a generation, or leave it."""
        match decision:
            case Apply(_, outcome):
                if (counted := self._counted) is not None:
                    counted(outcome)
            case Enter(generation):
                with self._changed:
                    self.entered = generation
                    self._following += (generation,)
                self.begin(generation.number)
            case NotMember():
                with self._changed:
                    # This host rejoins without a state, or all roll back: pending ones are void.
                    self._following = ()
                self.begin(NOBODY)

    def begin(self, generation: int) -> None:
        """Enter another generation, or `NOBODY`; drop the values of earlier ones.

        All waits in the last generation raise `GenerationEnded`.
        """
        with self._changed:
            self.generation = generation
            for box in self._mailboxes.values():
                for key in [key for key in box.values if key[0] < generation]:
                    box.take(key)
            then, self._when_ended, self._counted = self._when_ended, None, None
            self._changed.notify_all()
        if then is not None:
            then()


class _Mailbox:
    """Values of one host by generation and key, the oldest first."""

    def __init__(self):
        self.values: dict[tuple[int, str], str] = {}
        self._characters = 0

    def put(self, key: tuple[int, str], value: str) -> None:
        if key in self.values:
            self.take(key)
        self.values[key] = value
        self._characters += len(key[1]) + len(value)
        while self._characters > MOST_CHARACTERS or len(self.values) > MOST_VALUES:
            self.take(next(iter(self.values)))

    def take(self, key: tuple[int, str]) -> str:
        value = self.values.pop(key)
        self._characters -= len(key[1]) + len(value)
        return value
