"""Addresses on which hosts listen, and by which they reach each other, and cuts of connections."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress

from skippipe_sched.errors import InputError, TemporaryError, error_class

from skippipe_jax.config.cluster import require_specific_address

BIND_VARIABLE = "SKIPPIPE_BIND_ADDRESS"
"""Environment variable with the address on which all servers of this host listen."""

_MAX_CHARACTERS = 64
"""Maximum length of a numeric address, in characters."""


def parse_address(field: str, text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` into the host and the port; raise `InputError` for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(field, text, "is not HOST:PORT", "Write it as in 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def require_numeric(text: str) -> str:
    """Return `text` if it is ``IP:PORT``, an address that needs no name lookup.

    Raises:
        ValueError: if it is anything else.
    """
    if len(text) > _MAX_CHARACTERS or not text.isascii():
        raise ValueError("address is not IP:PORT")
    host, _ = parse_address("address", text)
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and not (address.scope_id or "0").isalnum():
        raise ValueError("address is not IP:PORT")  # Its lookup would raise no OSError.
    return text


def join_address(host: str, port: int) -> str:
    """Format ``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def chosen_address(configured: str | None) -> str | None:
    """Return this host's bind address from the environment, else the configuration, else None.

    Raises:
        InputError: if it is not an address of this host.
    """
    address = os.environ.get(BIND_VARIABLE) or configured
    if address is None:
        return None
    field = BIND_VARIABLE if os.environ.get(BIND_VARIABLE) else "cluster.bind_address"
    require_specific_address(address, field)
    try:
        socket.create_server((address, 0), family=_family(address)).close()
    except OSError as error:
        problem = f"is not an address of this host ({error})"
        remedy = f"Set an address of this host; if the hosts differ, set {BIND_VARIABLE} on each"
        raise InputError(field, address, problem, remedy) from error
    return address


def first_address(host: str) -> str:
    """Resolve a name on this host to an IP address, preferably IPv4.

    Raises:
        InputError: if the name does not resolve.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "Use a name that resolves on this host, or an IP address"
        kind = TemporaryError if error.errno == socket.EAI_AGAIN else InputError
        raise kind("--coordinator", host, f"does not resolve ({error})", remedy) from error
    return str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def reachable_address(near: str, coordinator: str) -> str:
    """Return the address at which others reach this host, which reaches host 0 from `near`.

    It is `near`, except on a machine whose own name resolves to a loopback address (Debian writes
    127.0.1.1 into /etc/hosts): there it is the address of the outward route. If the coordinator
    itself is written as a loopback address or as localhost, all hosts are on one machine.

    Raises:
        InputError: if this host has no such address.
    """
    if not ipaddress.ip_address(near).is_loopback or _is_written_as_loopback(coordinator):
        return near
    outward = _outward_address()
    if outward is None:
        raise InputError(
            "--coordinator",
            coordinator,
            f"resolves to {near} on this host, which other machines cannot reach",
            f"Set {BIND_VARIABLE} to an address at which the other hosts reach this one",
        )
    return outward


def listen_without_delay(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Listen on an address, with Nagle's algorithm off for the accepted connections.

    The algorithm would delay a message by a round trip, until the one before is acknowledged.
    `asyncio` turns it off for connections that it opens. Those that are accepted on a socket of
    `create_server` inherit the option from the listening socket.

    Raises:
        OSError: if this host cannot listen there.
    """
    listener = socket.create_server((host, port), family=_family(host), backlog=backlog)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listening_socket(host: str, port: int, field: str = "--coordinator") -> socket.socket:
    """Listen on an address for other hosts; raise `InputError` if that is not possible.

    `field` is the option or key that gives the address.
    """
    try:
        return listen_without_delay(host, port)
    except OSError as error:
        raise error_class(error)(
            field,
            join_address(host, port),
            f"this host cannot listen on this address ({error})",
            "Use an address of this host and a free port; if the other hosts reach it by another "
            f"address, set {BIND_VARIABLE} to its own",
        ) from error


def require_free(field: str, host: str, port: int) -> None:
    """Raise `InputError` if another program listens on a port.

    Transfer servers would not: two of them can share a port, and each gets half of the calls.
    """
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        problem = f"this host cannot listen on {join_address(host, port)} ({error})"
        raise error_class(error)(field, port, problem, "Set free ports, or null for any") from error


def sever(addresses: Collection[tuple[str, int]]) -> None:
    """Shut down all TCP connections of this process from or to one of these addresses.

    Operations that wait on them fail at once, as if the peer had closed. Listening sockets stay
    open.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):  # on Linux and macOS alike
        # Another thread may close a descriptor, and reuse its number, at any moment.
        with suppress(OSError):
            # Closing a copy of a file's descriptor would release the file's locks.
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.type != socket.SOCK_STREAM:
                    continue
                if {connection.getsockname()[:2], connection.getpeername()[:2]} & {*addresses}:
                    connection.shutdown(socket.SHUT_RDWR)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_written_as_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _outward_address() -> str | None:
    # Documentation addresses: connecting a UDP socket only looks up the route, and sends nothing.
    for family, far in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((far, 9))
            except OSError:
                continue
            return probe.getsockname()[0]
    return None
