"""Measurement of the link between a joiner and a host, before the joiner joins.

The joiner uses the connection of its join offer. It sends `["take", size]` and `size` bytes, and
the host answers `["taken", size]`; the answer to `["give", size]` is `size` bytes. Each takes a
round trip plus the transfer time of the bytes. The host trains meanwhile, so a link is measured
for a part of a second only.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

from skippipe_jax.connections.links import Link

LEAST_BYTES, MOST_BYTES, GROWTH = 1 << 16, 1 << 24, 8
ROUND_TRIPS = 4
MOST_QUESTIONS = 64
"""Maximum number of measurements for a joiner."""

PATIENCE_S = 10.0
"""Seconds that either end waits for the other."""

_PIECE_BYTES = 1 << 20
_LEAST_S = 1e-6


@dataclass(frozen=True)
class MeasuredLink:
    """Measured link between a joiner and a host.

    Attributes:
        latency_s: half of the shortest round trip, in seconds.
        to: bytes per second from the joiner to the host.
        back: bytes per second from the host to the joiner.
    """

    latency_s: float
    to: float
    back: float


async def measured(link: Link, most_s: float) -> MeasuredLink:
    """Measure the link to the host at the other end, for about `most_s` seconds.

    Raises:
        ValueError: if the host's answers are not valid, or late.
    """
    # The first one is dropped: the host may be busy.
    round_trips = [await _asked(link, "take", 0) for _ in range(1 + ROUND_TRIPS)][1:]
    round_trip_s = min(round_trips)
    rates = []
    for direction in ("take", "give"):
        size, until_s = LEAST_BYTES, time.monotonic() + most_s / 2
        while True:
            seconds = max(_LEAST_S, await _asked(link, direction, size) - round_trip_s)
            # The next size would take `GROWTH` times as long.
            is_last = time.monotonic() + GROWTH * seconds > until_s
            if is_last or size == MOST_BYTES:
                break
            size = min(MOST_BYTES, GROWTH * size)
        rates.append(max(1.0, size / seconds))
    return MeasuredLink(round_trip_s / 2, *rates)


async def _asked(link: Link, direction: str, size: int) -> float:
    """Return the seconds until the host has received `size` bytes, or sent them."""
    began_s = time.perf_counter()
    link.send(direction, size)
    try:
        async with asyncio.timeout(PATIENCE_S):
            if direction == "give":
                await _received(link, size)
            else:
                await _sent(link, size)
                if await link.receive() != ["taken", size]:
                    raise ValueError("a measurement was not confirmed")
    except TimeoutError as error:
        raise ValueError(f"no answer within {PATIENCE_S:g} s") from error
    return time.perf_counter() - began_s


async def answer(link: Link, direction: str, size: int) -> bool:
    """Receive `size` bytes from a joiner, or send them; return False if that fails or is late."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            if direction == "give":
                await _sent(link, size)
            else:
                await _received(link, size)
                link.send("taken", size)
    except (OSError, ValueError):  # The joiner has disconnected, or is too slow.
        return False
    return True


async def _sent(link: Link, size: int) -> None:
    # Random bytes, which a network cannot compress.
    piece = os.urandom(min(size, _PIECE_BYTES))
    for start in range(0, size, _PIECE_BYTES):
        link.write(piece[: size - start])
        await link.drained(PATIENCE_S)


async def _received(link: Link, size: int) -> None:
    while size > 0:
        data = await link.read()
        if not data:
            raise ValueError(link.ending)
        size -= len(data)
    if size:
        raise ValueError("more bytes arrived than requested")
