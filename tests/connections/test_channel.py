"""What hosts tell each other comes once and in order, whatever becomes of their connections."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import deque
from contextlib import suppress
from dataclasses import replace

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.connections import channel
from skippipe_jax.connections.channel import Channel
from skippipe_jax.connections.links import BEATS, STOPPED_READING, Link, reach
from skippipe_jax.connections.mesh import BEATS_OF_LINK
from tests.connections.meshes import (
    KEYS,
    PATIENCE_S,
    Host,
    answer_to,
    assert_all_connected,
    gathered,
    hello_of,
    line,
    stranger,
    until,
    without_third,
)


class End:
    """One end of a channel, what was said there, and what has come."""

    def __init__(self):
        self.channel = Channel()
        self.said: list[int] = []
        self.heard: list[int] = []

    def hear(self, lines: bytes) -> None:
        for text in lines.splitlines():
            match json.loads(text):
                case ["beat", received]:
                    self.channel.acknowledge(received)
                case [number, value] if self.channel.takes(number):
                    self.heard.append(value)


Way = deque[bytes]
"""What is on its way to one end, by one connection."""


def test_a_thousand_resets_lose_nothing_and_double_nothing():
    """Also where the end of a connection shows late, so that it still brings what it had."""
    chance, ends = random.Random(1), (End(), End())
    ways: tuple[Way, Way] | None = None
    old: list[tuple[Way, Way]] = []

    def deliver_old() -> None:
        for side, way in enumerate(chance.choice(old) if old else ()):
            if way:
                ends[side].hear(way.popleft())

    resets = 0
    while resets < 1000:
        side = chance.randrange(2)
        own = ends[side]
        match chance.choice(["say", "say", "say", "hear", "hear", "hear", "beat", "old", "cut"]):
            case "say":
                own.said.append(len(own.said))
                lines = own.channel.send(own.said[-1])
                if ways is not None:
                    ways[1 - side].append(lines)
            case "hear" if ways is not None and ways[side]:
                own.hear(ways[side].popleft())
            case "beat" if ways is not None:
                ways[1 - side].append(line(["beat", own.channel.acknowledgment()]))
            case "old":
                deliver_old()
            case "cut" if ways is not None:
                old = [*old[-3:], ways] if chance.random() < 0.5 else []
                ways, resets = None, resets + 1
            case "cut":  # There is another connection: one end says hello, then the other welcome.
                hello = own.channel.received
                deliver_old()
                welcome = ends[1 - side].channel.received
                begins = ends[1 - side].channel.resume(hello)
                deliver_old()
                resumed = own.channel.resume(welcome)
                ways = (
                    (Way([begins]), Way([resumed]))
                    if side == 0
                    else (Way([resumed]), Way([begins]))
                )
    for side, own in enumerate(ends):
        own.hear(ends[1 - side].channel.resume(own.channel.received))
    assert min(len(own.said) for own in ends) > 500
    assert ends[0].heard == ends[1].said
    assert ends[1].heard == ends[0].said


def test_what_the_other_end_has_is_not_kept():
    own = Channel()
    for value in range(5):
        own.send(value)
    own.acknowledge(3)
    assert [json.loads(text) for text in own.resume(3).splitlines()] == [[4, 3], [5, 4]]
    assert own.resume(5) == b""
    assert json.loads(own.send(5)) == [6, 5]


def test_a_process_that_was_met_before_is_told_nothing_twice():
    """It knows of more messages than a channel that has begun anew."""
    own, other = Channel(), Channel()
    assert all(other.takes(number) for number in range(1, 8))
    own.resume(other.received)
    assert other.takes(json.loads(own.send("new"))[0])


async def test_who_takes_in_too_little_is_lost_until_the_others_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(channel, "MAX_UNACKNOWLEDGED_BYTES", 1 << 20)
    async with gathered(3) as (first, second, third):
        known = third.mesh.directory.hello.process
        first.mesh._links[2].break_off("cut")
        first.mesh._door.close()  # So that it does not come back.
        for _ in range(30):
            first.mesh.send(2, "put", "key", "x" * (1 << 16))
        assert first.lost == [(2, STOPPED_READING)]
        assert sum(len(own[1]) for own in first.mesh._channels[2]._unacknowledged) == 0
        refusal = first.mesh._refusal(third.mesh.directory.hello)
        assert isinstance(refusal, TemporaryError)
        first.mesh._goes_on_without = {2}.__contains__
        first.mesh.beat()
        assert first.mesh._refusal(third.mesh.directory.hello) is None
        assert first.mesh._channels[2].process == known
        await second.says(third, "there")


async def test_what_is_sent_right_before_and_after_a_reset_comes_once_and_in_order():
    chance, resets = random.Random(2), 0
    async with gathered(3, keys=KEYS) as hosts:
        told: dict[int, list[str]] = {host: [] for host in range(3)}
        while resets < 80:
            host = chance.randrange(3)
            own, other = hosts[host].mesh, chance.choice([*{0, 1, 2} - {host}])
            for _ in range(2):
                own.broadcast("put", str(len(told[host])), "x" * chance.choice([1, 100_000]))
                told[host].append(str(len(told[host])))
                if other in own._links and chance.random() < 0.5:
                    own._links[other].writer.transport.abort()
                    resets += 1
            if chance.random() < 0.3:
                own.beat()
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01]))

        def heard(host: int, source: int) -> list[str]:
            return [said[1] for by, said in hosts[host].received if by == source]

        pairs = [(host, source) for host in range(3) for source in range(3) if host != source]
        await until(lambda: all(len(heard(*pair)) >= len(told[pair[1]]) for pair in pairs))
        await assert_all_connected(hosts)
        for host, source in pairs:
            assert heard(host, source)[: len(told[source])] == told[source]
            assert hosts[host].lost == []


async def test_what_was_told_to_a_process_that_is_gone_is_told_to_no_other():
    async with gathered(2) as (first, second):
        second.end()
        await until(lambda: 1 in first.mesh.missed)
        first.mesh.send(1, "put", "key", "old")
        again = Host(1, 2)
        again.mesh.directory.hello = replace(again.mesh.directory.hello, process=5000)
        assert await again.rejoin(first)
        await first.says(again, "new")
        assert next(said[1] for _, said in again.received if said[0] == "put") == "new"


class Relay:
    """Forwards connections to an address, until it stops without ending those that there are."""

    def __init__(self, address: tuple[str, int]):
        self.address = address
        self._has_stopped = asyncio.Event()

    async def listen(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self._attend, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[:2]

    def stop_forwarding(self) -> None:
        """Swallow all that comes by the connections that there are; later ones work."""
        self._has_stopped.set()
        self._has_stopped = asyncio.Event()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        has_stopped = self._has_stopped
        answers, to_host = await asyncio.open_connection(*self.address)

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while came := await reader.read(1 << 16):
                    if not has_stopped.is_set():
                        writer.write(came)
            if not has_stopped.is_set():
                writer.close()

        await asyncio.gather(forward(reader, to_host), forward(answers, writer))


async def test_a_connection_over_which_nothing_comes_is_made_again_and_nobody_is_lost():
    first, second = Host(0, 2), Host(1, 2)
    await first.listen()
    relay = Relay(first.address)
    address = await relay.listen()
    await second.listen()

    async def join() -> None:
        await second.mesh.join(address, await reach(address, PATIENCE_S))

    await asyncio.gather(first.mesh.gather(), join())
    for host in (first, second):
        host.mesh.directory.outlives = True
    await assert_all_connected([first, second])
    before = [first.mesh._links[1], second.mesh._links[0]]
    relay.stop_forwarding()
    first.mesh.send(1, "put", "into the void", "")
    for _ in range(BEATS_OF_LINK):
        first.mesh.beat()
        second.mesh.beat()
        await asyncio.sleep(0.01)
    assert [first.mesh._links[1], second.mesh._links[0]] == before
    first.mesh.beat()
    second.mesh.beat()
    await until(lambda: (0, ["put", "into the void", ""]) in second.received)
    await assert_all_connected([first, second], "again")
    assert first.lost == second.lost == []
    relay.server.close()


async def test_silence_counts_for_a_connection_before_it_counts_for_its_host():
    async with gathered(2, outlives=False) as (first, second):
        link = first.mesh._links[1]
        for _ in range(BEATS):
            first.mesh.beat()
        # Where a run does not outlive its hosts, none takes its place.
        assert first.mesh._links[1] is link
        assert first.lost == []
        first.mesh.beat()
        assert first.lost == [(1, "no message for 10 s")]
        assert second.lost == []


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
async def test_the_kernel_ends_a_connection_that_is_silent_as_long_as_a_lost_host():
    async with gathered(2) as (first, second):
        for link in (first.mesh._links[1], second.mesh._links[0]):
            own = link.writer.get_extra_info("socket")
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3


async def test_a_process_whose_end_of_a_connection_broke_takes_its_place_at_once(
    capfd: pytest.CaptureFixture[str],
):
    """The other end has not noticed: nothing has come of the break."""
    async with gathered(2) as (first, second):
        before = first.mesh._links[1]
        second.mesh._links.clear()
        second.mesh._keep_calling(0)
        await until(lambda: first.mesh._links.get(1) not in (None, before))
        await assert_all_connected([first, second])
        # Another process of the same number is refused, as long as this one is there.
        [answer] = await answer_to(first, line([hello_of(1, 2, start=1000)]))
        assert answer[:3] == ["refused", 2, "--host-id"]
    assert "host 0 rejected" in capfd.readouterr().err.splitlines()[0]


async def test_of_two_that_come_for_one_place_every_host_lets_the_same_one_in():
    async with without_third() as (first, second):
        for host in (first, second):
            host.mesh._goes_on_without = {2}.__contains__
        links = list[Link]()

        async def answer(host: Host, process: int) -> str:
            links.append(await stranger(host))
            hello = hello_of(2, 3, process=process, comes_back=True)
            links[-1].writer.write(line([hello]))
            return json.loads(await links[-1].reader.readline())[0]

        assert await answer(first, 7000) == "welcome"
        assert await answer(second, 6000) == "welcome"
        assert await answer(first, 6000) == "welcome"
        assert await answer(second, 7000) == "refused"
        assert await answer(first, 7000) == "refused"
        for link in links:
            link.writer.close()


async def test_a_host_that_does_not_answer_is_called_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
):
    pauses = list[float]()
    sleep = asyncio.sleep
    called = asyncio.Event()

    async def fails(host: int, comes_back: bool) -> bool:
        if len(pauses) == 10:
            called.set()
        return len(pauses) == 10

    async def pause(delay_s: float) -> None:
        pauses.append(delay_s)
        await sleep(0)

    monkeypatch.setattr("skippipe_jax.connections.mesh.asyncio.sleep", pause)
    mesh = Host(0, 4).mesh
    mesh._call = fails
    mesh._keep_calling(3)
    mesh._keep_calling(3)  # It is being called.
    await called.wait()
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0])
