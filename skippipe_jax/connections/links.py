"""Connections between hosts: short messages as JSON lines, bounded both ways, perhaps by TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from skippipe_sched.errors import TemporaryError

from skippipe_jax.connections.addresses import join_address, parse_address
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.waiting import telling, why_unreachable
from skippipe_jax.errors import TlsMismatch

HANDSHAKE = b"\x16"
"""How each end of a connection by TLS begins; no message of ours in clear does."""

ALERT = b"\x15\x03\x03\x00\x02\x02\x74"
"""What TLS says to who does not show a certificate: the answer to who speaks in clear."""

IN_CLEAR = b"\n"
"""The answer to who begins by TLS where hosts speak in clear."""

_MOST_AT_ONCE = 1 << 16


class Seal:
    """One end of a connection."""

    def __init__(self, context: ssl.SSLContext):
        """Begin as the side that the context is for."""
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._came, self._goes, server_side=is_server)

    def shake(self, came: bytes) -> bool:
        """Go on with the handshake by what has come from the other end; whether it is through.

        What it has to be sent is `waiting`, whatever becomes of it here.

        Raises:
            ssl.SSLError: if the other end is none to talk to.
        """
        self._came.write(came)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            return True
        return False

    def waiting(self) -> bytes:
        """Return what is to be sent now."""
        return self._goes.read()

    def opened(self, came: bytes) -> bytes:
        """Decrypt what has come from the other end; nothing as long as a part is missing.

        Raises:
            ssl.SSLError: if it has not come from there as it is.
        """
        self._came.write(came)
        said = bytearray()
        with suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_MOST_AT_ONCE):
                said += part
        return bytes(said)

    def sealed(self, said: bytes) -> bytes:
        """Encrypt what the other end is to get."""
        rest = memoryview(said)
        while rest:
            rest = rest[self._tls.write(rest) :]
        return self.waiting()


MESSAGE_CHARACTERS = 1 << 20
"""The longest key and value together."""

LINE_BYTES = 1 << 16
"""The longest line. A message that is longer comes in several, of which all but the last begin with
`MORE`, and takes `MESSAGE_BYTES` at most: JSON may write a character in twelve bytes."""

ANSWER_S = 3.0
"""How long a host may take to answer that is looked for among several."""

SENT_NONSENSE = "it sent what no host sends"
"""How a connection ends from which something else comes than a host says."""

WANTS_SECRET = "it speaks to those only that have its secret"
"""How a connection in clear ends to a host that has one."""

TAKES_NOTHING = "it takes nothing in any more"
"""How a connection ends to a host that does not read."""

MORE = b"+"
MESSAGE_BYTES = 12 * MESSAGE_CHARACTERS

DEPTH = 8
"""How deep lists, mappings and what is in them may lie in one another; no message is as deep."""

MOST_WAITING = 2 * MESSAGE_BYTES
"""So much may wait to be sent [bytes] before the other end counts as taking nothing in any more."""

HELLO_S = 10.0
"""How long a new connection may take to say who it is, in one line."""


class Link:
    """One end of a connection, which is in clear until it is sealed.

    Attributes:
        ending: how it ended, once it has.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Take over an open connection."""
        self.reader = reader
        self.writer = writer
        self.ending = "its connection closed without a farewell"
        self._came = bytearray()  # what is not read yet
        self._seal: Seal | None = None

    async def seal(self, context: ssl.SSLContext) -> None:
        """Go on by TLS, from the handshake on; nothing has been said in clear.

        Raises:
            TlsMismatch: if the other end speaks in clear.
            ssl.SSLError: if it does not show what the context demands.
            ConnectionError: if it ends the connection.
        """
        seal, is_through = Seal(context), False
        if context.protocol == ssl.PROTOCOL_TLS_CLIENT:
            seal.shake(b"")
            self.writer.write(seal.waiting())
        if await self.first_byte() not in (HANDSHAKE, ALERT[:1], b""):
            raise TlsMismatch
        while not is_through:
            if not await self._more_came():
                raise ConnectionResetError("it ended the connection in the handshake")
            try:
                is_through = seal.shake(self._taken(len(self._came)))
            finally:
                self.writer.write(seal.waiting())
        self._came += seal.opened(b"")
        self._seal = seal

    async def first_byte(self) -> bytes:
        """Return the first byte, and leave it to be read; nothing if the connection ends."""
        await self._more_came()
        return bytes(self._came[:1])

    async def read(self) -> bytes:
        """Read what comes next; nothing once the connection has ended."""
        await self._more_came()
        return self._taken(len(self._came))

    def write(self, said: bytes) -> None:
        """Send without waiting."""
        self.writer.write(said if self._seal is None else self._seal.sealed(said))

    def send(self, *message: Any) -> None:
        """Send a message without waiting; to an end that has gone, nothing."""
        self.send_lines(encoded(*message))

    def send_lines(self, lines: bytes) -> None:
        """Send messages as `encoded` gives them, without waiting; to an end that has gone, none."""
        if self.writer.is_closing():
            return
        if self.writer.transport.get_write_buffer_size() > MOST_WAITING:
            return self.break_off(TAKES_NOTHING)
        self.write(lines)

    def break_when_silent(self, timeout_s: float) -> None:
        """Have the kernel end the connection when the other end has not answered for so long."""
        if self.writer.is_closing():
            return
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probe_s = max(1, round(timeout_s / 3))
        for option, value in (
            ("TCP_USER_TIMEOUT", round(1000 * timeout_s)),  # Not on all systems, as the others.
            ("TCP_KEEPIDLE", probe_s),
            ("TCP_KEEPINTVL", probe_s),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def break_off(self, why: str) -> None:
        """End the connection at once, with what waits to be sent."""
        self.ending = why
        self.writer.transport.abort()

    async def receive(self, most: int = MESSAGE_BYTES) -> Any:
        """Read the next message; None once the connection has ended, and `ending` says how."""
        try:
            text = bytearray()
            while (line := await self._line()).startswith(MORE):
                text += line[len(MORE) : -1]
                if not most or len(text) > most:
                    raise ValueError("is no message of ours")
            if not line.endswith(b"\n"):
                self.ending = WANTS_SECRET if line == ALERT else self.ending
                return None
            message = json.loads(text + line)
            if message is None or not _is_flat(message, DEPTH):
                raise ValueError("is no message of ours")
            return message
        except OSError as error:
            self.ending = f"its connection broke ({error})"
        except (ValueError, RecursionError):  # Too long, no JSON, or nested too deep for it.
            self.ending = SENT_NONSENSE
        return None

    async def exactly(self, size: int) -> bytes | None:
        """Read so many bytes that follow a message; None if the connection ends before."""
        try:
            while len(self._came) < size:
                if not await self._receives():
                    return None
        except OSError as error:
            self.ending = f"its connection broke ({error})"
            return None
        return self._taken(size)

    async def heard(self, timeout_s: float) -> Any:
        """Read the next message; None also if none comes in time."""
        try:
            return await asyncio.wait_for(self.receive(), timeout_s)
        except TimeoutError:
            self.ending = f"nothing came for {timeout_s:g} s"
            return None

    async def hello(self, context: ssl.SSLContext | None = None) -> Any:
        """Read the first message of a caller, one line that comes in time; None if it does not.

        With a `context`, what comes before it is a handshake by that.

        Raises:
            TlsMismatch: if it begins with one and should not, or the other way round.
            ssl.SSLError: if it does not show what the context demands.
        """
        try:
            async with asyncio.timeout(HELLO_S):
                first = await self.first_byte()
                if first == HANDSHAKE and context is None:
                    raise TlsMismatch
                if first and first != HANDSHAKE and context is not None:
                    await self.receive(most=0)  # What is not read may cost it the answer.
                    raise TlsMismatch
                if context is not None:
                    await self.seal(context)
                return await self.receive(most=0)
        except ssl.SSLError:
            raise
        except OSError:
            return None

    async def drained(self, timeout_s: float) -> None:
        """Wait until what was sent has left, or the connection has ended."""
        try:
            await asyncio.wait_for(self.writer.drain(), timeout_s)
        except (OSError, TimeoutError):
            self.ending = TAKES_NOTHING

    async def _line(self) -> bytes:
        """Read the next line, or what there is of it when the connection ends.

        Raises:
            ValueError: if it is too long.
        """
        while not (end := self._came.find(b"\n") + 1) and len(self._came) <= LINE_BYTES:
            if not await self._receives():
                return self._taken(len(self._came))
        if not 0 < end <= LINE_BYTES + 1:
            raise ValueError("is too long")
        return self._taken(end)

    async def _more_came(self) -> bool:
        """Wait until there is something to read; whether there is."""
        return bool(self._came) or await self._receives()

    async def _receives(self) -> bool:
        """Wait until more has come to be read; whether it has before the connection ended."""
        before = len(self._came)
        while len(self._came) == before:
            came = await self.reader.read(LINE_BYTES)
            if not came:
                return False
            self._came += came if self._seal is None else self._seal.opened(came)
        return True

    def _taken(self, size: int) -> bytes:
        taken = bytes(self._came[:size])
        del self._came[:size]
        return taken


def encoded(*message: Any) -> bytes:
    """Encode a message as it is sent: in several lines, if it is long."""
    text, size = json.dumps(message).encode(), LINE_BYTES // 2
    lines = [text[start : start + size] for start in range(0, len(text), size)]
    return b"".join([*(MORE + line + b"\n" for line in lines[:-1]), lines[-1], b"\n"])


async def open_link(
    address: tuple[str, int], timeout_s: float = HELLO_S, keys: Keys = LOOPBACK_ONLY
) -> Link:
    """Connect to a host that listens, and that has these keys.

    Raises:
        InputError: if it has others, or this one may not call such an address.
        OSError: if nobody listens.
        TimeoutError: if nothing answers.
    """
    async with asyncio.timeout(timeout_s):
        await _require_allowed(address, keys)
        link = Link(*await asyncio.open_connection(*address, limit=LINE_BYTES))
        if keys.calling is None:
            return link
        is_sealed = False
        try:
            await link.seal(keys.calling)
            is_sealed = True
        except ssl.SSLCertVerificationError as error:
            raise keys.differs(address) from error
        except TlsMismatch as error:
            raise keys.is_one_sided(address) from error
        finally:
            if not is_sealed:
                link.writer.close()
        return link


async def _require_allowed(address: tuple[str, int], keys: Keys) -> None:
    if keys.has_secret:
        return
    try:
        # A thread would look it up, and none is started while the interpreter ends.
        addresses = [str(ipaddress.ip_address(address[0]))]
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        addresses = [str(own[0]) for *_, own in found]
    for own in addresses:
        keys.require_allowed(own)


async def reach(address: tuple[str, int], timeout_s: float, keys: Keys = LOOPBACK_ONLY) -> Link:
    """Connect to a host, which may start later than this one; say so if it has not for long.

    Raises:
        InputError: see `open_link`.
        TemporaryError: if it does not answer.
    """
    clock = asyncio.get_running_loop()
    deadline, why, where = clock.time() + timeout_s, "no answer", join_address(*address)
    with telling(lambda left_s: f"{where}: {why}; tried again for {left_s:.0f} s more", timeout_s):
        while True:
            remaining = deadline - clock.time()
            try:
                return await open_link(address, min(HELLO_S, max(remaining, 0.1)), keys)
            except OSError as error:
                why = why_unreachable(error)
                if remaining <= 0:
                    raise TemporaryError(
                        "--coordinator",
                        where,
                        f"no connection in {timeout_s:g} s (last: {why})",
                        "check that this host is running with this address, that this machine can "
                        "reach it, and that no firewall stops the port",
                    ) from error
            await asyncio.sleep(min(0.5, max(remaining, 0)))


async def answered(address: str, keys: Keys = LOOPBACK_ONLY) -> Link | None:
    """Connect to where a host listened once; None if nobody does.

    Raises:
        InputError: see `open_link`.
    """
    try:
        return await open_link(parse_address("address", address), ANSWER_S, keys)
    except (OSError, TimeoutError):
        return None


def _is_flat(value: Any, levels: int) -> bool:
    """Tell whether lists and mappings are nested no deeper than that."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)


class Tasks:
    """Tasks that nobody waits for, held until they end: an event loop holds them weakly."""

    def __init__(self):
        """Begin with none."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it beside the others."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all that have not ended."""
        for task in self._tasks:
            task.cancel()


Attend = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def each_in_a_task(
    attend: Attend,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Attend to every connection in a task that may be cancelled; those of asyncio complain.

    The connection is closed when the task ends.
    """
    tasks = Tasks()

    async def attended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await attend(reader, writer)
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.start(attended(reader, writer))

    return connected
