"""Control plane: every host has one connection to every other host.

Host 0 gathers the hosts: each sends it a hello, receives the addresses of the others, and then
connects to all hosts with smaller ids. In an elastic run, either end reconnects a broken
connection, and a restarted host connects to all live hosts. Messages that were lost with a
connection are sent again, except those of `consensus`, which repeats its messages itself.
Heartbeats use all connections, and each host detects failures on its own: a host is gone if
nothing listens on its port any more, and suspected if it is silent for too long. An elastic run
replaces a silent connection before that, as a network may have dropped its state. In any other run,
a host is also lost when its connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.addresses import (
    BIND_VARIABLE,
    chosen_address,
    first_address,
    join_address,
    parse_address,
    reachable_address,
    require_free,
    require_numeric,
)
from skippipe_jax.connections.channel import Channel
from skippipe_jax.connections.directory import HOST_ID, Directory
from skippipe_jax.connections.hello import MOST_MESSAGES, Hello, admitted, refuse
from skippipe_jax.connections.host_listener import HostListener
from skippipe_jax.connections.jax_relay import listen_for_jax
from skippipe_jax.connections.join_server import JoinServer
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.links import (
    BEATS,
    HELLO_S,
    INVALID_MESSAGE,
    STOPPED_READING,
    Link,
    Tasks,
    open_link,
    reach,
)
from skippipe_jax.connections.waiting import telling

ANSWER_S = 3.0
"""Timeout of a connection attempt to a host's last known address, in seconds."""

BEATS_OF_LINK = BEATS // 3
"""A host that misses more heartbeats is called over a new connection: the old one may be dead."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
"""Seconds before a host is called again: exponential back-off from the first to the longest."""


PROCESS_ENDED = "its process has ended"


class Mesh:
    """Connections of one host to all others, by host id.

    Attributes:
        directory: hosts of the run and their addresses.
        address: IP address on which this host listens.
    """

    def __init__(
        self,
        hello: Hello,
        config: ClusterConfig,
        *,
        received: Callable[[int, list[Any]], bool],
        lost: Callable[[int, str], None],
        found: Callable[[int], None],
        goes_on_without: Callable[[int], bool],
        join_server: JoinServer,
        service: str | None,
        keys: Keys = LOOPBACK_ONLY,
    ):
        """Start with no connections; `config` has the timeouts, addresses and ports.

        `received(host, message)` handles a message, and returns False if it is not valid.
        `lost(host, why)` is called for a host that is gone, is silent or reads nothing, and, unless
        the run is elastic, when its connection ends. `found(host)` is called when it sends again.
        `goes_on_without(host)` returns True if a host is not a member: no messages are kept for it.
        `join_server` serves joiners and observers. JAX's coordination service listens on the unix
        socket `service`, if this process has it. All connections use `keys`.
        """
        self.directory = Directory(hello)
        self.address = "127.0.0.1"
        self._config = config
        self._received, self._lost, self._found = received, lost, found
        self._goes_on_without, self._join_server, self._keys = goes_on_without, join_server, keys
        self._links, self._tasks = dict[int, Link](), Tasks()
        # Silence is counted in heartbeats of this host: one that was itself stopped for a while
        # counts only one more when it continues, and reads what the others have sent.
        self._silent_beats, self._missed = Counter[int](), set[int]()
        self._channels = dict[int, Channel]()
        # Connection attempts that are repeated, by host.
        self._calling = dict[int, asyncio.Task[None]]()
        self._door = HostListener(
            hello, self._refusal, self._serve_host, self._receive, service, keys
        )
        self._parted, self._is_closed = set[int](), False
        self._all_connected, self._all_parted = asyncio.Event(), asyncio.Event()

    @property
    def missed(self) -> frozenset[int]:
        """Hosts that are gone or silent."""
        return frozenset(self._missed)

    @property
    def connected(self) -> frozenset[int]:
        """Hosts with an open connection that are not silent."""
        return frozenset(self._links) - self.missed

    @property
    def left(self) -> frozenset[int]:
        """Hosts that have sent a farewell and closed the connection."""
        return frozenset(self._parted - self._links.keys())

    @property
    def have_all_parted(self) -> bool:
        """True if all other hosts have sent a farewell."""
        return self._parted >= set(self.directory.others)

    async def start(self, coordinator: tuple[str, int], relay: str | None) -> None:
        """Connect to all hosts of a new run, of which host 0 listens at `coordinator`.

        The other hosts listen for JAX at the unix socket `relay`, if any.

        Raises:
            InputError: if a host refuses this one, or this one cannot listen.
            TemporaryError: if a host does not connect in time.
        """
        name, port = coordinator
        chosen = chosen_address(self._config.bind_address)  # It is checked before a long wait.
        if self.directory.hello.host == 0:
            near = chosen or first_address(name)
            self.address = chosen or reachable_address(near, name)
            if self.address != near:
                log.info(
                    f"{name} resolves to {near} on this host, so it also listens on "
                    f"{self.address}. Set {BIND_VARIABLE} to use another address."
                )
            # Hosts on this machine may resolve the name of host 0 to its loopback address.
            await self.listen(list(dict.fromkeys([self.address, near])), port)
            await self.gather()
        else:
            link = await reach(coordinator, self._config.connect_timeout_s, self._keys)
            if relay is not None:
                await listen_for_jax(relay, coordinator, self._keys)
            await self._listen_near(link, name)
            await self.join(coordinator, link)

    async def come_back(self, last_addresses: Sequence[str], name: str) -> bool:
        """Rejoin a run by the last addresses of its hosts; return False if none of them answers.

        `name` is the host part of ``--coordinator``.

        Raises:
            InputError: if a host of the run refuses this one.
        """
        timeout_s = 2 * self._config.heartbeat_timeout_s
        for address in last_addresses:
            own = self.directory.hello.host
            message = f"{address}: an earlier process of host {own} is still connected; retrying"
            with telling(lambda _, message=message: message, timeout_s):
                if await self._come_back_at(parse_address("address", address), name, timeout_s):
                    return True
        return False

    async def _come_back_at(self, address: tuple[str, int], name: str, timeout_s: float) -> bool:
        """Rejoin a run by the address of a host; return False if the host does not answer.

        The host refuses while it counts an earlier process with this host id as connected. That is
        retried for `timeout_s`, in which it must have detected the silence of that process.
        """
        clock = asyncio.get_running_loop()
        until_s = clock.time() + timeout_s
        while True:
            try:
                link = await open_link(address, ANSWER_S, self._keys)
            except OSError:
                return False
            self._door.close()  # Where an earlier attempt listens.
            await self._listen_near(link, name)
            try:
                return await self.rejoin(link)
            except InputError as error:
                if error.field != HOST_ID or clock.time() > until_s:
                    raise
            await asyncio.sleep(self._config.heartbeat_timeout_s / BEATS)

    async def _listen_near(self, link: Link, name: str) -> None:
        """Listen for other hosts, on a host whose port ``--coordinator`` does not give.

        It listens on the chosen address, or where others reach it as the peer of `link` does.
        """
        chosen, own = chosen_address(self._config.bind_address), self.directory.hello
        near = link.writer.get_extra_info("sockname")[0]
        self.address = chosen or reachable_address(near, name)
        port = self._config.port(own.host, own.host, own.hosts)
        require_free("cluster.transfer_port", self.address, port)
        await self.listen([self.address], port)

    async def listen(self, addresses: Sequence[str], port: int) -> None:
        """Listen on addresses of this host; the first one is sent to other hosts."""
        address = await self._door.listen(addresses, port)
        self.directory.hello = replace(self.directory.hello, address=address)

    def close(self) -> None:
        """Stop listening, close all connections, and open no more."""
        self._is_closed = True
        for task in self._calling.values():
            task.cancel()
        self._door.close()
        for link in self._links.values():
            link.writer.close()

    async def gather(self) -> None:
        """Wait on host 0 for the hellos of all others, and send each the addresses of all.

        Raises:
            TemporaryError: if a host does not connect within the connect timeout.
        """
        try:
            await self._wait_for_all()
        except TemporaryError as late:
            for link in self._links.values():
                refuse(link, late)
            await self.drained(1.0)
            raise
        self.directory.begin()
        for host, link in self._links.items():
            link.send("welcome", self.directory.welcome(self._channel(host).received))

    async def join(self, coordinator: tuple[str, int], link: Link) -> None:
        """Send a hello to host 0 over a link, connect to smaller host ids, and wait for the rest.

        Raises:
            InputError: if a host refuses this one.
            TemporaryError: if a host does not answer or connect in time.
        """
        self.directory.addresses[0] = join_address(*link.writer.get_extra_info("peername")[:2])

        def message(left_s: float) -> str:
            connected = f"connected to host 0 at {join_address(*coordinator)}"
            return f"{connected}; waiting for the other hosts, {left_s:.0f} s left"

        with telling(message, self._config.connect_timeout_s):
            await self._shake_hands(0, link, coordinator)
        for host in range(1, self.directory.hello.host):
            address = self.directory.address(host)
            link = await reach(address, self._config.connect_timeout_s, self._keys)
            await self._shake_hands(host, link, address)
        await self._wait_for_all()
        self.directory.has_begun = True

    async def rejoin(self, link: Link) -> bool:
        """Rejoin a run over a link to one of its hosts, then connect to its other live hosts.

        Returns False if the peer is not a host of this run, or of a run that is only starting, or
        hangs.

        Raises:
            InputError: if the peer belongs to this run and refuses this host.
        """
        self.directory.come_back()
        # Unknown if the peer has already closed the connection.
        address = (link.writer.get_extra_info("peername") or ("", 0))[:2]
        try:
            await self._shake_hands(None, link, address, self._config.heartbeat_timeout_s)
        except InputError as error:
            if not self.directory.is_another_run(error):
                raise
            return False
        return True

    def send(self, host: int, *message: Any) -> None:
        """Send a message to a host, over the next connection if there is none or it breaks.

        The message may be lost if the host is not a member, or if it is one of `consensus`.
        """
        link = self._links.get(host)
        if message[:1] == ("control",) or self._goes_on_without(host):
            return None if link is None else link.send(*message)
        channel = self._channel(host)
        lines = channel.send(*message)
        if link is not None:
            link.send_lines(lines)
        if channel.is_lost:
            if link is not None:
                link.break_off(STOPPED_READING)
            self._miss(host, STOPPED_READING)

    def broadcast(self, *message: Any) -> None:
        """Send a message to all other hosts."""
        own = self.directory.hello
        for host in range(own.places if self.directory.outlives else own.hosts):
            if host != own.host:
                self.send(host, *message)

    def beat(self) -> None:
        """Send a heartbeat to all others, and report hosts that were silent for too long.

        In an elastic run, a connection that was silent for some beats is broken off and made again.
        """
        for host, channel in self._channels.items():
            if self._goes_on_without(host):
                channel.forget()
            if host in self._links:
                self._links[host].send("beat", channel.acknowledgment())
        for host in set(self.directory.others) - self._parted:
            self._silent_beats[host] += 1
            is_link_dead = self._silent_beats[host] == BEATS_OF_LINK + 1
            if is_link_dead and self.directory.outlives and host in self._links:
                self._links[host].break_off("no message arrived over it")
            if self._silent_beats[host] > BEATS:
                self._miss(host, f"no message for {self._config.heartbeat_timeout_s:g} s")

    async def drained(self, timeout_s: float) -> None:
        """Wait until all send buffers have drained, at most `timeout_s`."""
        await asyncio.gather(*(link.drained(timeout_s) for link in self._links.values()))

    async def part(self, timeout_s: float) -> None:
        """Send a farewell, wait for those of all other live hosts, and close."""
        self.broadcast("farewell")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_parted.wait(), timeout_s)
        await self.drained(1.0)
        self.close()

    def _channel(self, host: int, process: int | None = None) -> Channel:
        """Return the channel to a host; a new one if `process` is not the process of before."""
        channel = self._channels.setdefault(host, Channel(process))
        if channel.process is None:
            channel.process = process
        elif process not in (None, channel.process):
            channel = self._channels[host] = Channel(process)
        return channel

    async def _wait_for_all(self) -> None:
        def missing() -> list[int]:
            return [host for host in self.directory.others if host not in self._links]

        def message(left_s: float) -> str:
            return f"{self.directory.waits_for(missing())}, {left_s:.0f} s left"

        try:
            with telling(message, self._config.connect_timeout_s):
                await asyncio.wait_for(self._all_connected.wait(), self._config.connect_timeout_s)
        except TimeoutError:
            raise self.directory.late(missing(), self._config.connect_timeout_s) from None

    async def _shake_hands(
        self, host: int | None, link: Link, address: tuple[str, int], timeout_s: float | None = None
    ) -> None:
        """Send a hello over a connection that this host has opened, and start to read from it.

        `host` is the expected peer, or None for any. A rejoining host then calls all others.
        """
        if timeout_s is None:
            # Leave host 0 time to report after its own timeout which hosts are missing.
            timeout_s = self._config.connect_timeout_s + 10.0
        hello = self.directory.hello
        if host is not None:
            channel = self._channel(host)
            hello = replace(hello, met=channel.process, received=channel.received)
        welcome = await admitted(link, hello, host, address, timeout_s)
        self.directory.learn(welcome)
        channel = self._channel(welcome.host, welcome.process)
        self._tasks.start(
            self._use_link(welcome.host, welcome.name, link, channel, welcome.received)
        )
        for other in self.directory.others if self.directory.is_outside else ():
            if other != welcome.host:  # Each may have more addresses.
                self._keep_calling(other, comes_back=True)

    async def _serve_host(self, hello: Hello, link: Link) -> None:
        """Serve an accepted host until its connection ends."""
        self.directory.addresses[hello.host] = hello.address
        channel = self._channel(hello.host, hello.process)
        if self.directory.has_begun or self.directory.hello.host != 0:
            link.send("welcome", self.directory.welcome(channel.received))
        received = hello.received if hello.met == self.directory.hello.process else 0
        await self._use_link(hello.host, hello.name, link, channel, received)

    async def _receive(self, who: str, link: Link, request: Sequence[Any]) -> InputError | None:
        """Serve a joiner or observer; `left` hosts are away too, though not missed."""
        away = self.missed | self.left
        return await self._join_server.serve(who, self.directory, away, link, request)

    def _refusal(self, hello: Hello) -> InputError | None:
        host, channel = hello.host, self._channels.get(hello.host)
        is_there = host in self._links and host not in self.missed
        if channel is not None and channel.process == hello.process:
            is_there = False  # It reconnects: only its end has detected the break.
            if channel.is_lost:
                problem = "this process left too many messages unacknowledged"
                return TemporaryError(HOST_ID, host, problem, "Restart it")
        elif channel is not None and channel.process is not None and self._goes_on_without(host):
            # Of two processes with this host id, all hosts accept the same one, in any order.
            is_there &= channel.process < hello.process
        return self.directory.refusal(hello, is_there=is_there)

    async def _use_link(
        self, host: int, name: str, link: Link, channel: Channel, received: int
    ) -> None:
        """Use a link for a host until it ends; the peer has messages up to `received` already."""
        if self._is_closed or self._channel(host) is not channel:
            return link.writer.close()
        if (before := self._links.get(host)) is not None:
            before.break_off("a new connection replaced it")
        if (calling := self._calling.pop(host, None)) is not None:
            calling.cancel()
        link.break_when_silent(self._config.heartbeat_timeout_s)
        self._links[host], self.directory.names[host] = link, name
        link.send_lines(channel.resume(received))
        self._update_presence()
        self._parted.discard(host)
        try:
            await self._follow(host, link, channel)
        finally:
            link.writer.close()
        if self._is_closed or self._links.get(host) is not link:
            return
        del self._links[host]  # Before the run begins, the host may be started again.
        if host in self._parted:
            return
        if self.directory.outlives:
            self._keep_calling(host)
        elif self.directory.has_begun:
            self._lost(host, link.ending)

    async def _follow(self, host: int, link: Link, channel: Channel) -> None:
        """Handle the messages of a link until it ends."""
        while True:
            if not channel.is_lost:
                self._silent_beats[host] = 0
                if host in self._missed:
                    self._missed.discard(host)
                    self._update_presence()
                    self._found(host)
            message = await link.receive()
            match message:
                case None:
                    return
                case ["beat", int(received)]:
                    channel.acknowledge(received)
                    continue
                case ["where", int(asked)]:
                    address = self.directory.addresses.get(asked)
                    if asked in self._links and address is not None:
                        link.send("listens", asked, address)
                    continue
                case ["listens", int(other), str(address)] if self._learn_address(other, address):
                    continue
                case [int(number), *content] if 0 < number < MOST_MESSAGES:
                    if not channel.takes(number):
                        continue  # Received before, over another connection.
                    if channel.needs_acknowledgment:
                        link.send("beat", channel.acknowledgment())
                    message = content
            match message:
                case ["farewell"]:  # The peer closes after this host's farewell.
                    self._parted.add(host)
                    self._update_presence()
                case [*content] if self._received(host, content):
                    continue
                case _:
                    link.ending = INVALID_MESSAGE
                    return

    def _keep_calling(self, host: int, *, comes_back: bool = False) -> None:
        """Call a host until that succeeds, unless it is being called already."""
        if host in self._calling and not self._calling[host].done():
            return

        async def keep_calling() -> None:
            pause_s = FIRST_PAUSE_S
            while not await self._call(host, comes_back):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S, self._config.heartbeat_timeout_s)

        task = self._calling[host] = asyncio.create_task(keep_calling())
        # No one awaits the task, so its error is raised to the event loop here.
        task.add_done_callback(lambda task: task.cancelled() or task.result())

    async def _call(self, host: int, comes_back: bool) -> bool:
        """Try once to reconnect to a host; return True if no more attempts are needed.

        Of two live hosts, the one with the larger id connects, or the one that `comes_back`. The
        other one only probes whether anything listens there.
        """
        if host in self._links or self._is_closed or host not in self.directory.addresses:
            return True
        is_caller = self.directory.hello.host > host or comes_back
        # In a network partition, missing heartbeats reveal a lost host.
        with contextlib.suppress(OSError, TimeoutError, InputError):
            address = self.directory.address(host)
            try:
                link = await open_link(address, keys=self._keys)
            except ConnectionRefusedError:
                self._miss(host, PROCESS_ENDED)
                raise
            if is_caller and not self._channel(host).is_lost:
                await self._shake_hands(host, link, address, HELLO_S)
                return True
            link.writer.close()
        # The host may have restarted at another address meanwhile, so ask the others for it.
        for link in self._links.values():
            link.send("where", host)
        return False

    def _learn_address(self, host: int, address: str) -> bool:
        """Call a disconnected host at this address from now on; return False for no address."""
        try:
            require_numeric(address)
        except ValueError:
            return False
        if host in self.directory.others and host not in self._links:
            self.directory.addresses[host] = address
        return True

    def _miss(self, host: int, how: str) -> None:
        if host not in self._missed:
            self._missed.add(host)
            self._lost(host, how)
            self._update_presence()

    def _update_presence(self) -> None:
        if self._links.keys() >= set(self.directory.others):
            self._all_connected.set()
        are_all_gone = self._parted | self.missed >= set(self.directory.others)
        (self._all_parted.set if are_all_gone else self._all_parted.clear)()
