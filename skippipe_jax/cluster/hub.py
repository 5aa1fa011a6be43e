"""The connections between the hosts of a run: each has one, to the hub on host 0.

Heartbeats and small messages travel on it as JSON lines. The hub passes messages on to all hosts
and decides, once for all, who is lost: a host whose connection ends without a farewell (its process
died), that is silent for the heartbeat timeout (it hangs, or the network is cut), or that says
itself that it failed.

Where hosts are distributed, JAX's coordination service gets its connections through the same port,
relayed here: JAX's client aborts its process within milliseconds after its connection to a dying
host 0 closes, so each host keeps the near end of that relay open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.cluster.addresses import join_address, listening_socket
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE

BEATS = 10
"""Heartbeats sent per heartbeat timeout, and how many may stay away before a host is lost."""

MESSAGE_CHARACTERS = 1 << 17
"""The longest key and value together."""

_LINE_BYTES = 16 * MESSAGE_CHARACTERS
"""The longest line; JSON may write a character in twelve bytes."""

HELLO_S = 10.0
"""How long a new connection may take to say what it is."""


class Link:
    """One end of the connection between a host and the hub."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Take over an open connection."""
        self.reader = reader
        self.writer = writer
        self.ending = "its connection closed without a farewell"
        self._silent_beats = 0

    def send(self, *message: str | int | float) -> None:
        """Send a message without waiting; to an end that has gone, nothing."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> list[Any] | None:
        """The next message, or None once the connection has ended, then `ending` says how."""
        try:
            line = await self.reader.readline()
        except OSError as error:
            self.ending = f"its connection broke ({error})"
            return None
        self._silent_beats = 0
        return json.loads(line) if line.endswith(b"\n") else None

    def is_silent(self) -> bool:
        """Count one more beat of this end; say whether the other let too many pass in silence."""
        self._silent_beats += 1
        return self._silent_beats > BEATS


class Hub:
    """Host 0's other half: it connects the hosts, passes messages on, and judges who is lost."""

    def __init__(
        self,
        count: int,
        service_path: str | None,
        *,
        heartbeat_timeout_s: float,
        connect_timeout_s: float,
    ):
        """Begin for `count` hosts; JAX's service, if any, is on the unix socket `service_path`."""
        self._count = count
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._service_path = service_path
        self._links: dict[int, Link] = {}
        self._names: dict[int, str] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._left: set[int] = set()
        self._culprit: int | None = None

    async def open(self, addresses: Sequence[str], port: int) -> Link:
        """Listen for the other hosts, and return host 0's own link to this hub."""
        attend = each_in_a_task(self._welcome)
        self._servers = [
            await asyncio.start_server(
                attend, sock=listening_socket(address, port), limit=_LINE_BYTES
            )
            for address in addresses
        ]
        inner, outer = socket.socketpair()
        connection = await asyncio.open_connection(sock=inner, limit=_LINE_BYTES)
        self._own = asyncio.create_task(self._welcome(*connection))
        loop = asyncio.get_running_loop()
        loop.call_later(self._connect_timeout_s, self._give_up_gathering)
        return Link(*await asyncio.open_connection(sock=outer, limit=_LINE_BYTES))

    def beat(self) -> None:
        """Show every host that this one lives, and judge those that have been silent too long."""
        for index, link in self._links.items():
            link.send("beat")
            if link.is_silent() and index not in self._left:
                self._judge(index, f"is lost: {silence(self._heartbeat_timeout_s)}")

    async def disperse(self, timeout_s: float) -> None:
        """Wait until the other hosts, but for a lost one, have closed their connections."""
        going = [task for i, task in self._serving.items() if i not in (0, self._culprit)]
        if going:
            await asyncio.wait(going, timeout=timeout_s)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            hello = await asyncio.wait_for(link.receive(), HELLO_S)
        except (TimeoutError, ValueError, RecursionError):  # Brackets may nest too deep for JSON.
            hello = None
        match hello:
            case ["join", int(index), int(count), str(name)]:
                await self._serve(index, count, name, link)
            case ["jax"] if self._service_path is not None:
                await self._relay_jax(link, self._service_path)
            case _:
                peer = writer.get_extra_info("peername")
                say(f"host 0 refused a connection from {peer}: it is no host of this run")
        writer.close()

    async def _serve(self, index: int, count: int, name: str, link: Link) -> None:
        """Attend to one host until its connection ends."""
        if count != self._count:
            problem = f"host 0 was started with --hosts {self._count}"
            remedy = "give all hosts the same number"
            return _refuse(link, InputError("--hosts", count, problem, remedy))
        if len(self._links) == count:
            problem = "the run has begun without this host, or is at its end"
            return _refuse(link, TemporaryError("--host-id", index, problem, "Start it again"))
        if index in self._links:
            problem = f"{self._names[index]} has joined with this id"
            return _refuse(
                link, InputError("--host-id", index, problem, "give every host its own id")
            )
        task = asyncio.current_task()
        assert task is not None
        self._links[index], self._names[index], self._serving[index] = link, name, task
        if len(self._links) == count:
            self._broadcast("welcome", self._names[0])
        while (message := await link.receive()) is not None:
            match message:
                case ["put", str(), str()]:
                    self._broadcast(*message)
                case ["clock", float(sent)]:
                    link.send("clock", sent, time.time())
                case ["fail", str(reason), int(code)]:
                    self._judge(index, f"failed: {reason}", code)
                case ["hub lost", str(reason)]:
                    self._judge(0, f"is lost: {reason}")
                case ["leave"]:
                    self._left.add(index)
        if len(self._links) < count:
            del self._links[index]  # nothing has begun: it may be started again
        elif index not in self._left:
            self._judge(index, f"is lost: {link.ending}")

    async def _relay_jax(self, host: Link, service_path: str) -> None:
        """Connect a host's JAX client with JAX's service in this process."""
        reader, writer = await _open_once_there(service_path)
        there = asyncio.create_task(_pump(host.reader, writer))
        back = asyncio.create_task(_pump(reader, host.writer))
        await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        writer.close()

    def _broadcast(self, *message: str | int) -> None:
        for link in self._links.values():
            link.send(*message)

    def _judge(self, culprit: int, text: str, code: int = LOST_HOST_EXIT_CODE) -> None:
        """Pass the verdict unless there is one: who goes after the first goes because of it."""
        if self._culprit is None:
            self._culprit = culprit
            self._broadcast("verdict", culprit, f"{self._names[culprit]} {text}", code)

    def _give_up_gathering(self) -> None:
        missing = sorted(set(range(self._count)) - set(self._links))
        if missing:
            late = TemporaryError(
                "--hosts",
                self._count,
                f"of these, {missing} did not connect within {self._connect_timeout_s:g} s",
                "start every host with its own --host-id and the same --coordinator and --hosts, "
                "or give them more time in cluster.connect_timeout_s",
            )
            for link in self._links.values():
                _refuse(link, late)


def _refuse(link: Link, error: InputError) -> None:
    """Tell a host that it cannot take part, and why; `admission` reads it there."""
    parts = error.field, error.value, error.problem, error.remedy
    link.send("refused", error.exit_code, *parts)


async def reach(
    address: tuple[str, int], timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the hub, which may start later than this host."""
    deadline = time.monotonic() + timeout_s
    while True:
        remaining = deadline - time.monotonic()
        try:
            connecting = asyncio.open_connection(*address, limit=_LINE_BYTES)
            return await asyncio.wait_for(connecting, min(HELLO_S, max(remaining, 0.1)))
        except (OSError, TimeoutError) as error:
            if remaining <= 0:
                raise TemporaryError(
                    "--coordinator",
                    join_address(*address),
                    f"no connection in {timeout_s:g} s (last: {str(error) or 'no answer'})",
                    "check that host 0 is running with this address, that this machine can reach "
                    "it, and that no firewall stops the port",
                ) from error
        await asyncio.sleep(min(0.5, max(remaining, 0)))


async def admission(link: Link, coordinator: tuple[str, int], timeout_s: float) -> str:
    """Wait until all hosts are there; returns the name of host 0.

    Raises:
        InputError: the hub's, if it refuses this host.
        TemporaryError: if it does not answer, or something else does.
    """
    try:
        answer = await asyncio.wait_for(link.receive(), timeout_s)
    except (TimeoutError, ValueError):
        answer = None
    match answer:
        case ["welcome", str(name)]:
            return name
        case ["refused", int(code), str(field), value, str(problem), str(remedy)]:
            kind = TemporaryError if code == TemporaryError.exit_code else InputError
            raise kind(field, value, problem, remedy)
    raise TemporaryError(
        "--coordinator",
        join_address(*coordinator),
        "what listens there ended the connection, or is not host 0 of a run",
        "look at the output of host 0, and whether another program uses this port",
    )


async def relay_jax(
    coordinator: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Connect this host's JAX client with JAX's service on host 0, by way of the hub."""
    try:
        far_reader, far_writer = await asyncio.open_connection(*coordinator)
    except OSError:
        # Host 0 is gone, which the link to it tells; closing this end would abort the process.
        await asyncio.get_running_loop().create_future()
        return
    far_writer.write(b'["jax"]\n')
    back = asyncio.create_task(_pump(far_reader, writer))
    # When the far end closes this one stays open, for the same reason.
    await _pump(reader, far_writer)
    far_writer.close()
    await back
    writer.close()


def silence(timeout_s: float) -> str:
    """What is said of a host that was silent for so long."""
    return f"nothing was heard from it for {timeout_s:g} s"


def say(text: str) -> None:
    """Print to stderr, whatever the main thread holds."""
    # Not through sys.stderr, whose lock the main thread may hold for ever.
    os.write(2, f"{text}\n".encode())


def each_in_a_task(
    attend: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Attend to every connection in a task that may be cancelled; those of asyncio complain."""
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(attend(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return connected


async def _open_once_there(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(0.05)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until the reader's connection ends; those for a closed writer are dropped."""
    with contextlib.suppress(ConnectionError):  # an end like any other
        while data := await reader.read(1 << 16):
            if not writer.is_closing():
                writer.write(data)
