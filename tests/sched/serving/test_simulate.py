from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.serving.case import Route, ServingCase
from skippipe_sched.serving.simulate import simulate

from tests.sched.serving.cases import service, services


def turns_of(case: ServingCase, route: Route) -> list[tuple[object, int, int]]:
    """What a step passes: which host or link, for how long, and how long until the next [s]."""
    visits = [
        (0, int(case.head_s)),
        *((h, int(case.step_s[h, s])) for s, h in enumerate(route) if h is not None),
    ]
    visits.append((0, 0))
    turns: list[tuple[object, int, int]] = []
    at, busy_s = 0, 0
    for host, takes_s in visits:
        if host != at:
            sending_s, latency_s = 1 / case.bandwidth[at, host], case.latency_s[at, host]
            turns += [(at, busy_s, 0), ((at, host), int(sending_s), int(latency_s))]
            at, busy_s = host, 0
        busy_s += takes_s
    if not turns:
        return [(0, busy_s, 0)]
    return [(0, turns[0][1] + busy_s, 0), *turns[1:]]


def reference_per_s(turns: Sequence[Sequence[tuple[object, int, int]]]) -> Fraction:
    """Steps of all groups per second, in whole numbers: every host and link has a queue."""
    groups = range(len(turns))
    queues: dict[object, deque[int]] = {turn[0]: deque() for own in turns for turn in own}
    free_s: dict[object, int] = dict.fromkeys(queues, 0)
    coming_s, place = [0 for _ in groups], [0 for _ in groups]
    now_s = steps = 0
    seen: dict[object, tuple[int, int]] = {}
    while True:
        for group in groups:
            if coming_s[group] == now_s:
                queues[turns[group][place[group]][0]].append(group)
                steps += place[group] == 0 and now_s > 0
        for resource, queue in queues.items():
            if queue and free_s[resource] <= now_s:
                group = queue.popleft()
                _, takes_s, after_s = turns[group][place[group]]
                free_s[resource] = now_s + takes_s
                coming_s[group] = now_s + takes_s + after_s
                place[group] = (place[group] + 1) % len(turns[group])
        state = (
            tuple((place[group], max(coming_s[group] - now_s, 0)) for group in groups),
            tuple((*queues[key], max(free_s[key] - now_s, 0)) for key in queues),
        )
        if state in seen:
            then_s, before = seen[state]
            return Fraction(steps - before, now_s - then_s)
        seen[state] = now_s, steps
        now_s = min(time_s for time_s in (*coming_s, *free_s.values()) if time_s > now_s)


@given(services(), st.data())
def test_steps_are_those_of_queues_in_whole_seconds(case: ServingCase, data: st.DataObject):
    """Also where stages have no host."""
    hosts, inner = st.integers(0, case.hosts - 1), case.stages - 1
    is_held = data.draw(st.lists(st.booleans(), min_size=inner, max_size=inner))
    route = st.tuples(st.just(0), *(hosts if own else st.none() for own in is_held))
    routes = data.draw(st.lists(route, min_size=1, max_size=3))
    per_s = reference_per_s([turns_of(case, route) for route in routes])
    found = simulate(case, routes, steps=100_000)
    assert found.tokens_per_s == pytest.approx(case.slots * float(per_s), rel=1e-9)
    turns = min(sum(takes + after for _, takes, after in turns_of(case, r)) for r in routes)
    assert found.seconds_per_token == pytest.approx(turns)


@pytest.mark.parametrize(
    ("routes", "field"),
    [
        ([], "routes"),
        ([(0, 1)], "routes[0]"),
        ([(1, 1, 1)], "routes[0][0]"),
        ([(None, 1, 1)], "routes[0][0]"),
        ([(0, 1, 3)], "routes[0][2]"),
        ([(0, 1, 2), (0, None, 2)], "routes[1][1]"),
    ],
)
def test_what_is_no_route_is_refused(routes, field: str):
    with pytest.raises(InputError) as refused:
        simulate(service(), routes)
    assert refused.value.field == field
