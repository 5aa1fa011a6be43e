"""How far the clock of another host is from this one's, which asks for it a few times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

EXCHANGES = 8
LONGEST_S = 0.5
"""How often a host asks for the clock of another, and how long it goes on asking."""


def offset_s(ask: Callable[[float], None], answer: Callable[[], str]) -> float:
    """Estimate the other's clock less this host's [s], from the quickest exchange.

    `ask` sends the other the time that it is given; `answer` waits for what `answered` makes of
    what comes back.
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
    """Return how long an answer took that has just come, and how far the other's clock is.

    This host asked at `sent`, by its monotonic clock, and the other's clock said `theirs` then.
    """
    # Cristian's algorithm: the other looked at its clock half a round trip ago.
    round_trip = time.monotonic() - sent
    return json.dumps([round_trip, theirs + round_trip / 2 - time.time()])


def key(host: int) -> str:
    """Return the key under which the answers of a host are on the board."""
    return f"clock/{host}"
