"""Handshake between hosts, and the checks that both belong to the same run.

All that another host sends about itself is size-limited and validated here before it is used.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import join_address, require_numeric
from skippipe_jax.connections.keys import LOOPBACK_ONLY
from skippipe_jax.connections.links import REQUIRES_SECRET, Link

MOST_CHARACTERS = 4096
"""Maximum length of a text, such as a path, in characters."""

MOST_PARTS = 1024
"""Maximum number of entries in a mapping of texts."""

MOST_HOSTS = 1 << 17
"""Maximum number of hosts, extra hosts included."""

ShortText = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
Texts = Annotated[Mapping[ShortText, ShortText], Meta(max_length=MOST_PARTS)]
HostNumber = Annotated[int, Meta(ge=0, lt=MOST_HOSTS)]
HostCount = Annotated[int, Meta(ge=0, lt=1 << 16)]

_UNPRINTABLE = {code: None for code in [*range(32), 127]}


def ascii_text(text: str) -> str:
    """Return a text as ASCII, without control characters that a terminal would interpret."""
    return text.encode("ascii", "backslashreplace").decode().translate(_UNPRINTABLE)


def require_below(end: int, *hosts: int) -> None:
    """Raise `ValueError` if one of these host ids is `end` or more."""
    if max(hosts) >= end:
        raise ValueError(f"host {max(hosts)} is out of range for {end} hosts")


PROTOCOL = 12
"""Version of the protocol; hosts need the same one. Hosts of version 1 send no number."""

NUMBER_BITS = 48
"""Size of a process number, in bits."""

MOST_MESSAGES = 1 << 62
"""Bound on the number of messages from one process to another, which is never reached."""

OWN = "skippipe-jax"
VERSIONED = (OWN, "jax")
"""Packages of which all hosts need the same version, so that results agree to the last bit."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the installed versions of the packages in `VERSIONED`.

    A development version is cut to its next release: an editable installation keeps the number of
    the commit at which it was made, whatever is pulled later.
    """
    installed = {}
    for package in VERSIONED:
        try:
            version = importlib.metadata.version(package)
            installed[package] = version.partition(".dev")[0] if package == OWN else version
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"  # Run from a clone without installation.
    return installed


ProcessNumber = Annotated[int, Meta(ge=0, lt=1 << NUMBER_BITS)]
MessageNumber = Annotated[int, Meta(ge=0, lt=MOST_MESSAGES)]


@dataclass(frozen=True)
class RunIdentity:
    """Identity and settings that all hosts of a run share.

    Attributes:
        identity: values that distinguish this run from others, by field.
        settings: all settings of the run, by key. Hosts that start together compare them later, so
            that all of them end if one has other settings.
        versions: versions of the packages in `VERSIONED`.
    """

    identity: Texts = field(default_factory=dict)
    settings: Texts = field(default_factory=dict)
    versions: Texts = field(default_factory=versions)


@dataclass(frozen=True)
class Hello:
    """First message of a connection between hosts, by which the caller identifies itself.

    Attributes:
        host: id of the sender.
        hosts: number of hosts that the run starts with.
        process: random number that identifies the sender's process.
        name: printable name of the sender.
        address: ``IP:PORT`` where it listens.
        run: run that it belongs to.
        start: process number of host 0, which identifies a start of the run; 0 before it begins.
        comes_back: True if the sender rejoins a run that has begun.
        extra_hosts: maximum number of extra hosts.
        met: process number that the called host had at their last connection, if any.
        received: number of the last message received from that process.
    """

    host: HostNumber
    hosts: HostCount
    process: ProcessNumber
    name: ShortText
    address: ShortText
    run: RunIdentity
    start: ProcessNumber = 0
    comes_back: bool = False
    extra_hosts: HostCount = 0
    met: ProcessNumber | None = None
    received: MessageNumber = 0

    @property
    def places(self) -> int:
        """Maximum number of hosts, extra hosts included."""
        return self.hosts + self.extra_hosts

    def to_json(self) -> dict[str, Any]:
        """Return the first line of a connection."""
        return {"protocol": PROTOCOL} | asdict(self)

    @classmethod
    def parse(cls, raw: Any) -> Hello:
        """Parse and validate a hello.

        Raises:
            ValueError: if it is not a hello of this protocol.
        """
        match raw:
            case {"protocol": protocol, **own} if protocol == PROTOCOL:
                hello = msgspec.convert(own, cls)
                require_below(hello.places, hello.host)
                name, address = ascii_text(hello.name), require_numeric(hello.address)
                return replace(hello, name=name, address=address)
        raise ValueError("the protocol differs")

    def unlike(self, other: Hello) -> InputError | None:
        """Return the error if the other host belongs to another run, else None.

        Settings are compared only for a host that rejoins.
        """
        pairs = [
            ("", self.run.identity, other.run.identity, _OTHER_RUN),
            (" version", self.run.versions, other.run.versions, _OTHER_VERSION),
        ]
        if other.comes_back:
            pairs.append(("", self.run.settings, other.run.settings, _OTHER_SETTINGS))
        for suffix, own, theirs, remedy in pairs:
            for part in sorted(own.keys() | theirs.keys()):
                if own.get(part) != theirs.get(part):
                    problem = (
                        f"host {other.host} has this, and host {self.host} has {own.get(part)!r}"
                    )
                    return InputError(f"{part}{suffix}", theirs.get(part), problem, remedy)
        if other.hosts != self.hosts:
            problem = f"host {self.host} was started with --hosts {self.hosts}"
            return InputError("--hosts", other.hosts, problem, "Give all hosts the same number")
        if other.extra_hosts != self.extra_hosts:
            problem = f"host {other.host} has this, and host {self.host} has {self.extra_hosts}"
            return InputError("join.places", other.extra_hosts, problem, _OTHER_SETTINGS)
        return None


_OTHER_RUN = (
    "Start all hosts of a run with the same configuration, and another run with another "
    "--coordinator"
)
_OTHER_VERSION = "Install the same version on all hosts"
_OTHER_SETTINGS = "Restart the host with the configuration of the other hosts"

_MAX_ERROR_CHARACTERS = 1000
"""Maximum length of each text of an error from another host, in characters."""


@dataclass(frozen=True)
class Welcome:
    """Answer to the hello of an accepted host.

    Attributes:
        host: id of the sender.
        name: printable name of the sender.
        start: see `Hello`; 0 before the run has begun.
        addresses: listening addresses of all hosts that the sender has.
        process: process number of the sender.
        received: number of the last message that it has received from the accepted process.
    """

    host: HostNumber
    name: ShortText
    start: ProcessNumber
    addresses: dict[HostNumber, ShortText]
    process: ProcessNumber
    received: MessageNumber

    @classmethod
    def parse(cls, raw: Any, hosts: int) -> Welcome:
        """Parse and validate a welcome in a run of at most `hosts` hosts.

        Raises:
            ValueError: if it is not a valid welcome.
        """
        welcome = msgspec.convert(raw, cls, str_keys=True)
        require_below(hosts, welcome.host, *welcome.addresses)
        for address in welcome.addresses.values():
            require_numeric(address)
        return replace(welcome, name=ascii_text(welcome.name))


def other_protocol(theirs: Any, host: int) -> InputError:
    """Return the error for a peer with another version of the protocol."""
    problem = f"host {host} has version {PROTOCOL}"
    return InputError("protocol version", theirs, problem, _OTHER_VERSION)


def refuse(link: Link, error: InputError) -> None:
    """Send a refusal with its reason; the peer reads it by `refusal_in`."""
    parts = error.field, error.value, error.problem, error.remedy
    link.send("refused", error.exit_code, *parts)


def refusal_in(answer: Any) -> InputError | None:
    """Return the error in an answer, if it is a refusal."""
    match answer:
        case ["refused", int(code), str(key), value, str(problem), str(remedy)]:
            kind = TemporaryError if code == TemporaryError.exit_code else InputError
            key, problem, remedy = (text[:_MAX_ERROR_CHARACTERS] for text in (key, problem, remedy))
            return kind(key, value, problem, remedy)
    return None


async def admitted(
    link: Link, own: Hello, host: int | None, address: tuple[str, int], timeout_s: float
) -> Welcome:
    """Send a hello over a connection that this host has opened, and return the welcome.

    `host` is the expected host at `address`, or None for any. The connection is closed unless the
    peer accepts this host.

    Raises:
        InputError: if the peer refuses this host; the error is the peer's.
        TemporaryError: if the peer does not answer in time, or is not the expected host.
    """
    is_admitted = False
    try:
        link.send(own.to_json())
        welcome = await _welcome(link, own, address, timeout_s)
        _require_expected(own, welcome, host, address)
        is_admitted = True
    finally:
        if not is_admitted:
            link.writer.close()
    return welcome


async def _welcome(link: Link, own: Hello, address: tuple[str, int], timeout_s: float) -> Welcome:
    try:
        answer = await asyncio.wait_for(link.receive(), timeout_s)
    except TimeoutError:
        answer, link.ending = None, f"no answer within {timeout_s:g} s"
    if (refusal := refusal_in(answer)) is not None:
        raise refusal
    match answer:
        case ["welcome", raw]:
            try:
                return Welcome.parse(raw, own.places)
            except ValueError as error:
                link.ending = f"its welcome is not valid: {error}"
        case None if link.ending == REQUIRES_SECRET:
            raise LOOPBACK_ONLY.is_one_sided(link.writer.get_extra_info("peername")[:2])
    raise TemporaryError(
        "--coordinator",
        join_address(*address),
        f"is not host 0 of a run, or closed the connection ({link.ending})",
        "Check the output of host 0, and whether another program uses this port",
    )


def _require_expected(
    own: Hello, welcome: Welcome, host: int | None, address: tuple[str, int]
) -> None:
    """Raise `TemporaryError` if a welcome is not from the expected host and start of the run."""
    is_another = welcome.host == own.host if host is None else welcome.host != host
    is_of_another_start = own.start and welcome.start and own.start != welcome.start
    # Host 0 welcomes hosts of a new start only when it has all addresses. A rejoining host
    # collects addresses from every host that it reaches.
    is_first = host == 0 and not own.start
    if is_another or is_of_another_start or (is_first and len(welcome.addresses) < own.hosts):
        raise TemporaryError(
            "--coordinator",
            join_address(*address),
            f"host {welcome.host} answered, but not as the expected host of this start of the run",
            "Stop the processes of earlier starts that are still running",
        )
