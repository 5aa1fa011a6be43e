"""The ways between a joiner and hosts, as it measures them before it is one."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import pytest

from skippipe_jax.connections import link_probe
from skippipe_jax.connections.asking import JoinClient
from skippipe_jax.connections.links import Link
from tests.connections.meshes import KEYS, address_of, line
from tests.connections.test_join_server import Run, listening


async def test_a_newcomer_measures_the_ways_to_those_that_answer():
    async with listening(KEYS) as first:
        first.join_server.make_offer = Run()
        gone = {1: "127.0.0.1:9", 4: address_of(first)}
        found = await JoinClient(KEYS).ways(gone, 0.2)
        assert [*found] == [4]
        assert 0 < found[4].latency_s < 5
        assert min(found[4].to, found[4].back) > 1e4


class SimulatedLink:
    """Transfers by TCP in made-up seconds: its window grows by the bytes that have arrived."""

    def __init__(self, round_trip_s: float, bytes_per_s: float):
        self.round_trip_s, self.bytes_per_s = round_trip_s, bytes_per_s
        self.window, self.taken_s = 14_600.0, list[float]()

    async def transfer(self, size: float) -> float:
        taken_s = self.round_trip_s + size / self.bytes_per_s
        while size > self.window and self.window < self.bytes_per_s * self.round_trip_s:
            # The next window is sent a round trip after this one.
            taken_s += self.round_trip_s - self.window / self.bytes_per_s
            size, self.window = size - self.window, 2 * self.window
        if 2 * size > self.window:
            self.window += size
        self.taken_s.append(taken_s)
        return taken_s


@pytest.mark.parametrize("bytes_per_s", [1e4, 1e5, 1e6, 2.5e6, 12.5e6, 125e6])
@pytest.mark.parametrize("round_trip_s", [0.0005, 0.02, 0.05, 0.1, 0.3])
def test_the_bandwidth_of_long_links_is_found_although_tcp_starts_slowly(
    round_trip_s: float, bytes_per_s: float
):
    link = SimulatedLink(round_trip_s, bytes_per_s)
    assert asyncio.run(link_probe.shortest_round_trip_s(link.transfer)) == round_trip_s
    found = asyncio.run(link_probe.measured_bandwidth(link.transfer, round_trip_s))
    assert found == pytest.approx(bytes_per_s, rel=0.1)
    # Heartbeats wait behind a transfer.
    if bytes_per_s >= 1e5:
        assert max(link.taken_s) <= max(0.2, 8 * round_trip_s) + 3 * round_trip_s
    # In less time, smaller transfers have to do.
    link = SimulatedLink(round_trip_s, bytes_per_s)
    found = asyncio.run(link_probe.measured_bandwidth(link.transfer, round_trip_s, 0.5))
    assert found == pytest.approx(bytes_per_s, rel=0.2)
    assert sum(link.taken_s) < 0.5 + link_probe.MOST_OF_A_SIZE * max(link.taken_s)


async def test_a_joiner_finds_latency_and_bandwidth_both_ways_and_is_done_in_time(
    monkeypatch: pytest.MonkeyPatch,
):
    links = {"take": SimulatedLink(0.1, 1e6), "give": SimulatedLink(0.1, 4e6)}
    monkeypatch.setattr(
        link_probe, "_asked", lambda _, direction, size: links[direction].transfer(size)
    )
    found = await link_probe.measured(Mock(), 4.0)
    assert found.latency_s == pytest.approx(0.05)
    assert (found.to, found.back) == pytest.approx((1e6, 4e6))
    transfers = [taken_s for link in links.values() for taken_s in link.taken_s]
    assert sum(transfers) < 5.0
    assert len(transfers) < link_probe.MOST_QUESTIONS


def test_who_answers_otherwise_or_not_at_all_has_no_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_probe, "PATIENCE_S", 0.05)

    async def ask(answer: bytes) -> float:
        async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(attend, "127.0.0.1", 0)
        async with server:
            link = Link(*await asyncio.open_connection(*server.sockets[0].getsockname()))
            began_s = time.monotonic()
            with pytest.raises(ValueError, match=r"no answer within|was not confirmed"):
                await link_probe.measured(link, 1.0)
            link.writer.close()
            return time.monotonic() - began_s

    for answer in (b"", line(["taken", 1]), line(["gone"])):
        assert asyncio.run(ask(answer)) < link_probe.PATIENCE_S + 5
