"""Measurement of links by transfers of growing size, and of those of a joiner before it joins.

A joiner uses the connection of its join offer. It sends `["take", size]` and `size` bytes, and the
host answers `["taken", size]`; the answer to `["give", size]` is `size` bytes. Each takes a round
trip plus the transfer time of the bytes. The host trains meanwhile, so a link is measured for a
part of a second only.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from skippipe_jax.connections.links import Link

ROUND_TRIPS = 5
"""Transfers of no bytes, of which the shortest counts as the round trip."""

SIZES = tuple(1 << power for power in (14, 16, 18, 20, 22))
"""Sizes of the transfers that measure a bandwidth, in bytes."""

MOST_OF_A_SIZE = 4
"""Most transfers of one size. TCP's window grows during the first, which therefore take longer."""

ENOUGH_S = 0.05
"""Transfer time in seconds from which no larger size follows, if it is also two round trips.

TCP needs some round trips to reach the full bandwidth, and short times are inexact. As the next
size is four times as large, a message behind it, such as a heartbeat, waits at most about 0.2 s or
ten round trips, whichever is longer; below 80 kB/s, as long as the smallest size takes.
"""

MOST_QUESTIONS = 64
"""Maximum number of transfers for a joiner."""

PATIENCE_S = 10.0
"""Seconds that either end waits for the other."""

_WRITE_BYTES = 1 << 20
_LEAST_S = 1e-6

TimedTransfer = Callable[[int], Awaitable[float]]
"""Function that transfers some bytes, and returns the seconds until they are known to be there."""


async def shortest_round_trip_s(transfer: TimedTransfer) -> float:
    """Measure the round trip of a link in seconds."""
    return min([await transfer(0) for _ in range(ROUND_TRIPS)])


async def measured_bandwidth(
    transfer: TimedTransfer, round_trip_s: float, most_s: float = math.inf
) -> float:
    """Measure the bandwidth of a link in bytes per second, by transfers that include a round trip.

    Sizes grow until a transfer takes long enough, or the next one would exceed `most_s` seconds.
    """
    spent_s, size, transfer_s = 0.0, 0, _LEAST_S
    for size in SIZES:
        shortest_s = math.inf
        for _ in range(MOST_OF_A_SIZE):
            before_s, taken_s = shortest_s, await transfer(size)
            spent_s, shortest_s = spent_s + taken_s, min(before_s, taken_s)
            if shortest_s > 0.9 * before_s:
                break
        transfer_s = max(_LEAST_S, shortest_s - round_trip_s)
        next_s = round_trip_s + SIZES[1] / SIZES[0] * transfer_s
        if transfer_s > max(ENOUGH_S, 2 * round_trip_s) or spent_s + next_s > most_s:
            break
    return size / transfer_s


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
    take, give = (partial(_asked, link, direction) for direction in ("take", "give"))
    round_trip_s = await shortest_round_trip_s(take)
    rates = [await measured_bandwidth(way, round_trip_s, most_s / 2) for way in (take, give)]
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


async def answer_probe(link: Link, direction: str, size: int) -> bool:
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
    piece = os.urandom(min(size, _WRITE_BYTES))
    for start in range(0, size, _WRITE_BYTES):
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
