"""What a host tells of its run to a machine that observes it, which is no host itself.

An observer says `["observer", protocol, versions]` as the first line of a connection, and is told
`["status", status]`: one answer, after which the connection ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from skippipe_jax.connections.hello import MOST_HOSTS, HostNumber, ShortText
from skippipe_jax.connections.invitation import MOST_STAGES, Stages

MOST_LINKS = 1 << 10
"""So many links are told at most, the slowest."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
NonNegative = Annotated[float, Meta(ge=0)]
Hosts = Annotated[tuple[HostNumber, ...], Meta(max_length=MOST_HOSTS)]

HostState = Literal["present", "joining", "waited for", "lost", "left"]
Phase = Literal["gathering", "preparing", "training", "waiting", "regrouping", "joining"]


class LinkStatus(msgspec.Struct, frozen=True):
    """A link from one host to another, as the plan counts on it.

    Attributes:
        source: the host that sends.
        target: the host that receives.
        latency_s: of one way, in seconds.
        bytes_per_s: its bandwidth.
    """

    source: HostNumber
    target: HostNumber
    latency_s: NonNegative
    bytes_per_s: NonNegative


Links = Annotated[tuple[LinkStatus, ...], Meta(max_length=MOST_LINKS)]


class Progress(msgspec.Struct, frozen=True):
    """How far a host has trained.

    Attributes:
        step: how many steps are done.
        steps: how many the run has.
        loss: of the last one, in nats per token; None before a step has ended since the hosts that
            train were last others, or if it is not finite.
        seconds_per_iteration: the median of the last ones that compiled nothing; None before one.
        left_s: the seconds that the steps take which are left; None before that is known.
    """

    step: Count
    steps: Count
    loss: float | None = None
    seconds_per_iteration: NonNegative | None = None
    left_s: NonNegative | None = None


@dataclass(frozen=True)
class TrainingStatus:
    """What a host knows of the run since the hosts that train were last others.

    Attributes:
        generation: the number of theirs; 0 where hosts are always the same.
        progress: how far it has trained.
        serving: the hosts that serve each stage.
        locations: of hosts, as the case names them.
        links: between hosts, those first that take longest for an activation.
        links_are_measured: whether the run has measured them; else the case says them.
    """

    generation: int
    progress: Progress
    serving: Sequence[Sequence[int]]
    locations: Mapping[int, str]
    links: tuple[LinkStatus, ...]
    links_are_measured: bool


class HostPresence(msgspec.Struct, frozen=True):
    """A host of the run.

    Attributes:
        host: its number.
        state: whether it is there; see docs/watch.md.
        stages: those that it serves, or would if it were there.
        location: as the case names it; None where that is not known.
        address: ``IP:PORT`` where it listens; None where that is not known.
        name: its process and machine; None if it was never there.
    """

    host: HostNumber
    state: HostState
    stages: Stages
    location: ShortText | None
    address: ShortText | None
    name: ShortText | None


class RunStatus(msgspec.Struct, frozen=True):
    """A run, as one of its hosts knows it; docs/watch.md says what each field is.

    Attributes:
        run: its folder.
        host: the one that tells this.
        phase: what it is about.
        generation: the number of that whose hosts train; None where hosts are always the same.
        leader: the host that leads, or will; None on a host that does not know it yet.
        progress: how far that host has trained; None before it trains.
        hosts: all that the run begins with, and those that have come since.
        stages: the hosts of each that are present; a lost one has none.
        links, links_are_measured: as of `TrainingStatus`.
    """

    run: ShortText
    host: HostNumber
    phase: Phase
    generation: Count | None
    leader: HostNumber | None
    progress: Progress | None
    hosts: Annotated[tuple[HostPresence, ...], Meta(max_length=MOST_HOSTS)]
    stages: Annotated[tuple[Hosts, ...], Meta(max_length=MOST_STAGES)]
    links: Links
    links_are_measured: bool

    def to_json(self) -> dict[str, Any]:
        """Return this as it is sent."""
        return msgspec.to_builtins(self)

    @classmethod
    def parse(cls, given: Any) -> RunStatus:
        """Read the status in a message.

        Raises:
            ValueError: if it is none.
        """
        return msgspec.convert(given, cls)
