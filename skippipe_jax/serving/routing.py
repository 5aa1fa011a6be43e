"""Which hosts hold which stages of a service, and along which of them a group's sequences run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

FRONT = 0
"""The host to which clients come. It alone has stage 0, the data stage."""

DATA_STAGE = 0
SKIP, WAIT, FAIL = WHEN_LOST = ("skip", "wait", "fail")
"""What becomes of sequences while nobody holds a stage: they do without it, wait, or fail."""


class Leg(NamedTuple):
    """A visit of a host: stages that run there one after the other."""

    host: int
    stages: tuple[int, ...]


Route = tuple[Leg, ...]
"""The hosts between two visits of the front, in order."""


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


def parts_between(route: Route) -> list[Route]:
    """Return the parts of a route between visits of the front."""
    parts: list[list[Leg]] = [[]]
    for leg in route:
        if leg.host == FRONT:
            parts.append([])
        else:
            parts[-1].append(leg)
    return [tuple(part) for part in parts if part]


def stages_to_hold(
    rooms: Mapping[int, float], stage_bytes: Sequence[float], held: Mapping[int, Collection[int]]
) -> dict[int, tuple[int, ...]]:
    """Choose the stages of hosts that hold none yet.

    Each gets one, that with the fewest replicas. If these are too few for all stages, they get
    consecutive ones, as many as their memory holds: those that have the fewest stages first.

    Args:
        rooms: bytes that each of these hosts may fill.
        stage_bytes: what each stage takes, with its caches; the front has that of number 0.
        held: the stages that other hosts have.
    """
    replicas = Counter(stage for stages in held.values() for stage in stages)
    inner = range(1, len(stage_bytes))
    chosen: dict[int, list[int]] = {host: [] for host in rooms}
    left = dict(rooms)
    missing = [stage for stage in inner if not replicas[stage]]
    # The share of the missing ones that each host gets, if there are more of them than hosts.
    share = -(-len(missing) // max(len(rooms), 1))
    for host in rooms:
        wanted = missing[:share] or [min(inner, key=lambda stage: replicas[stage])]
        for stage in wanted:
            if stage_bytes[stage] <= left[host]:
                left[host] -= stage_bytes[stage]
                replicas[stage] += 1
                chosen[host].append(stage)
        missing = [stage for stage in missing if not replicas[stage]]
    for stage in missing:
        able = [host for host in rooms if stage_bytes[stage] <= left[host]]
        if able:
            host = min(able, key=lambda host: len(chosen[host]))
            left[host] -= stage_bytes[stage]
            chosen[host].append(stage)
    return {host: tuple(sorted(stages)) for host, stages in chosen.items()}


def shortest_route(
    holders: Mapping[int, Collection[int]],
    seconds: Callable[[int, int], float],
    between: Callable[[int, int], float],
) -> Route:
    """Return the quickest way through one holder of each stage, in order, from the front and back.

    Args:
        holders: the hosts that hold each stage.
        seconds: how long a host takes for a stage.
        between: how long a message takes from one host to another, and infinity if it never comes.
    """
    if not holders:
        return ()
    # By the last host so far: how long it takes up to there, and the way.
    best: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {FRONT: (0.0, ())}
    for stage in sorted(holders):
        found = {}
        for host in sorted(holders[stage]):
            ways = [
                (taken + (0.0 if before == host else between(before, host)), way)
                for before, (taken, way) in best.items()
            ]
            taken, way = min(ways)
            found[host] = taken + seconds(host, stage), (*way, (host, stage))
        best = found or best
    _, way = min((taken + between(host, FRONT), way) for host, (taken, way) in best.items())
    legs: list[Leg] = []
    for host, stage in way:
        if legs and legs[-1].host == host:
            legs[-1] = Leg(host, (*legs[-1].stages, stage))
        else:
            legs.append(Leg(host, (stage,)))
    return tuple(legs)
