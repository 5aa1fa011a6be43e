"""What one process tells another of a run, whichever connections carry it. Nothing here sends.

A connection may break between two hosts that both live, and what was on its way is lost with it. So
each message has a number, and is kept until the other end has told that it came. When a connection
is made again, both ends tell how far they have come, and the rest is sent once more.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from skippipe_jax.connections.links import MESSAGE_BYTES, encoded

MOST_KEPT = 2 * MESSAGE_BYTES
"""So much may be kept for the other end [bytes] before it counts as lost."""

MOST_UNTOLD = 8
"""After so many messages the other end is told that they came, or else with the next heartbeat."""


class Channel:
    """This end of it.

    Attributes:
        process: the other end; None as long as nobody has come.
        received: the number of the last message that has come from there.
        is_lost: more would have to be kept for it than may be, so it has missed something.
    """

    def __init__(self, process: int | None = None):
        """Begin with nothing sent or received."""
        self.process = process
        self.received = 0
        self.is_lost = False
        self._told = self._sent = self._bytes = 0
        self._kept = deque[tuple[int, bytes]]()

    def send(self, *message: Any) -> bytes:
        """Keep a message; what is to be written by the connection, if there is one."""
        self._sent += 1
        lines = encoded(self._sent, *message)
        if not self.is_lost:
            self._kept.append((self._sent, lines))
            self._bytes += len(lines)
        if self._bytes > MOST_KEPT:
            self.forget()
            self.is_lost = True
        return lines

    def takes(self, number: int) -> bool:
        """Take a message of this number; tell whether it is new."""
        is_new = number > self.received  # What was given up at the other end is left out.
        self.received = max(self.received, number)
        return is_new

    @property
    def has_to_tell(self) -> bool:
        """Whether the other end keeps much that has come."""
        return self.received - self._told >= MOST_UNTOLD

    def tell(self) -> int:
        """Return what a heartbeat acknowledges: the number of the last message received."""
        self._told = self.received
        return self.received

    def acknowledge(self, received: int) -> None:
        """Drop all messages up to this number: they have arrived at the other end."""
        while self._kept and self._kept[0][0] <= received:
            self._bytes -= len(self._kept.popleft()[1])

    def resume(self, received: int) -> bytes:
        """Return what to send first over a new connection, to an end that has received so many."""
        self._sent = max(self._sent, received)  # It may know an earlier channel of this process.
        self.acknowledge(received)
        return b"".join(lines for _, lines in self._kept)

    def forget(self) -> None:
        """Keep nothing of what was sent: the other end has no use for it."""
        self._kept.clear()
        self._bytes, self.is_lost = 0, False
