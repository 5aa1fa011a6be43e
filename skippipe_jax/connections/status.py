"""Status of a run, as a host sends it to an observer, which is not a host of the run.

An observer sends `["observer", protocol, versions]` as the first line of a connection. The host
answers `["status", status]` once, and closes the connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from skippipe_jax.connections.hello import MOST_HOSTS, HostNumber, ShortText
from skippipe_jax.connections.join_offer import MOST_STAGES, Stages

MOST_LINKS = 1 << 10
"""Maximum number of links in a status; the slowest ones are sent."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
NonNegative = Annotated[float, Meta(ge=0)]
Hosts = Annotated[tuple[HostNumber, ...], Meta(max_length=MOST_HOSTS)]

HostState = Literal["present", "joining", "waited for", "lost", "left"]
Phase = Literal["gathering", "preparing", "training", "waiting", "regrouping", "joining"]


class LinkStatus(msgspec.Struct, frozen=True):
    """Link from one host to another, as the plan assumes it.

    Attributes:
        source: sending host.
        target: receiving host.
        latency_s: one-way latency, in seconds.
        bytes_per_s: bandwidth, in bytes per second.
    """

    source: HostNumber
    target: HostNumber
    latency_s: NonNegative
    bytes_per_s: NonNegative


Links = Annotated[tuple[LinkStatus, ...], Meta(max_length=MOST_LINKS)]


class Progress(msgspec.Struct, frozen=True):
    """Training progress of a host.

    Attributes:
        step: number of completed steps.
        steps: number of steps of the run.
        loss: loss of the last step, in nats per token; None before the first step of a generation
            has ended, or if it is not finite.
        seconds_per_iteration: median of the last iterations without compilation; None before one.
        left_s: estimated seconds for the remaining steps; None before there is an estimate.
    """

    step: Count
    steps: Count
    loss: float | None = None
    seconds_per_iteration: NonNegative | None = None
    left_s: NonNegative | None = None


@dataclass(frozen=True)
class TrainingStatus:
    """Status of the current generation, as a host has it.

    Attributes:
        generation: number of the generation; 0 in a run that is not elastic.
        progress: training progress of the host.
        serving: hosts that serve each stage.
        locations: locations of hosts, as the case names them.
        links: links between hosts, the slowest for an activation first.
        links_are_measured: True if the run has measured the links; else they are from the case.
    """

    generation: int
    progress: Progress
    serving: Sequence[Sequence[int]]
    locations: Mapping[int, str]
    links: tuple[LinkStatus, ...]
    links_are_measured: bool


class HostPresence(msgspec.Struct, frozen=True):
    """State of a host of the run.

    Attributes:
        host: host id.
        state: presence of the host; see docs/watch.md.
        stages: stages that it serves, or would serve if it were present.
        location: location, as the case names it; None if unknown.
        address: ``IP:PORT`` where it listens; None if unknown.
        name: its process and machine; None if it has never connected.
    """

    host: HostNumber
    state: HostState
    stages: Stages
    location: ShortText | None
    address: ShortText | None
    name: ShortText | None


class RunStatus(msgspec.Struct, frozen=True):
    """Status of a run, as one of its hosts has it; docs/watch.md describes each field.

    Attributes:
        run: run directory.
        host: host that sends the status.
        phase: current phase of that host.
        generation: number of the current generation; None in a run that is not elastic.
        leader: current or next leader; None while that host does not know it.
        progress: training progress of that host; None before it trains.
        hosts: all hosts that the run started with, and those that joined since.
        stages: present hosts of each stage; none for a lost stage.
        links, links_are_measured: see `TrainingStatus`.
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
