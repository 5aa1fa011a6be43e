"""Connections between hosts: size-limited messages as JSON lines, in clear or over TLS 1.3."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from skippipe_sched.errors import TemporaryError

from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.waiting import telling, why_unreachable
from skippipe_jax.errors import TlsMismatch

HANDSHAKE = b"\x16"
"""First byte that each end of a TLS connection sends; no message in clear begins with it."""

ALERT = b"\x15\x03\x03\x00\x02\x02\x74"
"""TLS alert "certificate required": the answer to a peer that sends in clear."""

IN_CLEAR = b"\n"
"""Answer to a peer that begins a TLS handshake with a host that has no secret."""

_MOST_AT_ONCE = 1 << 16


class TlsCodec:
    """TLS codec for one end of a connection; it does no input or output itself."""

    def __init__(self, context: ssl.SSLContext):
        """Start as client or server, as the context says."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)

    def handshake(self, data: bytes) -> bool:
        """Continue the handshake with bytes from the peer; return True once it is complete.

        Send the peer the bytes of `waiting` afterwards, also if this raises.

        Raises:
            ssl.SSLError: if the handshake fails.
        """
        self._incoming.write(data)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            return True
        return False

    def outgoing(self) -> bytes:
        """Return the bytes that are ready to be sent to the peer."""
        return self._outgoing.read()

    def decrypted(self, data: bytes) -> bytes:
        """Decrypt bytes from the peer; return nothing while a TLS record is incomplete.

        Raises:
            ssl.SSLError: if the bytes were altered or are not from the peer.
        """
        self._incoming.write(data)
        plaintext = bytearray()
        with suppress(ssl.SSLWantReadError):
            while part := self._tls.read(_MOST_AT_ONCE):
                plaintext += part
        return bytes(plaintext)

    def encrypted(self, data: bytes) -> bytes:
        """Encrypt bytes for the peer."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        return self.outgoing()


MESSAGE_CHARACTERS = 1 << 20
"""Maximum length of a key and its value together, in characters."""

LINE_BYTES = 1 << 16
"""Maximum length of a line. A longer message is split into lines, of which all but the last begin
with `MORE`. A message has at most `MESSAGE_BYTES`: JSON may write a character in twelve bytes."""

INVALID_MESSAGE = "it sent an invalid message"
"""`Link.ending` after an invalid message."""

REQUIRES_SECRET = "it requires a secret"
"""`Link.ending` of a connection in clear to a host that has a secret."""

STOPPED_READING = "it stopped reading messages"
"""`Link.ending` of a connection to a host that does not read."""

MORE = b"+"
MESSAGE_BYTES = 12 * MESSAGE_CHARACTERS

DEPTH = 8
"""Maximum nesting depth of a message, scalars included; valid messages are less deep."""

MOST_WAITING = 2 * MESSAGE_BYTES
"""Maximum size of the send buffer, in bytes. Beyond it the link is broken off."""

BEATS = 10
"""Heartbeats sent per heartbeat timeout. A host that misses more of them counts as silent."""

HELLO_S = 10.0
"""Seconds that a new connection has to identify itself, in one line."""


class Link:
    """One end of a connection, in clear until `start_tls` is called.

    Attributes:
        ending: why the connection ended, once it has.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Wrap an open connection."""
        self.reader = reader
        self.writer = writer
        self.ending = "its connection closed unexpectedly"
        self._unread = bytearray()  # Received and decrypted, not read yet.
        self._codec: TlsCodec | None = None

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Switch to TLS by a handshake; nothing may have been sent in clear before.

        Raises:
            TlsMismatch: if the peer sends in clear.
            ssl.SSLError: if the handshake fails, such as for a wrong certificate.
            ConnectionError: if the peer closes the connection.
        """
        codec, is_through = TlsCodec(context), False
        if context.protocol == ssl.PROTOCOL_TLS_CLIENT:
            codec.handshake(b"")
            self.writer.write(codec.outgoing())
        if await self.first_byte() not in (HANDSHAKE, ALERT[:1], b""):
            raise TlsMismatch
        while not is_through:
            if not await self._wait_for_bytes():
                raise ConnectionResetError("it closed the connection during the TLS handshake")
            try:
                is_through = codec.handshake(self._take(len(self._unread)))
            finally:
                self.writer.write(codec.outgoing())
        self._unread += codec.decrypted(b"")
        self._codec = codec

    async def first_byte(self) -> bytes:
        """Return the next byte without consuming it; nothing if the connection ends."""
        await self._wait_for_bytes()
        return bytes(self._unread[:1])

    async def read(self) -> bytes:
        """Read the next bytes, as many as there are; nothing once the connection has ended."""
        await self._wait_for_bytes()
        return self._take(len(self._unread))

    def write(self, data: bytes) -> None:
        """Send bytes without waiting, encrypted if the link has TLS."""
        self.writer.write(data if self._codec is None else self._codec.encrypted(data))

    def send(self, *message: Any) -> None:
        """Send a message without waiting; do nothing if the connection is closing."""
        self.send_lines(encoded(*message))

    def send_lines(self, lines: bytes) -> None:
        """Send messages that `encoded` returned, as `send` does."""
        if self.writer.is_closing():
            return
        if self.writer.transport.get_write_buffer_size() > MOST_WAITING:
            return self.break_off(STOPPED_READING)
        self.write(lines)

    def break_when_silent(self, timeout_s: float) -> None:
        """Let the kernel end the connection if the peer does not answer for `timeout_s`."""
        if self.writer.is_closing():
            return
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probe_s = max(1, round(timeout_s / 3))
        for option, value in (
            ("TCP_USER_TIMEOUT", round(1000 * timeout_s)),  # No option exists on all systems.
            ("TCP_KEEPIDLE", probe_s),
            ("TCP_KEEPINTVL", probe_s),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def break_off(self, why: str) -> None:
        """End the connection at once, and drop unsent data; `why` becomes `ending`."""
        self.ending = why
        self.writer.transport.abort()

    async def receive(self, most: int = MESSAGE_BYTES) -> Any:
        """Read the next message of at most `most` bytes.

        With `most` 0, a message of several lines is refused. Returns None once the connection
        has ended or after an invalid message; `ending` says which.
        """
        try:
            text = bytearray()
            while (line := await self._line()).startswith(MORE):
                text += line[len(MORE) : -1]
                if not most or len(text) > most:
                    raise ValueError("is not a valid message")
            if not line.endswith(b"\n"):
                self.ending = REQUIRES_SECRET if line == ALERT else self.ending
                return None
            text += line
            message = json.loads(text)
            # Most messages are short, and flat since there are few brackets in them.
            is_flat = text.count(b"[") + text.count(b"{") < DEPTH or _is_flat(message, DEPTH)
            if message is None or not is_flat:
                raise ValueError("is not a valid message")
            return message
        except OSError as error:
            self.ending = f"its connection broke ({error})"
        except (ValueError, RecursionError):  # Too long, not JSON, or nested too deep.
            self.ending = INVALID_MESSAGE
        return None

    async def exactly(self, size: int, timeout_s: float | None = None) -> bytes | None:
        """Read `size` raw bytes that follow a message.

        Returns None if the connection ends before, or if nothing arrives for `timeout_s`.
        """
        try:
            while len(self._unread) < size:
                if not await asyncio.wait_for(self._read_more(), timeout_s):
                    return None
        except TimeoutError:
            self.ending = f"no bytes for {timeout_s:g} s"
            return None
        except OSError as error:
            self.ending = f"its connection broke ({error})"
            return None
        return self._take(size)

    async def heard(self, timeout_s: float) -> Any:
        """Read the next message; return None also if none arrives within `timeout_s`."""
        try:
            return await asyncio.wait_for(self.receive(), timeout_s)
        except TimeoutError:
            self.ending = f"no message for {timeout_s:g} s"
            return None

    async def hello(self, context: ssl.SSLContext | None = None) -> Any:
        """Read the first message of a caller: one line, within `HELLO_S`; None if there is none.

        With a `context`, a TLS handshake has to come before it.

        Raises:
            TlsMismatch: if only one of the two ends uses TLS.
            ssl.SSLError: if the handshake fails.
        """
        try:
            async with asyncio.timeout(HELLO_S):
                first = await self.first_byte()
                if first == HANDSHAKE and context is None:
                    raise TlsMismatch
                if first and first != HANDSHAKE and context is not None:
                    await self.receive(most=0)  # Closing with unread data could reset the answer.
                    raise TlsMismatch
                if context is not None:
                    await self.start_tls(context)
                return await self.receive(most=0)
        except ssl.SSLError:
            raise
        except OSError:
            return None

    async def drained(self, timeout_s: float) -> bool:
        """Wait until the send buffer has drained; set `ending` if it does not in `timeout_s`."""
        try:
            await asyncio.wait_for(self.writer.drain(), timeout_s)
        except OSError:  # Or a `TimeoutError`.
            self.ending = STOPPED_READING
            return False
        return True

    async def _line(self) -> bytes:
        """Read the next line, or its beginning if the connection ends.

        Raises:
            ValueError: if the line is too long.
        """
        while not (end := self._unread.find(b"\n") + 1) and len(self._unread) <= LINE_BYTES:
            if not await self._read_more():
                return self._take(len(self._unread))
        if not 0 < end <= LINE_BYTES + 1:
            raise ValueError("is too long")
        return self._take(end)

    async def _wait_for_bytes(self) -> bool:
        """Wait for unread bytes; return False if the connection ends first."""
        return bool(self._unread) or await self._read_more()

    async def _read_more(self) -> bool:
        """Wait for new bytes; return False if the connection ends first."""
        before = len(self._unread)
        while len(self._unread) == before:
            data = await self.reader.read(LINE_BYTES)
            if not data:
                return False
            self._unread += data if self._codec is None else self._codec.decrypted(data)
        return True

    def _take(self, size: int) -> bytes:
        taken = bytes(self._unread[:size])
        del self._unread[:size]
        return taken


def encoded(*message: Any) -> bytes:
    """Encode a message, which may contain structs, as one line of JSON, or as several if long."""
    text, size = _to_json(message).encode(), LINE_BYTES // 2
    lines = [text[start : start + size] for start in range(0, len(text), size)]
    return b"".join([*(MORE + line + b"\n" for line in lines[:-1]), lines[-1], b"\n"])


async def open_link(
    address: tuple[str, int], timeout_s: float = HELLO_S, keys: Keys = LOOPBACK_ONLY
) -> Link:
    """Connect to a listening host that has the same keys.

    Raises:
        InputError: if it has other keys, or `keys` forbid calling this address.
        OSError: if nothing listens there.
        TimeoutError: if there is no answer within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        await _require_allowed(address, keys)
        link = Link(*await asyncio.open_connection(*address, limit=LINE_BYTES))
        if keys.calling is None:
            return link
        has_tls = False
        try:
            await link.start_tls(keys.calling)
            has_tls = True
        except ssl.SSLCertVerificationError as error:
            raise keys.differs(address) from error
        except TlsMismatch as error:
            raise keys.is_one_sided(address) from error
        finally:
            if not has_tls:
                link.writer.close()
        return link


async def _require_allowed(address: tuple[str, int], keys: Keys) -> None:
    if keys.has_secret:
        return
    try:
        # `getaddrinfo` needs a thread, and none can start while the interpreter exits.
        addresses = [str(ipaddress.ip_address(address[0]))]
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        addresses = [str(own[0]) for *_, own in found]
    for own in addresses:
        keys.require_allowed(own)


async def reach(address: tuple[str, int], timeout_s: float, keys: Keys = LOOPBACK_ONLY) -> Link:
    """Connect to a host that may start later: retry until `timeout_s`, and log long waits.

    Raises:
        InputError: see `open_link`.
        TemporaryError: if it does not answer in time.
    """
    clock = asyncio.get_running_loop()
    deadline, why, where = clock.time() + timeout_s, "no answer", join_address(*address)
    with telling(lambda left_s: f"{where}: {why}; retrying for {left_s:.0f} s", timeout_s):
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
                        f"no connection within {timeout_s:g} s (last error: {why})",
                        "Check that a host of the run listens at this address, and that no "
                        "firewall blocks the port",
                    ) from error
            await asyncio.sleep(min(0.5, max(remaining, 0)))


_to_json = json.JSONEncoder(default=partial(msgspec.to_builtins, str_keys=True)).encode


def _is_flat(value: Any, levels: int) -> bool:
    """Return True if lists and mappings are nested less than `levels` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)


class Tasks:
    """Background tasks, referenced until they end: an event loop holds only weak references."""

    def __init__(self):
        """Start with no tasks."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all tasks that have not ended."""
        for task in self._tasks:
            task.cancel()


Attend = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def each_in_a_task(attend: Attend) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Return a connection callback that runs `attend` in a task which may be cancelled.

    asyncio logs an error when its own connection tasks are cancelled. The connection is closed
    when the task ends.
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
