"""Which hosts hold which stages, and along which of them sequences run."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.serving.case import FRONT

from skippipe_jax.serving.routing import (
    HostView,
    Leg,
    LinkSpeed,
    Planner,
    in_series,
    route_parts,
    stages_of,
    via_front,
)


def planner(*stage_bytes: float, groups: int = 2) -> Planner:
    return Planner([1] * len(stage_bytes), stage_bytes, groups, 2, 100.0)


def near(source: int, target: int) -> LinkSpeed:
    return LinkSpeed(0.02, 1e8)


def views(
    held: dict[int, tuple[int, ...]], most: int | None = None, room_bytes: float = 1e9
) -> dict[int, HostView]:
    return {host: HostView(room_bytes, most, None, stages) for host, stages in held.items()}


def test_hosts_that_do_not_reach_each_other_go_by_the_front():
    route = (Leg(1, (1,)), Leg(2, (2,)), Leg(3, (3, 4)))
    found = via_front(route, lambda source, target: (source, target) == (2, 3))
    assert found == (*route[:2], Leg(FRONT, ()), route[2])
    assert route_parts(found) == [route[:2], (Leg(FRONT, ()),), route[2:]]
    assert via_front((), lambda *_: True) == ()
    assert route_parts(()) == []


@given(st.data())
def test_routes_go_through_all_stages_that_are_held(data: st.DataObject):
    stages = data.draw(st.integers(1, 5))
    held: dict[int, tuple[int, ...]] = {
        host: tuple(sorted(data.draw(st.sets(st.integers(1, stages), max_size=stages))))
        for host in range(1, data.draw(st.integers(1, 4)) + 1)
    }
    held[FRONT] = (0, *data.draw(st.sampled_from([(), (1,)])))
    own, groups = planner(*[1.0] * (stages + 1)), 2
    for group in range(groups):
        route = own.route(views(held), near, group)
        assert stages_of(route) == tuple(
            sorted({stage for own in held.values() for stage in own} - {0})
        )
        assert all({*leg.stages} <= {*held[leg.host]} for leg in route)
        assert all(one.host != other.host for one, other in itertools.pairwise(route))


def test_each_host_gets_as_many_stages_as_it_may_hold():
    alone = {host: () for host in range(1, 9)} | {FRONT: (0,)}
    chosen = planner(1, 1, 1, 1).place(views(alone, 1), near, is_first=True)
    assert chosen.pop(FRONT) == (0,)
    assert sorted(Counter(chosen.values()).values()) == [2, 3, 3]
    least = min(Counter(chosen.values()).items(), key=lambda pair: pair[1])[0]
    # One that comes gets what the fewest have, and the others keep theirs.
    again = planner(1, 1, 1, 1).place(views({**chosen, 9: (), FRONT: (0,)}, 1), near)
    assert again == {**chosen, 9: least, FRONT: (0,)}
    # Where there is room for all, all have all.
    everywhere = planner(1, 1, 1, 1).place(views(alone), near, is_first=True)
    assert {*everywhere.values()} == {(0, 1, 2, 3), (1, 2, 3)}


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4))
def test_the_front_keeps_what_it_has(most: list[int], groups: int):
    held = {FRONT: (0, 2), **{host: () for host in range(1, len(most) + 1)}}
    hosts = {
        host: HostView(0.0 if host == FRONT else 1e9, most[host - 1] if host else None, None, own)
        for host, own in held.items()
    }
    chosen = planner(1, 1, 1, 1, groups=groups).place(hosts, near)
    assert chosen[FRONT] == (0, 2)
    assert all(len(chosen[host]) <= most[host - 1] for host in held if host)
    if sum(most) > 1:
        assert {0, 1, 2, 3} == {stage for own in chosen.values() for stage in own}


@given(st.integers(1, 3))
def test_a_group_avoids_the_link_with_the_least_bandwidth(slow: int):
    def between(source: int, target: int) -> LinkSpeed:
        return LinkSpeed(0.02, 1e4 if slow in (source, target) else 1e8)

    held = {FRONT: (0,), 1: (1,), 2: (1,), 3: (1,)}
    own = planner(1.0, 1.0, groups=1)
    assert slow not in [leg.host for leg in own.route(views(held), between, 0)]


def test_a_message_by_the_front_takes_as_long_as_both_links_together():
    both = in_series(LinkSpeed(0.1, 1e6), LinkSpeed(0.3, 4e6))
    assert both.round_trip_s == pytest.approx(0.4)
    assert both.bytes_per_s == pytest.approx(8e5)
