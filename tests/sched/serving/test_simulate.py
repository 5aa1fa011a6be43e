from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.serving.case import Route, ServingCase
from skippipe_sched.serving.simulate import simulate

from tests.sched.serving.cases import service, services


def test_one_group_takes_its_turns_one_after_another():
    """Head 1 s, three stages 1 s each, and three hops of 1 s on the link and 1 s on the way."""
    found = simulate(service(), [(0, 1, 2)])
    assert found.seconds_per_token == 1 + 3 + 3 * 2
    assert found.tokens_per_s == pytest.approx(1 / 10)


def test_stages_on_one_host_are_one_visit():
    assert simulate(service(), [(0, 1, 1)]).seconds_per_token == 1 + 3 + 2 * 2
    assert simulate(service(), [(0, 0, 1)]).seconds_per_token == 1 + 3 + 2 * 2
    assert simulate(service(), [(0, 1, 0)]).seconds_per_token == 1 + 3 + 2 * 2
    assert simulate(service(), [(0, 0, 0)]).seconds_per_token == 1 + 3
    assert simulate(service(), [(0, None, 1)]).seconds_per_token == 1 + 2 + 2 * 2


@pytest.mark.parametrize("groups", [2, 4, 5, 6, 20])
def test_groups_are_in_flight_until_a_host_is_always_busy(groups: int):
    """The front takes 2 s of a step of 10 s, so five groups keep it busy."""
    found = simulate(replace(service(), slots=3), [(0, 1, 2)] * groups)
    assert found.tokens_per_s == pytest.approx(3 * min(groups / 10, 1 / 2))
    assert found.seconds_per_token == 10


def test_the_transmission_occupies_a_link_and_the_latency_does_not():
    bandwidth, latency_s = np.ones((3, 3)), np.ones((3, 3))
    bandwidth[0, 1], latency_s[0, 1] = 1 / 5, 100
    found = simulate(service(bandwidth=bandwidth, latency_s=latency_s), [(0, 1, 2)] * 100)
    assert found.tokens_per_s == pytest.approx(1 / 5)


def test_a_group_on_other_hosts_is_not_held_up():
    """Both pass the front, which is free most of the time; one of them has a host that is slow."""
    step_s = np.ones((3, 3))
    step_s[2] = 27
    case = service(step_s=step_s, latency_s=np.full((3, 3), 4.0), room_bytes=np.full(3, 2.0))
    quick_s, slow_s = 4 + 2 * 5, 2 + 2 * 27 + 2 * 5
    found = simulate(case, [(0, 1, 1), (0, 2, 2)])
    assert found.seconds_per_token == quick_s
    assert found.tokens_per_s == pytest.approx(1 / quick_s + 1 / slow_s, rel=0.05)


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
    hosts = st.integers(0, case.hosts - 1)
    route = st.tuples(st.just(0), *[hosts] * (case.stages - 1))
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
