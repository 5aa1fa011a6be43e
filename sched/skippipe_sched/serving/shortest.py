"""Shortest route through hosts that hold stages, or have memory for them.

A route is found stage by stage, as partial routes ("partials") through the first stages. Of the
partials that end on one host and leave the same memory on all hosts, only the fastest is kept.
Where no host has memory left, there are at most as many partials as hosts, and the route is the
shortest. Otherwise the most promising partials are kept, by a lower bound on the whole route
(`remaining_s`); the lower bound of the best dropped partial is a bound on all routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from skippipe_sched.serving.case import FRONT, MOST_HOSTS, Route, ServingCase

MOST_PARTIALS = 1_000
# Sums of products with these numbers identify the load of the hosts.
MARKS = np.random.default_rng(0).integers(2**63, size=MOST_HOSTS + 2, dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class Room:
    """Stages that hosts hold, and their free memory in bytes."""

    held: Bool[np.ndarray, "hosts stages"]
    free_bytes: Float[np.ndarray, " hosts"]


@dataclass(frozen=True, eq=False)
class RouteCosts:
    """Costs that a route minimizes: seconds on hosts, to another host, and back."""

    step_s: Float[np.ndarray, "hosts stages"]
    hop_s: Float[np.ndarray, "hosts hosts"]
    back_s: Float[np.ndarray, " hosts"]


@dataclass(frozen=True, eq=False)
class StageSpan:
    """Consecutive stages on one host: from `first` to before `end`, some skipped.

    `takes_s` is the time on each host, infinite on hosts without enough memory. The skipped stages
    are assumed to be the slowest ones for the time, and the largest ones for the memory.
    """

    first: int
    end: int
    skipped: int
    takes_s: Float[np.ndarray, " hosts"]


class _PartialRoutes(NamedTuple):
    """Partial routes through the first stages.

    Attributes:
        host: last host of each.
        cost_s: its cost so far.
        skips: number of stages that it may still skip.
        loaded: equal for partials that have given each host as many stages of each size.
        parent: index of the partial without its last stage.
        visits: whether that stage was run.
    """

    host: Int[np.ndarray, " partials"]
    cost_s: Float[np.ndarray, " partials"]
    skips: Int[np.ndarray, " partials"]
    loaded: UInt64[np.ndarray, " partials"]
    parent: Int[np.ndarray, " partials"]
    visits: Bool[np.ndarray, " partials"]

    def some(self, which: Int[np.ndarray, " some"]) -> _PartialRoutes:
        """Return some of the partials."""
        return _PartialRoutes(*(array[which] for array in self))


def empty_room(case: ServingCase) -> Room:
    """Return the room of hosts of which only the front holds anything: stage 0."""
    held = np.zeros((case.hosts, case.stages), dtype=bool)
    held[FRONT, 0] = True
    return Room(held, case.room_bytes - held @ case.stage_bytes)


def alone(case: ServingCase) -> RouteCosts:
    """Return the seconds of a step of a group that meets no others."""
    return RouteCosts(case.step_s, case.hop_s, case.hop_s[:, FRONT])


def runs_from(case: ServingCase, first: int, skips: int) -> Iterator[StageSpan]:
    """List the runs that begin with a stage after 0, of which at most `skips` are skipped."""
    room_bytes = empty_room(case).free_bytes
    for end in range(first + 1, case.stages + 1):
        sizes = np.sort(case.stage_bytes[first:end])
        times = np.sort(case.step_s[:, first:end], axis=1)
        for skipped in range(min(skips, end - first) + 1):
            kept = end - first - skipped
            fits = sizes[:kept].sum() <= room_bytes
            yield StageSpan(
                first, end, skipped, np.where(fits, times[:, :kept].sum(axis=1), np.inf)
            )


def remaining_s(case: ServingCase, skips: int = 0) -> Float[np.ndarray, "skips stages hosts"]:
    """Bound the time of the rest of a step of a lone group from below [s], if no host fills up.

    The axes are the stages that may still be skipped, the next stage, and the group's current host.
    Each run of stages has to fit on its host, but a host that is visited again counts as empty.
    """
    rest_s = np.full((skips + 1, case.stages + 1, case.hosts), np.inf)
    rest_s[:, case.stages] = case.hop_s[:, FRONT]
    leaving_s = rest_s.copy()
    hop_s = case.hop_s + np.where(np.eye(case.hosts, dtype=bool), np.inf, 0.0)
    for first in range(case.stages - 1, 0, -1):
        for run in runs_from(case, first, skips):
            for left in range(run.skipped, skips + 1):
                with_run_s = run.takes_s + leaving_s[left - run.skipped, run.end]
                np.minimum(rest_s[left, first], with_run_s, out=rest_s[left, first])
        leaving_s[:, first] = (hop_s + rest_s[:, None, first]).min(axis=2)
        np.minimum(rest_s[:, first], leaving_s[:, first], out=rest_s[:, first])
    return rest_s


def shortest(
    case: ServingCase,
    room: Room,
    costs: RouteCosts,
    rest_s: Float[np.ndarray, "skips stages hosts"],
    most_partials: int = MOST_PARTIALS,
) -> tuple[Route | None, float]:
    """Find a route of low cost, and a lower bound on the cost of all routes [s].

    A stage that no host holds is placed on one that has memory for it, or is skipped, as often as
    `rest_s` allows (`remaining_s`). If each stage had at most `most_partials` partials, the route
    is the cheapest, and the bound is its cost. The route is None if none was found.
    """
    partials = _PartialRoutes(
        host=np.array([FRONT]),
        cost_s=case.head_s + costs.step_s[FRONT, :1],
        skips=np.array([len(rest_s) - 1]),
        loaded=np.zeros(1, dtype=np.uint64),
        parent=np.zeros(1, dtype=int),
        visits=np.ones(1, dtype=bool),
    )
    free_bytes = room.free_bytes[None]
    bound_s = np.inf
    found = []
    for stage in range(1, case.stages):
        partials = _extended(case, room, costs, partials, free_bytes, stage)
        promised_s = partials.cost_s + rest_s[partials.skips, stage + 1, partials.host]
        order = _best_of_equals(partials, promised_s)
        if len(order) > most_partials:
            bound_s = min(bound_s, float(promised_s[order[most_partials]]))
        partials = partials.some(order[:most_partials])
        free_bytes = free_bytes[partials.parent]
        loads = np.flatnonzero(partials.visits & ~room.held[partials.host, stage])
        free_bytes[loads, partials.host[loads]] -= case.stage_bytes[stage]
        found.append(partials)
    cost_s = partials.cost_s + costs.back_s[partials.host]
    if not len(cost_s):
        return None, bound_s
    at = int(np.argmin(cost_s))
    bound_s = min(bound_s, float(cost_s[at]))
    backwards: list[int | None] = []
    for partials in reversed(found):
        backwards.append(int(partials.host[at]) if partials.visits[at] else None)
        at = int(partials.parent[at])
    return (FRONT, *reversed(backwards)), bound_s


def _extended(
    case: ServingCase,
    room: Room,
    costs: RouteCosts,
    partials: _PartialRoutes,
    free_bytes: Float[np.ndarray, "partials hosts"],
    stage: int,
) -> _PartialRoutes:
    """Extend each partial by the stage, on each host that holds it or has room, or by a skip."""
    held = room.held[:, stage]
    parent, host = np.nonzero(held | (free_bytes >= case.stage_bytes[stage]))
    marks = np.where(held, np.uint64(0), MARKS[: case.hosts] * case.kinds[stage])
    longer_s = costs.hop_s[partials.host[parent], host] + costs.step_s[host, stage]
    run = _PartialRoutes(
        host=host,
        cost_s=partials.cost_s[parent] + longer_s,
        skips=partials.skips[parent],
        loaded=partials.loaded[parent] + marks[host],
        parent=parent,
        visits=np.ones(len(parent), dtype=bool),
    )
    able = np.flatnonzero(partials.skips)
    if not len(able) or held.any():
        return run
    skipped = partials.some(able)._replace(
        skips=partials.skips[able] - 1, parent=able, visits=np.zeros(len(able), dtype=bool)
    )
    return _PartialRoutes(*map(np.concatenate, zip(run, skipped, strict=True)))


def _best_of_equals(
    partials: _PartialRoutes, promised_s: Float[np.ndarray, " partials"]
) -> Int[np.ndarray, " some"]:
    """Sort partials by their bounds, and drop impossible ones and those that another one beats."""
    order = np.argsort(promised_s, kind="stable")
    order = order[: np.searchsorted(promised_s[order], np.inf)]
    equal = partials.loaded + MARKS[-1] * partials.host.astype(np.uint64)
    equal += MARKS[-2] * partials.skips.astype(np.uint64)
    return order[np.sort(np.unique(equal[order], return_index=True)[1])]
