"""Assignment of a service's stages to hosts, and routes of groups through these hosts.

The planner chooses both from measurements of the hosts and of the links between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from skippipe_sched.problem.plan import DATA_STAGE
from skippipe_sched.serving.case import FRONT, ServingCase
from skippipe_sched.serving.placing import place
from skippipe_sched.serving.routing import routes

SKIP, WAIT, FAIL = WHEN_LOST = ("skip", "wait", "fail")
"""Treatments of sequences while no host holds a stage: skip it, wait for it, or fail."""

BYTES_PER_S = 1e9
"""Assumed bandwidth of links before the first measurement; later, the median of the others."""
BLOCK_S = 1e-3
"""Assumed seconds of one block before the first measurement."""


class Leg(NamedTuple):
    """Visit of a host, and the stages that run there one after the other."""

    host: int
    stages: tuple[int, ...]


Route = tuple[Leg, ...]
"""Visits of a group after the data stage, in order; the front may be among the hosts."""


def stages_of(route: Route) -> tuple[int, ...]:
    """Return the stages of a route in order."""
    return tuple(stage for leg in route for stage in leg.stages)


def via_front(route: Route, is_avoided: Callable[[int, int], bool]) -> Route:
    """Return a route with a detour via the front where a host does not reach the next."""
    legs = [*route[:1]]
    for before, leg in pairwise(route):
        if is_avoided(before.host, leg.host):
            legs.append(Leg(FRONT, ()))
        legs.append(leg)
    return tuple(legs)


def route_parts(route: Route) -> list[Route]:
    """Split a route into visits of the front and the runs of visits between them."""
    parts: list[Route] = []
    for is_front, legs in groupby(route, lambda leg: leg.host == FRONT):
        part = tuple(legs)
        parts += [(leg,) for leg in part] if is_front else [part]
    return parts


class LinkSpeed(NamedTuple):
    """Speed of the link to another host; None is not measured yet.

    Attributes:
        round_trip_s: smoothed round-trip time of a heartbeat in seconds.
        bytes_per_s: bandwidth towards the other host.
    """

    round_trip_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class HostView:
    """Properties of a host from which stages and routes are chosen.

    Attributes:
        room_bytes: bytes available for its stages together.
        most_stages: most stages that it may hold; None for as many as fit.
        block_s: seconds of one block in a step; None before the first measurement.
        held: the stages that it holds.
    """

    room_bytes: float
    most_stages: int | None
    block_s: float | None
    held: tuple[int, ...]


def in_series(first: LinkSpeed, second: LinkSpeed) -> LinkSpeed:
    """Return the speed of two links, the second of which sends what has arrived completely."""
    round_trip_s = (first.round_trip_s or 0.0) + (second.round_trip_s or 0.0)
    seconds_per_byte = sum(1.0 / (link.bytes_per_s or BYTES_PER_S) for link in (first, second))
    return LinkSpeed(round_trip_s, 1.0 / seconds_per_byte)


class Planner:
    """Planner of the stages and routes of the hosts of one model."""

    def __init__(
        self,
        layers: Sequence[int],
        stage_bytes: Sequence[float],
        groups: int,
        slots: int,
        activation_bytes: float,
    ):
        """Plan for stages with these numbers of blocks and bytes, their caches included."""
        self._layers, self._stage_bytes = np.array(layers), np.array(stage_bytes, float)
        self._groups, self._slots, self._activation_bytes = groups, slots, activation_bytes

    def place(
        self,
        hosts: Mapping[int, HostView],
        between: Callable[[int, int], LinkSpeed],
        is_first: bool = False,
    ) -> dict[int, tuple[int, ...]]:
        """Choose the stages of hosts; hosts with stages get more only for lost stages.

        The front gets stages other than the data stage only in the first assignment (`is_first`).

        Raises:
            InputError: if the front has no room for the data stage.
        """
        numbers = sorted(hosts)
        held = [[*hosts[host].held] for host in numbers]
        assigned = place(self._case(hosts, between), held=None if is_first else held)
        chosen = {}
        for host, stages in zip(numbers, assigned, strict=True):
            most = hosts[host].most_stages
            # The planner limits bytes; as stages differ little in size, this seldom drops any.
            chosen[host] = stages if most is None else stages[: max(most, len(hosts[host].held))]
        return chosen

    def route(
        self, hosts: Mapping[int, HostView], between: Callable[[int, int], LinkSpeed], group: int
    ) -> Route:
        """Choose the route of one group through all held stages."""
        numbers = sorted(hosts)
        held = [[*hosts[host].held] for host in numbers]
        hosts_by_stage = routes(self._case(hosts, between), held, tries=0)[group]
        visits = [
            (numbers[index], stage)
            for stage, index in enumerate(hosts_by_stage)
            if index is not None and stage != DATA_STAGE
        ]
        return tuple(
            Leg(host, tuple(stage for _, stage in legs))
            for host, legs in groupby(visits, lambda visit: visit[0])
        )

    def _case(
        self, hosts: Mapping[int, HostView], between: Callable[[int, int], LinkSpeed]
    ) -> ServingCase:
        numbers = sorted(hosts)
        known = [view.block_s for view in hosts.values() if view.block_s]
        usual_s = float(np.median(known)) if known else BLOCK_S
        block_s = np.array([hosts[host].block_s or usual_s for host in numbers])
        links = [
            [LinkSpeed() if host == other else between(host, other) for other in numbers]
            for host in numbers
        ]
        rates = [link.bytes_per_s for row in links for link in row if link.bytes_per_s]
        usual_rate = float(np.median(rates)) if rates else BYTES_PER_S
        return ServingCase(
            step_s=block_s[:, None] * self._layers,
            room_bytes=np.array([self._room_bytes(hosts[host]) for host in numbers]),
            stage_bytes=self._stage_bytes,
            latency_s=_matrix(links, lambda link: (link.round_trip_s or 0.0) / 2),
            bandwidth=_matrix(links, lambda link: link.bytes_per_s or usual_rate),
            activation_bytes=self._activation_bytes,
            groups=self._groups,
            slots=self._slots,
        )

    def _room_bytes(self, host: HostView) -> float:
        """Return the bytes for a host's stages, at least those of the stages that it holds."""
        room, held = host.room_bytes, float(self._stage_bytes[list(host.held)].sum())
        if host.most_stages is not None:
            is_front = DATA_STAGE in host.held
            inner = np.sort(self._stage_bytes[1:])[::-1][: host.most_stages - is_front]
            room = min(room, float(inner.sum() + is_front * self._stage_bytes[DATA_STAGE]))
        return max(room, held)


def _matrix(
    links: Sequence[Sequence[LinkSpeed]], value: Callable[[LinkSpeed], float]
) -> Float[np.ndarray, "hosts hosts"]:
    return np.array([[value(link) for link in row] for row in links])
