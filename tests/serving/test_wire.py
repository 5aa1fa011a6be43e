"""Connections between the hosts of a service."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from skippipe_jax.serving.wire import Wire


def test_heartbeats_that_may_have_waited_behind_a_probe_do_not_count():
    async def follow() -> None:
        coming = asyncio.Queue[Any]()
        link = Mock(receive=coming.get, exactly=AsyncMock(side_effect=bytes))
        wire, clock = Wire(link, 1000.0), asyncio.get_running_loop()
        has_come = asyncio.Event()
        following = asyncio.create_task(wire.follow(lambda *_: has_come.set()))

        async def round_trip_after(sent_s: float) -> float | None:
            """Answer a heartbeat; return the smoothed round trip."""
            has_come.clear()
            coming.put_nowait(["pong", sent_s, []])
            coming.put_nowait(["anything", []])
            await has_come.wait()
            return wire.speed.round_trip_s

        assert await round_trip_after(clock.time() - 0.1) == pytest.approx(0.1, abs=0.02)
        assert await round_trip_after(clock.time() - 0.2) == pytest.approx(0.12, abs=0.02)
        coming.put_nowait(["ping", 0.0, [["uint8", 9]]])
        assert await round_trip_after(clock.time() - 9.0) == pytest.approx(0.12, abs=0.02)
        await asyncio.sleep(0.01)
        assert await round_trip_after(clock.time()) == pytest.approx(0.096, abs=0.02)
        coming.put_nowait(None)
        await following

    asyncio.run(follow())
