"""Which hosts hold which stages of a service, and along which of them a group's sequences run.

The planner decides both, by what has been measured of the hosts and between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from skippipe_sched.serving.case import FRONT, ServingCase
from skippipe_sched.serving.placing import place
from skippipe_sched.serving.routing import routes

DATA_STAGE = 0
SKIP, WAIT, FAIL = WHEN_LOST = ("skip", "wait", "fail")
"""What becomes of sequences while nobody holds a stage: they do without it, wait, or fail."""

BYTES_PER_S = 1e9
"""Of links, as activations of a step are small. Round trips are measured."""
BLOCK_S = 1e-3
"""How long a block takes before anything has been measured."""


class Leg(NamedTuple):
    """A visit of a host: stages that run there one after the other."""

    host: int
    stages: tuple[int, ...]


Route = tuple[Leg, ...]
"""The visits of a group behind the data stage, in order; on some, the front may run a stage."""


def stages_of(route: Route) -> tuple[int, ...]:
    """Return the stages along a route."""
    return tuple(stage for leg in route for stage in leg.stages)


def by_the_front(route: Route, is_avoided: Callable[[int, int], bool]) -> Route:
    """Return a route that goes by the front where a host does not reach the next."""
    legs = [*route[:1]]
    for before, leg in pairwise(route):
        if is_avoided(before.host, leg.host):
            legs.append(Leg(FRONT, ()))
        legs.append(leg)
    return tuple(legs)


def parts_of(route: Route) -> list[Route]:
    """Return the parts of a route: visits of the front, and what lies between."""
    parts: list[Route] = []
    for is_front, legs in groupby(route, lambda leg: leg.host == FRONT):
        own = tuple(legs)
        parts += [(leg,) for leg in own] if is_front else [own]
    return parts


@dataclass(frozen=True)
class HostView:
    """What is known of a host where stages and routes are chosen.

    Attributes:
        room_bytes: what its stages may take together.
        most_stages: how many it may hold; None for as many as there is room for.
        block_s: how long a block takes for a step; None before that is known.
        held: the stages that it holds.
    """

    room_bytes: float
    most_stages: int | None
    block_s: float | None
    held: tuple[int, ...]


class Planner:
    """Chooses stages and routes for the hosts of one model."""

    def __init__(
        self,
        layers: Sequence[int],
        stage_bytes: Sequence[float],
        groups: int,
        slots: int,
        activation_bytes: float,
    ):
        """Plan for stages of so many blocks and bytes, their caches included."""
        self._layers, self._stage_bytes = np.array(layers), np.array(stage_bytes, float)
        self._groups, self._slots, self._activation_bytes = groups, slots, activation_bytes

    def place(
        self,
        hosts: Mapping[int, HostView],
        between: Callable[[int, int], float],
        is_first: bool = False,
    ) -> dict[int, tuple[int, ...]]:
        """Choose the stages of hosts; those that hold some get others only if nobody has these.

        The front gets some beside the data stage only if it `is_first` that hosts get any.

        Raises:
            InputError: if the front has no room for the data stage.
        """
        numbers = sorted(hosts)
        held = [[*hosts[host].held] for host in numbers]
        found = place(self._case(hosts, between), held=None if is_first else held)
        chosen = {}
        for host, stages in zip(numbers, found, strict=True):
            most = hosts[host].most_stages
            # Stages differ little in size, so there are seldom more.
            chosen[host] = stages if most is None else stages[: max(most, len(hosts[host].held))]
        return chosen

    def route(
        self, hosts: Mapping[int, HostView], between: Callable[[int, int], float], group: int
    ) -> Route:
        """Choose the way of one of all groups through all stages that are held."""
        numbers = sorted(hosts)
        held = [[*hosts[host].held] for host in numbers]
        own = routes(self._case(hosts, between), held, tries=0)[group]
        visits = [
            (numbers[index], stage)
            for stage, index in enumerate(own)
            if index is not None and stage != DATA_STAGE
        ]
        return tuple(
            Leg(host, tuple(stage for _, stage in legs))
            for host, legs in groupby(visits, lambda visit: visit[0])
        )

    def _case(
        self, hosts: Mapping[int, HostView], between: Callable[[int, int], float]
    ) -> ServingCase:
        numbers = sorted(hosts)
        known = [view.block_s for view in hosts.values() if view.block_s]
        usual_s = float(np.median(known)) if known else BLOCK_S
        block_s = np.array([hosts[host].block_s or usual_s for host in numbers])
        latency_s = [
            [0.0 if host == other else between(host, other) for other in numbers]
            for host in numbers
        ]
        return ServingCase(
            step_s=block_s[:, None] * self._layers,
            room_bytes=np.array([self._room_bytes(hosts[host]) for host in numbers]),
            stage_bytes=self._stage_bytes,
            latency_s=np.array(latency_s),
            bandwidth=np.full((len(numbers), len(numbers)), BYTES_PER_S),
            activation_bytes=self._activation_bytes,
            groups=self._groups,
            slots=self._slots,
        )

    def _room_bytes(self, host: HostView) -> float:
        """Return what a host has room for, at least what it holds."""
        room, held = host.room_bytes, float(self._stage_bytes[list(host.held)].sum())
        if host.most_stages is not None:
            is_front = DATA_STAGE in host.held
            inner = np.sort(self._stage_bytes[1:])[::-1][: host.most_stages - is_front]
            room = min(room, float(inner.sum() + is_front * self._stage_bytes[DATA_STAGE]))
        return max(room, held)
