"""Hosts of a run on one event loop, with real connections between them, and strangers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import psutil

from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.addresses import join_address, parse_address
from skippipe_jax.connections.hello import Hello, RunIdentity
from skippipe_jax.connections.join_server import JoinServer
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys, Secret
from skippipe_jax.connections.links import LINE_BYTES, Link, TlsCodec, reach
from skippipe_jax.connections.mesh import Mesh
from skippipe_jax.connections.status import HostPresence, LinkStatus, Progress, RunStatus

RUN = RunIdentity({"run_dir": "runs/a", "model": "0123"}, {"train": "4567"}, {"jax": "1.0"})
STATUS = RunStatus(
    run="runs/a",
    host=0,
    phase="training",
    generation=3,
    leader=1,
    progress=Progress(step=40, steps=100, loss=2.5, seconds_per_iteration=2.0, left_s=120.0),
    hosts=(
        HostPresence(0, "present", (0,), "Iowa", "10.0.0.1:8476", "host 0 (pid 7 on a)"),
        HostPresence(1, "present", (0,), "Tokyo", "10.0.0.2:4001", "host 1 (pid 8 on b)"),
        HostPresence(2, "lost", (1,), None, None, None),
    ),
    stages=((0, 1), ()),
    links=(LinkStatus(0, 1, 0.0655, 2.5e6), LinkStatus(1, 0, 0.0655, 4e7)),
    links_are_measured=True,
)
"""What hosts of these tests tell observers."""

PATIENCE_S = 30.0


def keys_of(text: str) -> Keys:
    """The keys that follow from a secret."""
    return Keys(Secret("cluster.secret", "a file", text * 40))


KEYS, OTHER_KEYS = keys_of("a"), keys_of("b")


class Host:
    """One of them: its connections, and what came over them."""

    living: ClassVar[set[Host]] = set()
    """Those that listen."""

    def __init__(
        self,
        host: int,
        hosts: int,
        run: RunIdentity = RUN,
        connect_timeout_s: float = 10.0,
        keys: Keys = LOOPBACK_ONLY,
        status: Callable[[], RunStatus] = lambda: STATUS,
    ):
        self.keys = keys
        self.received: list[tuple[int, list[Any]]] = []
        self.lost: list[tuple[int, str]] = []
        self.join_server = JoinServer(status)
        self.mesh = Mesh(
            Hello(host, hosts, 1000 + host, f"host {host}", "", run),
            ClusterConfig(heartbeat_timeout_s=10.0, connect_timeout_s=connect_timeout_s),
            received=self._received,
            lost=lambda host, how: self.lost.append((host, how)),
            found=lambda host: None,
            goes_on_without=lambda host: False,
            join_server=self.join_server,
            service=None,
            keys=keys,
        )

    def _received(self, source: int, message: list[Any]) -> bool:
        self.received.append((source, message))
        return message[:1] in (["put"], ["control"])

    @property
    def address(self) -> tuple[str, int]:
        return parse_address("address", self.mesh.directory.hello.address)

    async def listen(self) -> Host:
        self.living.add(self)
        await self.mesh.listen(["127.0.0.1"], 0)
        return self

    async def gather(self) -> asyncio.Task[None]:
        """Listen, and return the task that waits for the others."""
        await self.listen()
        return asyncio.create_task(self.mesh.gather())

    async def join(self, first: Host) -> None:
        await self.listen()
        await self.mesh.join(first.address, await reach(first.address, PATIENCE_S, self.keys))

    async def rejoin(self, first: Host) -> bool:
        """Listen, and come back to the run of another host; return whether it is its run."""
        await self.listen()
        return await self.mesh.rejoin(await reach(first.address, PATIENCE_S, self.keys))

    def end(self) -> None:
        """End like a process, without a farewell and for good."""
        self.living.discard(self)
        self.mesh.close()

    @classmethod
    def end_all(cls) -> None:
        """End all that listen."""
        for host in [*cls.living]:
            host.end()

    async def says(self, host: Host, word: str) -> None:
        """Return when what this host says has come to another, once they are connected."""
        own, other = self.mesh.directory.hello.host, host.mesh.directory.hello.host

        def has_come() -> bool:
            self.mesh.send(other, "put", word, "")
            return (own, ["put", word, ""]) in host.received

        await until(has_come)


@asynccontextmanager
async def gathered(
    count: int, *, outlives: bool = True, keys: Keys = LOOPBACK_ONLY
) -> AsyncIterator[list[Host]]:
    """Hosts that have met, of a run that outlives them."""
    hosts = [Host(host, count, keys=keys) for host in range(count)]
    try:
        gathering = await hosts[0].gather()
        await asyncio.gather(gathering, *(host.join(hosts[0]) for host in hosts[1:]))
        for host in hosts:
            host.mesh.directory.outlives = outlives
        yield hosts
    finally:
        for host in hosts:
            host.end()


@asynccontextmanager
async def without_third(keys: Keys = LOOPBACK_ONLY) -> AsyncIterator[tuple[Host, Host]]:
    """The first two hosts of three, once they have lost the third."""
    async with gathered(3, keys=keys) as (first, second, third):
        await assert_all_connected([first, second])
        third.end()
        await until(lambda: {2} == first.mesh.missed == second.mesh.missed)
        yield first, second


async def assert_all_connected(hosts: list[Host], word: str = "there") -> None:
    """Every host is heard by every other."""
    pairs = [(one, other) for one in hosts for other in hosts if one is not other]
    await asyncio.gather(*(one.says(other, word) for one, other in pairs))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def address_of(host: Host) -> str:
    return join_address(*host.address)


async def stranger(host: Host) -> Link:
    """A connection to a host, over which nothing has been said."""
    return Link(*await asyncio.open_connection(*host.address, limit=LINE_BYTES))


async def answer_to(host: Host, content: bytes) -> list[Any]:
    """All that a host answers to who sends this, until it ends the connection."""
    link = await stranger(host)
    try:
        link.writer.write(content)
        async with asyncio.timeout(PATIENCE_S):
            lines = await link.reader.read()
    except ConnectionError:
        return []
    finally:
        link.writer.close()
    return [json.loads(line) for line in lines.splitlines()]


def hello_of(host: int, hosts: int, **others: Any) -> dict[str, Any]:
    """What a host of the run says first."""
    hello = Hello(host, hosts, 2000 + host, f"host {host}", "127.0.0.1:9", RUN)
    return replace(hello, **others).to_json()


def first_flight() -> bytes:
    """How a host begins that has `KEYS`."""
    assert KEYS.calling is not None
    codec = TlsCodec(KEYS.calling)
    codec.handshake(b"")
    return codec.outgoing()


def line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def descriptors() -> int:
    return psutil.Process().num_fds()
