"""Connections between the hosts of a service: messages with arrays, and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from skippipe_jax.connections.links import SENT_NONSENSE, Link, encoded
from skippipe_jax.connections.pulse import BEATS

MOST_ARRAY_BYTES = 1 << 28
"""Largest array of a message."""

Arrays = Sequence[np.ndarray]
"""Arrays that follow a message."""


class Wire:
    """One end of a connection between two hosts, with heartbeats in both directions.

    Attributes:
        round_trip_s: smoothed round-trip time of a heartbeat in seconds; None before the first.
    """

    def __init__(self, link: Link, silent_s: float):
        """Take over a connection, which ends after `silent_s` seconds without a message."""
        self._link, self._silent_s = link, silent_s
        self._silent_beats = 0
        self.round_trip_s: float | None = None

    @property
    def ending(self) -> str:
        """Reason for the end of the connection, once it has ended."""
        return self._link.ending

    def send(self, *message: Any, arrays: Arrays = ()) -> None:
        """Send a message with arrays without waiting; do nothing on a closed connection."""
        shapes = [[array.dtype.name, *array.shape] for array in arrays]
        content = b"".join(array.tobytes() for array in arrays)
        self._link.send_lines(encoded(*message, shapes) + content)

    async def drained(self) -> None:
        """Wait until the send buffer has drained, or the connection has ended."""
        await self._link.drained(self._silent_s)

    def close(self) -> None:
        """Close the connection after the send buffer has drained."""
        self._link.writer.close()

    async def receive(self) -> tuple[list[Any], list[np.ndarray]] | None:
        """Read the next message with its arrays; None once the connection has ended."""
        said = await self._link.receive()
        if said is None:
            return None
        self._silent_beats = 0
        try:
            *message, shapes = said
            arrays = []
            for name, *shape in shapes:
                dtype = jnp.dtype(name)
                size = int(np.prod(shape)) * dtype.itemsize
                if not 0 <= size <= MOST_ARRAY_BYTES:
                    raise ValueError(f"an array of {size} bytes")
                content = await self._link.exactly(size)
                if content is None:
                    return None
                arrays.append(np.frombuffer(content, dtype).reshape(shape))
        except (TypeError, ValueError):
            self._link.ending = SENT_NONSENSE
            return None
        return message, arrays

    async def follow(self, take: Callable[[list[Any], list[np.ndarray]], None]) -> None:
        """Call `take` with each message until the connection ends; answer heartbeats."""
        beating = asyncio.create_task(self._beat())
        clock = asyncio.get_running_loop()
        try:
            while (came := await self.receive()) is not None:
                match came[0]:
                    case ["ping", sent_s]:
                        self.send("pong", sent_s)
                    case ["pong", float(sent_s)]:
                        taken_s = clock.time() - sent_s
                        known_s = self.round_trip_s
                        self.round_trip_s = (
                            taken_s if known_s is None else 0.8 * known_s + 0.2 * taken_s
                        )
                    case _:
                        take(*came)
        finally:
            beating.cancel()
            self.close()

    async def _beat(self) -> None:
        """Send heartbeats, and end the connection if nothing arrives."""
        clock = asyncio.get_running_loop()
        while True:
            self.send("ping", clock.time())
            await asyncio.sleep(self._silent_s / BEATS)
            # Counted in beats of this host, so a pause of this host does not end the connection.
            self._silent_beats += 1
            if self._silent_beats > BEATS:
                self._link.break_off(f"no message within {self._silent_s:g} s")
