"""What members of a team tell each other arrives although their connection is reset meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.membership import Membership
from tests.cluster.test_no_member import end, meet, on_all


def test_a_team_settles_things_whenever_a_connection_is_reset():
    async def live() -> None:
        hosts, teams, third = await meet()

        def settle(host: Membership, number: int) -> dict[int, Any]:
            index = host.index

            def reset() -> None:
                if (link := host._mesh._links.get(1 - index)) is not None:
                    link.writer.transport.abort()

            def make() -> int:
                if number % 2 == index:  # Right before it is told, or right after.
                    host._loop.call_soon_threadsafe(reset)
                return index

            if number % 4 < 2:
                return gather(teams[index], f"settled {number}", make, 20.0, [0, 1])
            told = gather(teams[index], f"settled {number}", lambda: index, 20.0, [0, 1])
            make()
            return told

        for number in range(40):
            told = await on_all(hosts, lambda host, number=number: settle(host, number))
            assert told == [{0: 0, 1: 1}] * 2
        assert [host.generation_number for host in hosts] == [1, 1]
        await on_all(hosts, end)
        third.end()

    asyncio.run(live())
