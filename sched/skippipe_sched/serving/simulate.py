"""Prediction of the performance of routes: hosts and links serve all groups in turn.

A group in flight is always at one place: on a host, on a link, or waiting for one of them. Queues
are first come, first served. In a step, the front's first and last visit are one: when a group
returns, the front applies the head, samples the tokens, and begins the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.serving.case import FRONT, Route, ServingCase

STEPS = 1000
"""Steps of a group after which the mean is taken if times never repeat."""
# Times that differ by less than this fraction of a step are equal.
SAME = 1e-9


@dataclass(frozen=True)
class Rates:
    """Performance of a service, predicted for its routes or bounded for all placements.

    Attributes:
        tokens_per_s: of all groups, in flight at once with all their slots taken.
        seconds_per_token: of one sequence, if the group with the fastest route is alone.
    """

    tokens_per_s: float
    seconds_per_token: float


@dataclass(frozen=True)
class Use:
    """Use of a host or a link: its duration, and the time until the next use is due [s]."""

    resource: int | tuple[int, int]
    takes_s: float
    after_s: float = 0.0


def simulate(case: ServingCase, routes: Sequence[Route], steps: int = STEPS) -> Rates:
    """Predict the steady state of a service whose groups have these routes.

    If the times of all groups repeat, as they usually do, tokens are counted over the repeating
    part. Otherwise they are counted until a group has done this many `steps`, from the start.

    Raises:
        InputError: if a route is invalid: it lacks a host for some stage, does not begin at the
            front, or misses a stage that another one visits.
    """
    cycles = [cycle(case, route) for route in checked_routes(case, routes)]
    alone_s = [sum(use.takes_s + use.after_s for use in uses) for uses in cycles]
    return Rates(case.slots * steps_per_s(cycles, steps), min(alone_s))


def checked_routes(case: ServingCase, routes: Sequence[Route]) -> Sequence[Route]:
    """Return the routes of the groups after checking them."""
    for group, route in enumerate(fields.sequence(routes, "routes")):
        field = f"routes[{group}]"
        if len(fields.sequence(route, field)) != case.stages:
            problem = f"has {len(route)} entries for {case.stages} stages"
            raise InputError(field, route, problem, "Name a host for each stage")
        fields.integer(route[0], f"{field}[0]", FRONT, FRONT)
        for stage, host in enumerate(route):
            if host is not None:
                fields.integer(host, f"{field}[{stage}]", 0, case.hosts - 1)
            if (host is None) != (routes[0][stage] is None):
                problem = "some groups visit this stage and others do not"
                raise InputError(f"{field}[{stage}]", host, problem, "Let all visit it, or none")
    return routes


def cycle(case: ServingCase, route: Route) -> list[Use]:
    """List the uses of a step in order, beginning with the front's head and stage 0."""
    visits = [[FRONT, case.head_s]]
    for stage, host in enumerate(route):
        if host is None:
            continue
        if host != visits[-1][0]:
            visits.append([host, 0.0])
        visits[-1][1] += float(case.step_s[host, stage])
    if visits[-1][0] == FRONT and len(visits) > 1:
        visits[0][1] += visits.pop()[1]
    uses = []
    for number, (host, takes_s) in enumerate(visits):
        uses.append(Use(host, takes_s))
        after = visits[(number + 1) % len(visits)][0]
        if after != host:
            sending_s = float(case.sending_s[host, after])
            uses.append(Use((host, after), sending_s, float(case.latency_s[host, after])))
    return uses


def steps_per_s(cycles: Sequence[Sequence[Use]], steps: int) -> float:
    """Simulate groups on their cycles; count steps of all per second (`simulate`)."""
    unit_s = SAME * sum(use.takes_s + use.after_s for use in cycles[0])
    numbers: dict[int | tuple[int, int], int] = {}
    for use in (use for uses in cycles for use in uses):
        numbers.setdefault(use.resource, len(numbers))
    todo = [[(numbers[use.resource], use.takes_s, use.after_s) for use in uses] for uses in cycles]
    free_s = [0.0] * len(numbers)
    # Time of each group's next use. The earliest is taken up first, so every resource serves in the
    # order of arrival. Of two simultaneous arrivals, the lower group goes first.
    coming = [(0.0, group, 0) for group in range(len(cycles))]
    done, steps_of_group = 0, [0] * len(cycles)
    seen: dict[tuple[float, ...], tuple[float, int]] = {}
    best_per_s = 0.0
    while True:
        now_s, group, place = coming[0]
        if place == 0 and now_s > 0.0:
            done, steps_of_group[group] = done + 1, steps_of_group[group] + 1
            # The rate from the start is at most the sustainable rate.
            if 2 * steps_of_group[group] >= steps:
                best_per_s = max(best_per_s, done / now_s)
            if group == 0:
                state = _state(now_s, coming, free_s, unit_s)
                if state in seen:
                    earlier_s, earlier_done = seen[state]
                    return (done - earlier_done) / (now_s - earlier_s)
                seen[state] = now_s, done
            if steps_of_group[group] == steps:
                return best_per_s
        resource, takes_s, after_s = todo[group][place]
        free_s[resource] = max(now_s, free_s[resource]) + takes_s
        after = (place + 1) % len(todo[group])
        heapreplace(coming, (free_s[resource] + after_s, group, after))


def _state(
    now_s: float,
    coming: Sequence[tuple[float, int, int]],
    free_s: Sequence[float],
    unit_s: float,
) -> tuple[float, ...]:
    """Return the state that determines everything after `now_s`, as a hashable value."""

    def rounded(at_s: float) -> float:
        return round(max(0.0, at_s - now_s) / unit_s)

    groups = [0.0] * (2 * len(coming))
    for at_s, group, place in coming:
        groups[2 * group : 2 * group + 2] = rounded(at_s), place
    return (*groups, *map(rounded, free_s))
