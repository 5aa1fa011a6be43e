"""Estimate of the clock offset to another host, from a few exchanges with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

EXCHANGES = 8
LONGEST_S = 0.5
"""Maximum number of exchanges of an estimate, and maximum time for them in seconds."""


def offset_s(ask: Callable[[float], None], answer: Callable[[], str]) -> float:
    """Estimate the peer's clock minus this host's, in seconds, from the fastest exchange.

    `ask` sends a time of this host's monotonic clock to the peer. `answer` waits for the result of
    `answered` for the peer's reply.
    """
    samples: list[tuple[float, float]] = []
    began = time.monotonic()
    while True:
        ask(time.monotonic())
        round_trip, offset = json.loads(answer())
        samples.append((round_trip, offset))
        shortest, offset = min(samples)
        next_end = time.monotonic() - began + shortest
        if len(samples) == EXCHANGES or next_end > LONGEST_S:
            return offset


def answered(sent: float, theirs: float) -> str:
    """Return the round trip and the peer's clock offset, in seconds, as a JSON list.

    Call it when the reply arrives. This host asked at `sent`, by its monotonic clock, and the
    peer's clock was at `theirs` when it replied.
    """
    # Cristian's algorithm: the peer read its clock half a round trip ago.
    round_trip = time.monotonic() - sent
    return json.dumps([round_trip, theirs + round_trip / 2 - time.time()])


def key(host: int) -> str:
    """Return the key of a host's replies on the board."""
    return f"clock/{host}"
