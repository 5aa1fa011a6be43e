"""Connections between the hosts of a service: messages with arrays, and heartbeats."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from skippipe_jax.connections.link_probe import measured_bandwidth, shortest_round_trip_s
from skippipe_jax.connections.links import BEATS, INVALID_MESSAGE, Link, encoded
from skippipe_jax.serving.routing import LinkSpeed

MOST_ARRAY_BYTES = 1 << 28
"""Largest array of a message."""


class Wire:
    """One end of a connection between two hosts, with heartbeats in both directions.

    Attributes:
        speed: measured speed of the connection.
    """

    def __init__(self, link: Link, silent_s: float, probing: asyncio.Lock | None = None):
        """Take over a connection.

        Args:
            link: the connection, without a task that reads from it.
            silent_s: seconds without a message after which it ends.
            probing: lock of all connections of this host whose bandwidth is measured, one after
                the other; None does not measure the bandwidth.
        """
        self._link, self._silent_s, self._probing = link, silent_s, probing
        self._silent_beats = 0
        self._echoes: dict[float, asyncio.Future[float]] = {}
        # End of the last probe: heartbeats sent before it may have waited behind it.
        self._probed_s = -math.inf
        self.speed = LinkSpeed()

    @property
    def ending(self) -> str:
        """Reason for the end of the connection, once it has ended."""
        return self._link.ending

    def send(self, *message: Any, arrays: Sequence[np.ndarray] = ()) -> None:
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
        received = await self._link.receive()
        if received is None:
            return None
        self._silent_beats = 0
        try:
            *message, shapes = received
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
            self._link.ending = INVALID_MESSAGE
            return None
        return message, arrays

    async def follow(self, take: Callable[[list[Any], list[np.ndarray]], None]) -> None:
        """Call `take` with each message until the connection ends; answer heartbeats."""
        tasks = [asyncio.create_task(self._beat())]
        if self._probing is not None:
            tasks.append(asyncio.create_task(self._measure(self._probing)))
        clock = asyncio.get_running_loop()
        try:
            while (received := await self.receive()) is not None:
                match received[0]:
                    case ["ping", sent_s]:
                        if any(probe.size for probe in received[1]):
                            self._probed_s = clock.time()
                        self.send("pong", sent_s)
                    case ["pong", float(sent_s)]:
                        taken_s = clock.time() - sent_s
                        if (echo := self._echoes.pop(sent_s, None)) is not None:
                            self._probed_s = clock.time()
                            echo.set_result(taken_s)
                        elif sent_s > self._probed_s:
                            smoothed_s = 0.8 * (self.speed.round_trip_s or taken_s) + 0.2 * taken_s
                            self.speed = self.speed._replace(round_trip_s=smoothed_s)
                    case _:
                        take(*received)
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    async def _measure(self, probing: asyncio.Lock) -> None:
        async with probing:
            round_trip_s = await shortest_round_trip_s(self._echo)
            bytes_per_s = await measured_bandwidth(self._echo, round_trip_s)
            self.speed = LinkSpeed(round_trip_s, bytes_per_s)

    async def _echo(self, size: int) -> float:
        """Return the seconds until the other host has answered a message of `size` bytes."""
        clock = asyncio.get_running_loop()
        # Random bytes, which a network cannot compress.
        probe = np.frombuffer(os.urandom(size), np.uint8)
        sent_s = clock.time()
        echo = self._echoes[sent_s] = clock.create_future()
        self.send("ping", sent_s, arrays=[probe])
        return await echo

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
