"""Reliable, ordered messages between two processes over changing connections. Nothing here sends.

A connection between two live hosts may break and lose messages. So each message has a number, and
is kept until the other end acknowledges it. After a reconnect, both ends exchange the number of
the last message they received, and the missing ones are sent again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from skippipe_jax.connections.links import MESSAGE_BYTES, encoded

MOST_KEPT = 2 * MESSAGE_BYTES
"""Maximum size of unacknowledged messages, in bytes. Beyond it the other end counts as lost."""

MOST_UNTOLD = 8
"""Messages after which an acknowledgment is sent, without waiting for the next heartbeat."""


class Channel:
    """This end of a channel.

    Attributes:
        process: process number of the other end; None until it connects.
        received: number of the last message received from there.
        is_lost: True if more than `MOST_KEPT` was unacknowledged, so that messages were dropped.
    """

    def __init__(self, process: int | None = None):
        """Start with nothing sent or received."""
        self.process = process
        self.received = 0
        self.is_lost = False
        self._told = self._sent = self._bytes = 0
        self._kept = deque[tuple[int, bytes]]()

    def send(self, *message: Any) -> bytes:
        """Keep a message under a new number; return the bytes to write to a connection."""
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
        """Note a message with this number; return True if it is new."""
        is_new = number > self.received  # Numbers that the other end gave up are skipped.
        self.received = max(self.received, number)
        return is_new

    @property
    def has_to_tell(self) -> bool:
        """True if an acknowledgment is due: the other end keeps many received messages."""
        return self.received - self._told >= MOST_UNTOLD

    def tell(self) -> int:
        """Return the number to acknowledge: that of the last message received."""
        self._told = self.received
        return self.received

    def acknowledge(self, received: int) -> None:
        """Drop all kept messages up to this number: the other end has received them."""
        while self._kept and self._kept[0][0] <= received:
            self._bytes -= len(self._kept.popleft()[1])

    def resume(self, received: int) -> bytes:
        """Return the bytes to send first over a new connection, after message `received`."""
        self._sent = max(self._sent, received)  # The peer may have used an earlier channel.
        self.acknowledge(received)
        return b"".join(lines for _, lines in self._kept)

    def forget(self) -> None:
        """Drop all kept messages: the other end does not need them."""
        self._kept.clear()
        self._bytes, self.is_lost = 0, False
