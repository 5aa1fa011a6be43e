"""The simulated clock and network themselves."""

from __future__ import annotations

import asyncio
import random

from tests.cluster.virtual_network import VirtualLoop


def test_no_timer_is_early_and_those_of_one_time_come_in_their_order():
    """An early timer would look for data before it arrives, and leave it there until more comes."""
    loop, drawn, came = VirtualLoop(0), random.Random(0), list[int]()
    early = list[float]()

    def come(number: int, when_s: float) -> None:
        came.append(number)
        if loop.time() < when_s:
            early.append(when_s)

    times_s = [drawn.uniform(0.0, 100.0) for _ in range(1000)] * 2
    order = sorted(range(2000), key=times_s.__getitem__)
    for number, when_s in enumerate(times_s):
        loop.call_at(when_s, come, number, when_s)
    loop.run_until_complete(asyncio.sleep(101.0))
    loop.finish()
    assert not early
    assert came == order
