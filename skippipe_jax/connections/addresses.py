"""By which addresses hosts reach each other, and on which of them a host listens."""

from __future__ import annotations

import ipaddress
import os
import socket

from skippipe_sched.errors import InputError, TemporaryError, kind_of

from skippipe_jax.config.cluster import require_one_interface

BIND_VARIABLE = "SKIPPIPE_BIND_ADDRESS"
"""The environment variable with the address on which everything of this host listens."""

_LONGEST = 64
"""No numeric address has so many characters."""


def parse_address(field: str, text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(field, text, "not an address", "write HOST:PORT, such as 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def require_numeric(text: str) -> str:
    """Return an address, ``IP:PORT``, unless it has a name that would have to be looked up.

    Raises:
        ValueError: if it is something else.
    """
    if len(text) > _LONGEST or not text.isascii():
        raise ValueError("is no address")
    host, _ = parse_address("address", text)
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and not (address.scope_id or "0").isalnum():
        raise ValueError("is no address")  # Looked up, it would not be refused by an OSError.
    return text


def join_address(host: str, port: int) -> str:
    """Write ``HOST:PORT``, as URLs do for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def chosen_address(configured: str | None) -> str | None:
    """Return the address that the environment, or else the configuration, gives this host.

    Raises:
        InputError: if it is no address of this host.
    """
    address = os.environ.get(BIND_VARIABLE) or configured
    if address is None:
        return None
    field = BIND_VARIABLE if os.environ.get(BIND_VARIABLE) else "cluster.bind_address"
    require_one_interface(address, field)
    try:
        socket.create_server((address, 0), family=_family(address)).close()
    except OSError as error:
        remedy = f"give one that this host has; where hosts differ, set {BIND_VARIABLE} on each"
        raise InputError(field, address, f"not this host's address ({error})", remedy) from error
    return address


def first_address(host: str) -> str:
    """Look up the IP address that a name has on this host, IPv4 where there is one.

    Raises:
        InputError: if it means none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "give a name that this host knows, or an address"
        kind = TemporaryError if error.errno == socket.EAI_AGAIN else InputError
        raise kind("--coordinator", host, f"no address is known ({error})", remedy) from error
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def reachable_address(near: str, coordinator: str) -> str:
    """Find by which address others reach this host, whose way to host 0 begins at `near`.

    That is `near`, but for a machine whose own name means a loopback address to itself (Debian
    writes 127.0.1.1 into /etc/hosts): there it is the address that routes outwards. A coordinator
    that is written as a loopback address, or as localhost, has its hosts on one machine.

    Raises:
        InputError: if this host has no such address.
    """
    if not ipaddress.ip_address(near).is_loopback or _is_loopback_by_itself(coordinator):
        return near
    outward = _outward_address()
    if outward is None:
        raise InputError(
            "--coordinator",
            coordinator,
            f"means {near} on this host, which no other machine can reach",
            f"set {BIND_VARIABLE} to the address of this host that the others reach",
        )
    return outward


def listen_without_delay(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Listen on an address by sockets that send each message at once.

    Nagle's algorithm would hold back a message until the one before it is acknowledged: a round
    trip. `asyncio` turns it off for connections that it opens, but not for those that come by a
    socket of `create_server`: they have the option from the socket that listens.

    Raises:
        OSError: if it cannot be listened on.
    """
    made = socket.create_server((host, port), family=_family(host), backlog=backlog)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen on one address, on which other hosts find host 0."""
    try:
        return listen_without_delay(host, port)
    except OSError as error:
        raise kind_of(error)(
            "--coordinator",
            join_address(host, port),
            f"host 0 cannot listen there ({error})",
            "give an address of host 0 and a free port; where the others know host 0 by an address "
            f"that is not its own, set {BIND_VARIABLE} to its own",
        ) from error


def require_free(field: str, host: str, port: int) -> None:
    """Refuse a port on which another program listens.

    Transfer servers would not complain: two of them share a port, and each gets half of the calls.
    """
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        problem = f"{join_address(host, port)} cannot be listened on ({error})"
        raise kind_of(error)(field, port, problem, "choose free ports, or null for any") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_loopback_by_itself(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _outward_address() -> str | None:
    # Documentation addresses: connecting a UDP socket only asks for the route and sends nothing.
    for family, far in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((far, 9))
            except OSError:
                continue
            return probe.getsockname()[0]
    return None
