"""Routes of groups that are in flight at once.

Groups are routed one after another, each by the shortest route including waits for the hosts and
links that earlier groups use. Then some groups get other routes, which are kept if the simulation
predicts more tokens. Where hosts have memory left, routes load stages on them, so the same search
finds placements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from skippipe_sched import fields
from skippipe_sched.serving.case import (
    FRONT,
    HeldStages,
    Route,
    ServingCase,
    checked_lost,
    checked_placement,
)
from skippipe_sched.serving.shortest import Room, RouteCosts, alone, remaining_s, shortest
from skippipe_sched.serving.simulate import cycle, steps_per_s

TRIES = 150
# Partial routes kept for one of many routes, and steps of a group for one of many simulations.
MOST_PARTIALS, STEPS = 16, 60
# The logarithm of a busy host's price factor lies within this of the logarithm of the number of
# groups.
SPREAD = 4.0


def routes(
    case: ServingCase,
    placement: Any,
    lost: Collection[int] = (),
    seed: int = 0,
    tries: int = TRIES,
) -> tuple[Route, ...]:
    """Find a route for each group, through all stages that a present host holds.

    The route of a single group is the shortest. To route the active groups only, set their number
    in the case. The same arguments give the same routes. With no `tries`, these are the first
    routes found, each the shortest given the ones before it, which takes milliseconds.

    Raises:
        InputError: if the placement does not fit the case, or a lost host is the front or not in
            the case.
    """
    held = held_stages(case, checked_placement(case, placement, "placement"))
    held[list(checked_lost(case, lost))] = False
    run = np.array(held.any(axis=0))
    room = Room(held[:, run], np.zeros(case.hosts))
    found = search(case.with_stages(run), room, seed, tries)
    assert found is not None, "each of these stages has a host"
    return tuple(through(run, route) for route in found)


def held_stages(case: ServingCase, placement: HeldStages) -> Bool[np.ndarray, "hosts stages"]:
    """Return whether each host holds each stage."""
    held = np.zeros((case.hosts, case.stages), dtype=bool)
    for host, stages in enumerate(placement):
        held[host, list(stages)] = True
    return held


def through(run: Bool[np.ndarray, " stages"], route: Route) -> Route:
    """Return a route through all stages, from one through the stages in `run`."""
    hosts = iter(route)
    return tuple(next(hosts) if is_run else None for is_run in run)


def search(case: ServingCase, room: Room, seed: int, tries: int) -> list[Route] | None:
    """Find a route through all stages for each group that together give many tokens per second.

    Routes may load stages where there is free memory. Returns None if no route was found.
    """
    fields.integer(seed, "seed", 0, fields.MAX_SEED)
    if case.groups == 1:
        route, _ = shortest(case, room, alone(case), remaining_s(case))
        return None if route is None else [route]
    return _Search(case, room, seed).run(tries)


class _Search:
    """A search for the routes of all groups."""

    def __init__(self, case: ServingCase, room: Room, seed: int):
        self.case, self.room = case, room
        self.random = np.random.default_rng(seed)
        self.rest_s = remaining_s(case)
        self.cycle = cache(partial(cycle, case))

    def run(self, tries: int) -> list[Route] | None:
        """Route all groups one after another, then try other routes for some of them."""
        best: list[Route] = []
        for _ in range(self.case.groups):
            busy_s, sending_s = self.load(best)
            hop_s = self.case.hop_s + sending_s + busy_s
            np.fill_diagonal(hop_s, 0.0)
            # The front's first and last visit are one, which every route has.
            back_s = self.case.hop_s[:, FRONT] + sending_s[:, FRONT]
            route = self.shortest(best, RouteCosts(self.case.step_s, hop_s, back_s))
            if route is None:
                return None
            best.append(route)
        most_per_s = self.steps_per_s(best)
        for _ in range(tries):
            tried = self.rerouted(best)
            if tried is None:
                continue
            per_s = self.steps_per_s(tried)
            if per_s >= most_per_s:
                best, most_per_s = tried, per_s
        return best

    def rerouted(self, best: Sequence[Route]) -> list[Route] | None:
        """Give some groups, or all that visit some host, one or two other routes.

        Each new route is the shortest with higher costs for busy hosts and random factors on all
        hosts.
        """
        random, case = self.random, self.case
        if random.random() < 0.5:
            chosen = random.permutation(case.groups)[: random.integers(1, case.groups + 1)]
        else:
            host = random.choice(np.unique(np.array(best)))
            chosen = random.permutation([g for g, route in enumerate(best) if host in route])
        tried = {group: route for group, route in enumerate(best) if group not in chosen}
        for groups in np.array_split(chosen, random.integers(1, 3)):
            busy_s, _ = self.load(best if random.random() < 0.5 else tried.values())
            busy_share = busy_s / self.load(best)[0].max()
            price = case.groups * np.exp(random.uniform(-SPREAD, SPREAD))
            noise = np.exp(random.random() * random.normal(size=case.step_s.shape))
            cost_factors = noise * (1.0 + price * busy_share[:, None] ** 2)
            costs = replace(alone(case), step_s=case.step_s * cost_factors)
            route = self.shortest(tried.values(), costs)
            if route is None:
                return None
            tried |= dict.fromkeys(groups.tolist(), route)
        return [tried[group] for group in range(case.groups)]

    def shortest(self, other_routes: Iterable[Route], costs: RouteCosts) -> Route | None:
        """Find a route of low cost in the memory that other routes leave."""
        room = self.free_room(other_routes)
        return shortest(self.case, room, costs, self.rest_s, MOST_PARTIALS)[0]

    def steps_per_s(self, routes: Iterable[Route]) -> float:
        """Count steps of all groups per second, in a short simulation."""
        return steps_per_s([self.cycle(route) for route in routes], STEPS)

    def free_room(self, routes: Iterable[Route]) -> Room:
        """Return the memory that the stages of these routes leave."""
        held = self.room.held.copy()
        for route in routes:
            held[np.array(route), np.arange(len(route))] = True
        loaded = held & ~self.room.held
        return Room(held, self.room.free_bytes - loaded @ self.case.stage_bytes)

    def load(
        self, routes: Iterable[Route]
    ) -> tuple[Float[np.ndarray, " hosts"], Float[np.ndarray, "hosts hosts"]]:
        """Sum the time that a step of each of these routes occupies hosts and links [s]."""
        busy_s = np.zeros(self.case.hosts)
        sending_s = np.zeros((self.case.hosts, self.case.hosts))
        for route in routes:
            for use in self.cycle(route):
                totals = sending_s if isinstance(use.resource, tuple) else busy_s
                totals[use.resource] += use.takes_s
        return busy_s, sending_s
