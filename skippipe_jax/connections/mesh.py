"""The control plane's connections: every host has one to every other.

Host 0 gathers the hosts: each says hello to it and is told where the others listen, and then each
connects to those before it. Once a run outlives its hosts, a connection that breaks is
made again by either end, and a host that is started again connects to all that live. Heartbeats go
over all connections, so each host judges by itself who is there: whose port nobody listens on any
more has gone, and who is silent for too long may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.directory import HOST_ID, Directory
from skippipe_jax.connections.door import Door
from skippipe_jax.connections.hello import Hello, admitted, refuse
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.links import SENT_NONSENSE, Link, Tasks, open_link, reach
from skippipe_jax.connections.pulse import BEATS, Pulse
from skippipe_jax.connections.reception import Reception

RECONNECT_S = 0.2
"""How long to wait before a host whose connection broke is called again."""

GONE = "its process is gone"


class Mesh:
    """The connections of one host to all others, by their numbers.

    Attributes:
        directory: who they are.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        heartbeat_timeout_s: float,
        connect_timeout_s: float,
        received: Callable[[int, list[Any]], bool],
        lost: Callable[[int, str], None],
        found: Callable[[int], None],
        reception: Reception,
        service: str | None,
        keys: Keys = LOOPBACK_ONLY,
    ):
        """Begin with no connection.

        `received` is called with each message and its source, and says whether a host sends that;
        `lost` with a host that is gone or silent, and how, `found` with one that is heard of again.
        Newcomers come to the `reception`. JAX's coordination service listens on the unix socket
        `service`, if this process has it. All have the `keys`.
        """
        self.directory = Directory(hello)
        self._heartbeat_timeout_s, self._connect_timeout_s = heartbeat_timeout_s, connect_timeout_s
        self._received, self._lost, self._found = received, lost, found
        self._reception, self._keys = reception, keys
        self._links, self._pulse, self._tasks = dict[int, Link](), Pulse(), Tasks()
        self._door = Door(hello, self._refusal, self._come_in, self._receive, service, keys)
        self._parted, self._called, self._is_closed = set[int](), set[int](), False
        self._everybody_came, self._everybody_parted = asyncio.Event(), asyncio.Event()

    @property
    def missed(self) -> frozenset[int]:
        """Those that are gone or silent."""
        return frozenset(self._pulse.missed)

    async def listen(self, addresses: Sequence[str], port: int) -> None:
        """Listen on some addresses of this host."""
        address = await self._door.listen(addresses, port)
        self.directory.hello = replace(self.directory.hello, address=address)

    def close(self) -> None:
        """Listen no more, end all connections, and make none again."""
        self._is_closed = True
        self._door.close()
        for link in self._links.values():
            link.writer.close()

    async def gather(self) -> None:
        """On host 0: wait until all others have said hello, and tell each where they are.

        Raises:
            TemporaryError: if one has not within the time that is given.
        """
        try:
            await self._wait_for_all()
        except TemporaryError as late:
            for link in self._links.values():
                refuse(link, late)
            await self.drained(1.0)
            raise
        self.directory.begin()
        self.broadcast("welcome", self.directory.told())

    async def join(self, coordinator: tuple[str, int], link: Link) -> None:
        """On another host: say hello to host 0 by a link, and then to all hosts before this one.

        Raises:
            InputError: if one of them refuses this host.
            TemporaryError: if one of them does not answer.
        """
        self.directory.addresses[0] = join_address(*link.writer.get_extra_info("peername")[:2])
        await self._greet(0, link, coordinator)
        for host in range(1, self.directory.hello.host):
            address = self.directory.address(host)
            link = await reach(address, self._connect_timeout_s, self._keys)
            await self._greet(host, link, address)
        await self._wait_for_all()
        self.directory.has_begun = True

    async def rejoin(self, link: Link) -> bool:
        """Say hello to a host of a run that has begun, and then to all others that live of it.

        Returns whether it is one: what listens there may be another run, one that is just
        beginning, or a host that hangs.

        Raises:
            InputError: if it refuses this host of its run.
        """
        self.directory.come_back()
        try:
            await self._greet(None, link, ("the run", 0), self._heartbeat_timeout_s)
        except InputError as error:
            if not self.directory.is_another_run(error):
                raise
            return False
        return True

    def send(self, host: int, *message: Any) -> None:
        """Send a message to a host; it is lost if there is no connection."""
        if host in self._links:
            self._links[host].send(*message)

    def broadcast(self, *message: Any) -> None:
        """Send a message to all other hosts."""
        for link in self._links.values():
            link.send(*message)

    def beat(self) -> None:
        """Show all others that this host lives, and tell of those that were silent for too long."""
        self.broadcast("beat")
        for host in self._pulse.beat(set(self.directory.others) - self._parted):
            self._miss(host, f"nothing was heard from it for {self._heartbeat_timeout_s:g} s")

    async def drained(self, timeout_s: float) -> None:
        """Wait until all that was sent has left."""
        await asyncio.gather(*(link.drained(timeout_s) for link in self._links.values()))

    async def part(self, timeout_s: float) -> None:
        """Say farewell, and wait until all others that are there have as well."""
        self.broadcast("farewell")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._everybody_parted.wait(), timeout_s)
        await self.drained(1.0)
        self.close()

    async def _wait_for_all(self) -> None:
        try:
            await asyncio.wait_for(self._everybody_came.wait(), self._connect_timeout_s)
        except TimeoutError:
            missing = [host for host in self.directory.others if host not in self._links]
            raise self.directory.late(missing, self._connect_timeout_s) from None

    async def _greet(
        self, host: int | None, link: Link, address: tuple[str, int], timeout_s: float | None = None
    ) -> None:
        """Say hello by a connection that this host has opened, and read from it.

        `host` is which one should answer, where that is known. Who comes back calls all others.
        """
        if timeout_s is None:
            # Host 0 waits for others, and says at the end of that time who has not come.
            timeout_s = self._connect_timeout_s + 10.0
        told = await admitted(link, self.directory.hello, host, address, timeout_s)
        self.directory.learn(told)
        self._tasks.start(self._read(told.host, told.name, link))
        for other in self.directory.others if self.directory.is_outside else ():
            if other != told.host:  # Each may know of more.
                self._tasks.start(self._call_again(other, comes_back=True))

    async def _come_in(self, hello: Hello, link: Link) -> None:
        """Attend to a host that has been let in, until it has gone."""
        self.directory.addresses[hello.host] = hello.address
        if self.directory.has_begun or self.directory.hello.host != 0:
            link.send("welcome", self.directory.told())
        await self._read(hello.host, hello.name, link)

    async def _receive(self, link: Link, said: Sequence[Any]) -> InputError | None:
        """Attend to a newcomer; who has left is away, though nobody misses it."""
        away = self.missed | (self._parted - self._links.keys())
        return await self._reception.attend(self.directory, away, link, said)

    def _refusal(self, hello: Hello) -> InputError | None:
        is_there = hello.host in self._links and hello.host not in self.missed
        return self.directory.refusal(hello, is_there=is_there)

    async def _read(self, host: int, name: str, link: Link) -> None:
        """Take in what comes over a link, until it ends."""
        if self._is_closed:
            return link.writer.close()
        if (before := self._links.get(host)) is not None:
            before.writer.close()
        self._links[host], self.directory.names[host] = link, name
        self._look_who_is_there()
        self._parted.discard(host)
        try:
            await self._follow(host, link)
        finally:
            link.writer.close()
        if self._is_closed or self._links.get(host) is not link:
            return  # Or another has taken its place.
        del self._links[host]  # As long as nothing has begun, it may be started again.
        if host in self._parted:
            return
        if self.directory.outlives:
            self._tasks.start(self._call_again(host))
        elif self.directory.has_begun:
            self._lost(host, link.ending)

    async def _follow(self, host: int, link: Link) -> None:
        """Take in what comes over a link, until it ends."""
        while True:
            if self._pulse.heard(host):
                self._found(host)
            match await link.receive():
                case None:
                    return
                case ["beat"]:
                    continue
                case ["farewell"]:  # It waits for this host's, and ends the connection then.
                    self._parted.add(host)
                    self._look_who_is_there()
                case [*message] if self._received(host, message):
                    continue
                case _:
                    link.ending = SENT_NONSENSE
                    return

    async def _call_again(self, host: int, *, comes_back: bool = False) -> None:
        """Call a host whose connection broke until it answers, or calls itself.

        Of two hosts that live the later one makes the new connection, or the one that `comes_back`;
        the other only looks whether somebody listens there.
        """
        if host in self._called or host not in self.directory.addresses:
            return
        self._called.add(host)
        while host not in self._links and not self._is_closed:
            # Where the network is cut, or the other thinks that the old connection lives, silence
            # will tell.
            with contextlib.suppress(OSError, TimeoutError, InputError):
                address = self.directory.address(host)
                try:
                    link = await open_link(address, keys=self._keys)
                except ConnectionRefusedError:
                    self._miss(host, GONE)
                    raise
                if self.directory.hello.host > host or comes_back:
                    await self._greet(host, link, address)
                    break
                link.writer.close()
            await asyncio.sleep(RECONNECT_S)
        self._called.discard(host)

    def _miss(self, host: int, how: str) -> None:
        if self._pulse.miss(host):
            self._lost(host, how)
            self._look_who_is_there()

    def _look_who_is_there(self) -> None:
        if self._links.keys() >= set(self.directory.others):
            self._everybody_came.set()
        if self._parted | self.missed >= set(self.directory.others):
            self._everybody_parted.set()


async def let_in(ask: Callable[[], Coroutine[Any, Any, bool]], heartbeat_timeout_s: float) -> bool:
    """What a host answers that is asked to let this one in.

    It is asked again while the connections of the last process with this host's number count there,
    until their silence must have told.

    Raises:
        InputError: if it refuses this host.
    """
    until_s = time.monotonic() + 2 * heartbeat_timeout_s
    while True:
        try:
            return await ask()
        except InputError as error:
            if error.field != HOST_ID or time.monotonic() > until_s:
                raise
        await asyncio.sleep(heartbeat_timeout_s / BEATS)
