"""Listener of a host: accepts and authenticates incoming connections.

Until a peer has identified itself it may send one line within `HELLO_S`, after a TLS handshake if
the run has a secret. There are at most `MAX_UNIDENTIFIED` of these connections. One more replaces
the oldest connection of the address that has the most.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.connections.addresses import join_address, listening_socket
from skippipe_jax.connections.hello import PROTOCOL, Hello, other_protocol, refuse
from skippipe_jax.connections.jax_relay import serve_jax
from skippipe_jax.connections.join_server import REQUESTERS
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import ALERT, IN_CLEAR, LINE_BYTES, Link, each_in_a_task
from skippipe_jax.errors import TlsMismatch

MAX_UNIDENTIFIED = 32
"""Maximum number of connections that have not identified themselves yet."""

RELAYED_PER_HOST = 4
"""Relayed JAX connections allowed per host, more than JAX opens."""

MAX_LOGGED_REJECTIONS = 100
"""Maximum number of refusals that are logged."""


class HostListener:
    """Listener that accepts connections from hosts of the run and its guests, and no others."""

    def __init__(
        self,
        own: Hello,
        refusal: Callable[[Hello], InputError | None],
        serve_host: Callable[[Hello, Link], Coroutine[None, None, None]],
        receive: Callable[[str, Link, Sequence[Any]], Coroutine[None, None, InputError | None]],
        service: str | None,
        keys: Keys,
    ):
        """Create a listener of the host `own`; it listens nowhere yet.

        `refusal` returns why the host of a hello is refused, or None. `serve_host` serves an
        accepted host until its connection ends. `receive` serves a joiner or an observer, or
        returns why it is refused. JAX connections are relayed to the unix socket `service`, if this
        process has one. All connections use `keys`.
        """
        self._host, self._most_relayed = own.host, RELAYED_PER_HOST * own.hosts
        self._refusal, self._serve_host, self._service = refusal, serve_host, service
        self._receive, self._keys = receive, keys
        self._unidentified: dict[Link, str] = {}
        self._without_keys: set[tuple[str, str]] = set()
        self._relayed = 0
        self._rejections = 0
        self._servers: list[asyncio.Server] = []

    async def listen(self, addresses: Sequence[str], port: int) -> str:
        """Listen on addresses of this host; return ``IP:PORT`` of the first.

        Raises:
            InputError: if `keys` forbid an address, or it cannot be listened on.
        """
        attend = each_in_a_task(self._attend)
        for address in addresses:
            self._keys.require_allowed(address)
            if (warning := self._keys.warning(address)) is not None:
                log.warning(warning)
            field = "--coordinator" if self._host == 0 else "cluster.bind_address"
            listener = listening_socket(address, port, field)
            port = listener.getsockname()[1]
            server = await asyncio.start_server(attend, sock=listener, limit=LINE_BYTES)
            self._servers.append(server)
        return join_address(addresses[0], port)

    def close(self) -> None:
        """Stop listening."""
        while self._servers:
            self._servers.pop().close()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve an incoming connection, which is closed when this returns."""
        link = Link(reader, writer)
        try:
            first = await self._first_line(link)
        except TlsMismatch:
            link.writer.write(ALERT if self._keys.has_secret else IN_CLEAR)
            own, its = ("one", "no") if self._keys.has_secret else ("none", "a")
            return self._log_once(link, f"it has {its} secret, and this run has {own}")
        except ssl.SSLError:
            return self._log_once(link, "it does not have the secret of this run")
        match first:
            case [{"protocol": protocol} as raw]:
                await self._accept_host(link, protocol, raw)
            case [str(who), *request] if who in REQUESTERS:
                if (refusal := await self._receive(who, link, request)) is not None:
                    self._refuse(link, REQUESTERS[who], refusal)
            case ["join", *_]:  # The first line of protocol 1.
                self._refuse(link, "a host", other_protocol(1, self._host))
            case ["jax"] if self._service is not None and self._relayed < self._most_relayed:
                self._relayed += 1
                try:
                    await serve_jax(self._service, link)
                finally:
                    self._relayed -= 1
            case None if reader.at_eof():
                return  # Another host only probed whether this one listens.
            case _:
                self._log_rejection(link, "a connection", "it is not a host of this run")

    async def _first_line(self, link: Link) -> object:
        """Read the first message of a stranger; None if it is not valid, or takes too long.

        Raises:
            TlsMismatch, ssl.SSLError: if the stranger does not have this host's keys.
        """
        if len(self._unidentified) == MAX_UNIDENTIFIED:
            # Hosts of the run send their hello at once, so they are not the oldest. A distant
            # host, whose handshake takes longer, is the only one at its address.
            [(most, _)] = Counter(self._unidentified.values()).most_common(1)
            oldest = next(other for other, address in self._unidentified.items() if address == most)
            del self._unidentified[oldest]
            oldest.break_off("it did not identify itself in time")
        self._unidentified[link] = _address_of(link)
        try:
            return await link.hello(self._keys.listening)
        finally:
            self._unidentified.pop(link, None)

    async def _accept_host(self, link: Link, protocol: object, raw: object) -> None:
        """Accept the host of a hello, or refuse it with the reason."""
        if protocol != PROTOCOL:
            return self._refuse(link, "a host", other_protocol(protocol, self._host))
        try:
            hello = Hello.parse(raw)
        except ValueError as error:
            return self._log_rejection(link, "a connection", f"its hello is not valid: {error}")
        refusal = self._refusal(hello)
        if refusal is not None:
            return self._refuse(link, hello.name, refusal)
        await self._serve_host(hello, link)

    def _refuse(self, link: Link, who: str, error: InputError) -> None:
        """Send a host why it is refused; log it here unless a later attempt may succeed."""
        refuse(link, error)
        if not isinstance(error, TemporaryError):
            self._log_rejection(link, who, str(error))

    def _log_once(self, link: Link, why: str) -> None:
        """Log a peer without this host's keys, once for each address and reason."""
        attempt = _address_of(link), why
        if attempt not in self._without_keys and len(self._without_keys) < MAX_LOGGED_REJECTIONS:
            self._without_keys.add(attempt)
            self._log_rejection(link, "a connection", why)

    def _log_rejection(self, link: Link, who: str, why: str) -> None:
        self._rejections += 1
        if self._rejections <= MAX_LOGGED_REJECTIONS:
            peer = link.writer.get_extra_info("peername")
            log.info(f"host {self._host} rejected {who} from {peer}: {why}")
        if self._rejections == MAX_LOGGED_REJECTIONS:
            log.info(f"host {self._host}: further rejections are not logged")


def _address_of(link: Link) -> str:
    """Return the IP address of the peer, or an empty string if the link is closed already."""
    return (link.writer.get_extra_info("peername") or ("", 0))[0]
