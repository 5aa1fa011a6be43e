"""Reliable, ordered messages between two processes over changing connections. Nothing here sends.

A connection between two live hosts may break and lose messages. So each message has a number, and
is kept until the other end acknowledges it. After a reconnect, both ends exchange the number of
the last message they received, and the missing ones are sent again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from skippipe_jax.connections.links import MESSAGE_BYTES, encoded

MAX_UNACKNOWLEDGED_BYTES = 2 * MESSAGE_BYTES
"""Maximum size of unacknowledged messages, in bytes. Beyond it the other end counts as lost."""

ACKNOWLEDGE_EVERY = 8
"""Messages after which an acknowledgment is sent, without waiting for the next heartbeat."""


class Channel:
    """This end of a channel.

    Attributes:
        process: process number of the other end; None until it connects.
        received: number of the last message received from there.
        is_lost: True if messages were dropped, beyond `MAX_UNACKNOWLEDGED_BYTES`.
    """

    def __init__(self, process: int | None = None):
        """Start with nothing sent or received."""
        self.process = process
        self.received = 0
        self.is_lost = False
        self._acknowledged = self._sent = self._bytes = 0
        self._unacknowledged = deque[tuple[int, bytes]]()

    def send(self, *message: Any) -> bytes:
        """Keep a message under a new number; return the bytes to write to a connection."""
        self._sent += 1
        lines = encoded(self._sent, *message)
        if not self.is_lost:
            self._unacknowledged.append((self._sent, lines))
            self._bytes += len(lines)
        if self._bytes > MAX_UNACKNOWLEDGED_BYTES:
            self.forget()
            self.is_lost = True
        return lines

    def takes(self, number: int) -> bool:
        """Note a message with this number; return True if it is new."""
        is_new = number > self.received  # Numbers that the other end gave up are skipped.
        self.received = max(self.received, number)
        return is_new

    @property
    def needs_acknowledgment(self) -> bool:
        """True if an acknowledgment is due: the other end keeps many received messages."""
        return self.received - self._acknowledged >= ACKNOWLEDGE_EVERY

    def acknowledgment(self) -> int:
        """Return the number to acknowledge: that of the last message received."""
        self._acknowledged = self.received
        return self.received

    def acknowledge(self, received: int) -> None:
        """Drop all kept messages up to this number: the other end has received them."""
        while self._unacknowledged and self._unacknowledged[0][0] <= received:
            self._bytes -= len(self._unacknowledged.popleft()[1])

    def resume(self, received: int) -> bytes:
        """Return the bytes to send first over a new connection, after message `received`."""
        self._sent = max(self._sent, received)  # The peer may have used an earlier channel.
        self.acknowledge(received)
        return b"".join(lines for _, lines in self._unacknowledged)

    def forget(self) -> None:
        """Drop all kept messages: the other end does not need them."""
        self._unacknowledged.clear()
        self._bytes, self.is_lost = 0, False
