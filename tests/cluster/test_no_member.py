"""What a host says that is no member of the generation ends nobody, nor does what none says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.joining import connect
from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.cluster.position import HostPosition
from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.cluster import JoinConfig
from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import Hello
from skippipe_jax.connections.links import Link, reach
from skippipe_jax.consensus.generations import Generation
from tests.connections.meshes import RUN, Host, until
from tests.consensus.exploration import RULES
from tests.harness.ports import free_port

CONFIG = ClusterConfig(heartbeat_timeout_s=60.0, connect_timeout_s=60.0)
NO_MESSAGES = [
    ["verdict", 3, "is lost", 75],
    ["verdict", -1, "is lost", 75],
    ["verdict", 0, "is lost", 0],
    ["verdict", 0, "is lost", 10**30],
    ["verdict", 0, None, 75],
    ["clock", float("nan")],
    ["clock", float("inf")],
    ["clock", 1.0, float("nan")],
    ["clock", "now"],
    ["put", "key"],
    ["put", "key", 1, "value"],
    ["put", 0, "key", "x" * (1 << 20)],
    ["control", ["Commit", 1, 1, [10**400]]],
    ["control", [[["deep"]]]],
    ["control", {}],
    ["fail", "host 0", 2],
    [],
]


def of_cluster(cluster: ClusterConfig) -> Config:
    """The configuration of a run without places beside those of its hosts."""
    return Config(cluster=cluster, join=JoinConfig(places=0))


STORED: dict[int, Generation] = {}
"""What hosts of a test have written of which only the first can."""


def store(generation: Generation) -> Generation:
    return STORED.setdefault(generation.number, generation)


async def on_all(hosts: list[Membership], act: Callable[[Membership], Any]) -> list[Any]:
    """What the hosts do together, each in a thread."""
    return await asyncio.gather(*(asyncio.to_thread(act, host) for host in hosts))


def end(host: Membership) -> None:
    """End a host like a process, without a farewell."""
    host._loop.call_soon_threadsafe(host._mesh.close)
    host._loop.call_soon_threadsafe(host._verdict.cancel)
    host._thread.join()


async def meet() -> tuple[list[Membership], list[Group], Host]:
    """Two hosts of a run of three that outlives its hosts, and the connections of the third."""
    STORED.clear()
    address = ("127.0.0.1", free_port())
    hosts = [Membership(CONFIG, index, 3) for index in range(2)]
    third = Host(2, 3)
    await third.listen()
    entering = on_all(
        hosts, lambda host: host.enter(HostPosition(host.index, 3, address, RUN), None)
    )

    async def join() -> None:
        await third.mesh.join(address, await reach(address, 60.0))

    await asyncio.gather(entering, join())
    third.mesh.directory.outlives = True
    processes = (hosts[0].process, hosts[1].process, 1002)
    teams = await on_all(hosts, lambda host: host.outlive(RULES, store, ((0, 1, 2),), 0, processes))
    assert [team.hosts for team in teams] == [(0, 1, 2), (0, 1, 2)]
    return hosts, teams, third


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes by which processes of hosts would have ended."""
    codes: list[int] = []
    for module in ("membership", "ending", "joining"):
        monkeypatch.setattr(f"skippipe_jax.cluster.{module}.exit_at_once", codes.append)
    return codes


def test_whoever_is_no_member_ends_nobody(ended: list[int], capfd: pytest.CaptureFixture[str]):
    async def live() -> None:
        hosts, teams, third = await meet()
        for message in NO_MESSAGES:
            third.mesh.broadcast(*message)
            await asyncio.sleep(0)
        third.end()
        teams = await on_all(hosts, lambda host: host.next_group(teams[0].generation.number, 60.0))
        assert [team.hosts for team in teams] == [(0, 1), (0, 1)]
        # It comes back, and finds that its input was wrong.
        again, links = Host(2, 3), list[Link]()
        await again.listen()

        def calls_again() -> bool:
            return again.mesh._links.get(0) not in (None, *links)

        address = parse_address("address", hosts[0].control_address)
        assert await again.mesh.rejoin(await reach(address, 60.0))
        for message in (["verdict", 2, "host 2 failed: its input", 2], *NO_MESSAGES):
            # Each connection that has said what no host says is ended, and it calls again.
            await until(calls_again)
            links += [again.mesh._links[0]] if message in NO_MESSAGES else []
            again.mesh.send(0, *message)
        await until(calls_again)
        assert len(links) == len(NO_MESSAGES)
        again.mesh.broadcast("farewell")
        await on_all(hosts, lambda host: barrier(teams[host.index], "still there", 60.0))
        await on_all(hosts, Membership.leave)
        again.end()

    asyncio.run(live())
    assert ended == []
    told = capfd.readouterr().err
    assert told.count("host 2 failed: its input; remaining hosts continue") == 1
    assert "Traceback" not in told


def test_a_member_that_ends_for_what_counts_for_all_ends_all(ended: list[int]):
    async def live() -> None:
        hosts, _, third = await meet()
        listening.extend(parse_address("address", host.control_address) for host in hosts)
        third.mesh.broadcast("verdict", 2, "host 2 failed: its input", 2)
        await on_all(hosts, lambda host: host._thread.join(60.0))
        third.end()

    listening: list[tuple[str, int]] = []
    asyncio.run(live())
    assert ended == [2, 2]
    for address in listening:  # Whoever came now would be attended to by nobody.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.mark.parametrize("is_joiner", [True, False], ids=["joiner", "comes back"])
def test_whatever_ends_who_comes_to_a_run_that_trains_ends_no_other(
    is_joiner: bool, ended: list[int], capfd: pytest.CaptureFixture[str]
):
    joiners = list[Membership]()

    async def live() -> None:
        hosts, teams, third = await meet()
        third.end()
        teams = await on_all(hosts, lambda host: host.next_group(teams[0].generation.number, 60.0))

        def join() -> None:
            address = hosts[1].control_address
            given = {"last_addresses": [address], "run": RUN, "is_joiner": is_joiner}
            with connect(of_cluster(CONFIG), address, 3, 2, **given) as host:
                joiners.append(host)
                host.request_admission(RULES, store)
                assert host.next_group(0, 60.0) is not None
                raise InputError("data.path", "text", "is another here", "Mend that")

        joining = asyncio.create_task(asyncio.to_thread(join))
        while any(host.generation_number == 2 for host in hosts):  # It is taken in after a step.
            for host, team in zip(hosts, teams, strict=True):
                step = host.control._state.standing.applied + 1
                team.contribute(step, (1.0,), lambda totals: None)
            await asyncio.sleep(0.1)
        with pytest.raises(InputError, match="is another here"):
            await joining
        told = ""
        while told.count("is another here. Mend that; remaining hosts continue") < 2:
            told += capfd.readouterr().err
            assert ended in ([], [2]), "its own process alone"
            await asyncio.sleep(0.05)
        await on_all([*hosts, *joiners], end)

    asyncio.run(live())
    assert ended == [2], "its own process alone"


def test_a_newcomer_begins_no_run():
    """Whoever listens there, if nobody goes on with a run."""
    config = of_cluster(ClusterConfig(heartbeat_timeout_s=0.5, connect_timeout_s=60.0))
    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.raises(TemporaryError, match="no host at these addresses has a running job"),
        connect(config, address, 3, 2, last_addresses=[address], run=RUN, is_joiner=True),
    ):
        pass


def test_a_host_comes_back_once_the_connections_of_its_last_process_count_no_more():
    """They may be there for a while, where the machine was cut off or has hung."""

    async def live() -> None:
        hosts, teams, third = await meet()
        again = Membership(ClusterConfig(heartbeat_timeout_s=2.0), 2, 3)
        address = parse_address("address", hosts[0].control_address)
        position, known = HostPosition(2, 3, address, RUN), [hosts[0].control_address]
        entering = asyncio.create_task(asyncio.to_thread(again.enter, position, None, known))
        asked = hosts[0]._mesh.directory
        refused: list[bool] = []
        refusal = asked.refusal

        def watched(hello: Hello, *, is_there: bool) -> InputError | None:
            refused.append(is_there)
            return refusal(hello, is_there=is_there)

        asked.refusal = watched
        await until(lambda: refused[:1] == [True])
        assert not entering.done()
        third.end()
        await entering
        assert again.is_outside
        teams = await on_all(hosts, lambda host: host.next_group(teams[0].generation.number, 60.0))
        assert [team.hosts for team in teams] == [(0, 1), (0, 1)]
        await on_all([*hosts, again], lambda host: host.part(10.0))

    asyncio.run(live())


def test_a_host_that_comes_back_as_the_run_ends_does_not_wait_to_be_taken_in(
    ended: list[int], capfd: pytest.CaptureFixture[str]
):
    async def live() -> None:
        hosts, teams, third = await meet()
        third.end()
        await on_all(hosts, lambda host: host.next_group(teams[0].generation.number, 60.0))
        again = Membership(ClusterConfig(heartbeat_timeout_s=2.0), 2, 3)
        known = hosts[0].control_address
        position = HostPosition(2, 3, parse_address("address", known), RUN)
        await asyncio.to_thread(again.enter, position, None, [known])
        again.request_admission(RULES, store)
        while again._mesh.connected != {0, 1}:
            await asyncio.sleep(0.02)
        leaving = asyncio.create_task(on_all(hosts, Membership.leave))
        await asyncio.to_thread(again._thread.join, 60.0)
        await leaving

    asyncio.run(live())
    assert ended == [75]
    assert "the run has ended: it finished, or was stopped" in capfd.readouterr().err
