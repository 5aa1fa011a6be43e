"""How hosts introduce themselves, and what makes them hosts of one run.

Whatever another host says of itself is bounded and checked here before it is believed.
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
from skippipe_jax.connections.links import WANTS_SECRET, Link

MOST_CHARACTERS = 4096
"""The longest text, such as a path."""

MOST_PARTS = 1024
"""So many texts there may be by name."""

MOST_HOSTS = 1 << 17
"""So many hosts there may be, with those that may come."""

ShortText = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
Texts = Annotated[Mapping[ShortText, ShortText], Meta(max_length=MOST_PARTS)]
HostNumber = Annotated[int, Meta(ge=0, lt=MOST_HOSTS)]
HostCount = Annotated[int, Meta(ge=0, lt=1 << 16)]

_UNPRINTABLE = {code: None for code in [*range(32), 127]}


def number(given: Any, end: int) -> int:
    """Return a whole number from 0 on, below `end`; `ValueError` for anything else."""
    return msgspec.convert(given, Annotated[int, Meta(ge=0, lt=end)])


def texts(given: Any) -> Mapping[str, str]:
    """Return a few short texts by name; `ValueError` for anything else."""
    return msgspec.convert(given, Texts)


def printable(text: str) -> str:
    """Return a text that is printed without what a terminal would take for a command."""
    return text.encode("ascii", "backslashreplace").decode().translate(_UNPRINTABLE)


def require_below(end: int, *hosts: int) -> None:
    """Refuse numbers of hosts of which a run has less, by a `ValueError`."""
    if max(hosts) >= end:
        raise ValueError(f"has host {max(hosts)}, where there are at most {end}")


PROTOCOL = 7
"""Hosts of another number do not understand each other. Those of the first say no number."""

NUMBER_BITS = 48
"""How large the number of a process is."""

MOST_MESSAGES = 1 << 62
"""So many messages one process does not send to another."""

OWN = "skippipe-jax"
VERSIONED = (OWN, "jax")
"""The packages of which all hosts need the same version: they compute the same, to the last bit."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the installed versions of the packages that hosts must have alike.

    That of a commit is the release before which it lies: an installation of a clone keeps the
    number of the commit at which it was made, whatever is pulled later.
    """
    found = {}
    for package in VERSIONED:
        try:
            version = importlib.metadata.version(package)
            found[package] = version.partition(".dev")[0] if package == OWN else version
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"  # Run where its files are.
    return found


ProcessNumber = Annotated[int, Meta(ge=0, lt=1 << NUMBER_BITS)]
MessageNumber = Annotated[int, Meta(ge=0, lt=MOST_MESSAGES)]


@dataclass(frozen=True)
class Run:
    """What hosts of one run have in common.

    Attributes:
        identity: what makes it this run, and not another one, by what it is about.
        settings: all that the run was told, by key. Hosts that gather compare that later, so that
            all of them end when one was told something else.
        versions: of the packages that matter.
    """

    identity: Texts = field(default_factory=dict)
    settings: Texts = field(default_factory=dict)
    versions: Texts = field(default_factory=versions)


@dataclass(frozen=True)
class Hello:
    """Who a host is, as it begins a connection.

    Attributes:
        host: which of the hosts it is.
        hosts: how many the run begins with.
        process: a number that no other process has.
        name: for readers.
        address: ``IP:PORT`` where it listens.
        run: which run it is of.
        start: tells this start of the run from others, once it has begun: the process of host 0.
        comes_back: whether it means a run that has begun, of which it was lost.
        spare: how many hosts may come to the run beside those.
        met: the process of the host that is called, as it was when they were connected last.
        received: the number of the last message that has come from that process.
    """

    host: HostNumber
    hosts: HostCount
    process: ProcessNumber
    name: ShortText
    address: ShortText
    run: Run
    start: ProcessNumber = 0
    comes_back: bool = False
    spare: HostCount = 0
    met: ProcessNumber | None = None
    received: MessageNumber = 0

    @property
    def places(self) -> int:
        """How many hosts there may be."""
        return self.hosts + self.spare

    def to_json(self) -> dict[str, Any]:
        """Return this as the first line of a connection."""
        return {"protocol": PROTOCOL} | asdict(self)

    @classmethod
    def parse(cls, given: Any) -> Hello:
        """Read the hello in a line.

        Raises:
            ValueError: if it is none of this protocol.
        """
        match given:
            case {"protocol": protocol, **own} if protocol == PROTOCOL:
                told = msgspec.convert(own, cls)
                require_below(told.places, told.host)
                return replace(
                    told, name=printable(told.name), address=require_numeric(told.address)
                )
        raise ValueError("is no hello")

    def unlike(self, other: Hello) -> InputError | None:
        """Explain why the other is no host of this one's run, if it is none.

        The settings count for a host that comes back alone.
        """
        pairs = [
            ("", self.run.identity, other.run.identity, _OTHER_RUN),
            ("the version of ", self.run.versions, other.run.versions, _OTHER_VERSION),
        ]
        if other.comes_back:
            pairs.append(("", self.run.settings, other.run.settings, _OTHER_SETTINGS))
        for prefix, own, theirs, remedy in pairs:
            for part in sorted(own.keys() | theirs.keys()):
                if own.get(part) != theirs.get(part):
                    problem = (
                        f"that is host {other.host}'s, and host {self.host} has {own.get(part)!r}"
                    )
                    return InputError(f"{prefix}{part}", theirs.get(part), problem, remedy)
        if other.hosts != self.hosts:
            problem = f"host {self.host} was started with --hosts {self.hosts}"
            return InputError("--hosts", other.hosts, problem, "give all hosts the same number")
        if other.spare != self.spare:
            problem = f"host {self.host} has {self.spare} places to spare"
            return InputError("join.places", other.spare, problem, _OTHER_SETTINGS)
        return None


_OTHER_RUN = (
    "Start all hosts of a run with the same configuration, and another run at an address of its own"
)
_OTHER_VERSION = "Install the same version on all hosts"
_TOLD = 1000
"""So much of what another host says of an error is believed."""

_OTHER_SETTINGS = "Start the host again with the configuration that the others run by"


@dataclass(frozen=True)
class Welcome:
    """What a host is told that is taken in.

    Attributes:
        host: which of the hosts tells it.
        name: of that host, for readers.
        start: see `Hello`; 0 before the run has begun.
        addresses: where hosts listen, as far as that host knows.
        process: the number of its process.
        received: that of the last message that has come there from the process that it welcomes.
    """

    host: HostNumber
    name: ShortText
    start: ProcessNumber
    addresses: dict[HostNumber, ShortText]
    process: ProcessNumber
    received: MessageNumber

    def to_json(self) -> dict[str, Any]:
        """Return this as it is sent."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def parse(cls, given: Any, hosts: int) -> Welcome:
        """Read the welcome of a host of a run of so many, at most.

        Raises:
            ValueError: if it is none.
        """
        told = msgspec.convert(given, cls, str_keys=True)
        require_below(hosts, told.host, *told.addresses)
        for address in told.addresses.values():
            require_numeric(address)
        return replace(told, name=printable(told.name))


def other_protocol(theirs: Any, host: int) -> InputError:
    """Make the error for a host that speaks another protocol."""
    problem = f"host {host} speaks {PROTOCOL}"
    return InputError("the protocol between hosts", theirs, problem, _OTHER_VERSION)


def refuse(link: Link, error: InputError) -> None:
    """Tell a host that it cannot take part, and why; `admitted` reads it there."""
    parts = error.field, error.value, error.problem, error.remedy
    link.send("refused", error.exit_code, *parts)


def refusal_in(answer: Any) -> InputError | None:
    """Read the error in an answer, if the other host has refused this one by it."""
    match answer:
        case ["refused", int(code), str(about), value, str(problem), str(remedy)]:
            kind = TemporaryError if code == TemporaryError.exit_code else InputError
            return kind(about[:_TOLD], value, problem[:_TOLD], remedy[:_TOLD])
    return None


async def admitted(
    link: Link, own: Hello, host: int | None, address: tuple[str, int], timeout_s: float
) -> Welcome:
    """Say hello by a connection that this host has opened, and wait for the other's welcome.

    `host` is which one was called at `address`, where that is known. The connection is closed
    unless the host at its other end takes this one in.

    Raises:
        InputError: the other host's, if it refuses this one.
        TemporaryError: if it does not answer, or something else does.
    """
    is_admitted = False
    try:
        link.send(own.to_json())
        told = await _welcome(link, own, address, timeout_s)
        _require_called(own, told, host, address)
        is_admitted = True
    finally:
        if not is_admitted:
            link.writer.close()
    return told


async def _welcome(link: Link, own: Hello, address: tuple[str, int], timeout_s: float) -> Welcome:
    try:
        answer = await asyncio.wait_for(link.receive(), timeout_s)
    except TimeoutError:
        answer, link.ending = None, f"no answer in {timeout_s:g} s"
    if (refusal := refusal_in(answer)) is not None:
        raise refusal
    match answer:
        case ["welcome", told]:
            try:
                return Welcome.parse(told, own.places)
            except ValueError as error:
                link.ending = f"its welcome {error}"
        case None if link.ending == WANTS_SECRET:
            raise LOOPBACK_ONLY.is_one_sided(link.writer.get_extra_info("peername")[:2])
    raise TemporaryError(
        "--coordinator",
        join_address(*address),
        f"what listens there is not host 0 of a run, or ended the connection ({link.ending})",
        "look at the output of host 0, and whether another program uses this port",
    )


def _require_called(own: Hello, told: Welcome, host: int | None, address: tuple[str, int]) -> None:
    """Refuse a welcome that is not that of the host which was called."""
    is_another = told.host == own.host if host is None else told.host != host
    is_of_another_start = own.start and told.start and own.start != told.start
    # Whoever comes back learns of the others from all that it finds.
    is_first = host == 0 and not own.start
    if is_another or is_of_another_start or (is_first and len(told.addresses) < own.hosts):
        raise TemporaryError(
            "--coordinator",
            join_address(*address),
            f"host {told.host} answers there, and not as one of this start of the run",
            "look which processes of earlier starts are still running, and end them",
        )
