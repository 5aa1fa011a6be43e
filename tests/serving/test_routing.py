"""Which hosts hold which stages, and along which of them sequences run."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.serving.routing import (
    FRONT,
    Leg,
    by_the_front,
    parts_between,
    shortest_route,
    stages_of,
    stages_to_hold,
)

HOSTS = [1, 2, 3, 4]


@given(st.data())
def test_the_shortest_of_all_routes_is_found(data: st.DataObject):
    holders = {
        stage: data.draw(st.lists(st.sampled_from(HOSTS), min_size=1, unique=True))
        for stage in data.draw(st.sets(st.integers(1, 4), min_size=1))
    }
    times = st.integers(0, 9)
    seconds = {(host, stage): data.draw(times) for host in HOSTS for stage in holders}
    between = {pair: data.draw(times) for pair in itertools.permutations([FRONT, *HOSTS], 2)}

    def cost(hosts: tuple[int, ...]) -> int:
        way = [FRONT, *hosts, FRONT]
        hops = sum(between[pair] for pair in itertools.pairwise(way) if pair[0] != pair[1])
        return hops + sum(
            seconds[host, stage] for host, stage in zip(hosts, sorted(holders), strict=True)
        )

    route = shortest_route(holders, lambda *given: seconds[given], lambda *given: between[given])
    assert list(stages_of(route)) == sorted(holders)
    assert all(one.host != other.host for one, other in itertools.pairwise(route))
    found = tuple(leg.host for leg in route for _ in leg.stages)
    assert cost(found) == min(
        cost(hosts) for hosts in itertools.product(*(holders[stage] for stage in sorted(holders)))
    )


def test_hosts_that_do_not_reach_each_other_go_by_the_front():
    route = (Leg(1, (1,)), Leg(2, (2,)), Leg(3, (3, 4)))
    found = by_the_front(route, lambda source, target: (source, target) == (2, 3))
    assert found == (*route[:2], Leg(FRONT, ()), route[2])
    assert parts_between(found) == [route[:2], route[2:]]
    assert by_the_front((), lambda *_: True) == ()


@given(
    rooms=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    held=st.lists(st.sets(st.integers(1, 5)), max_size=3),
)
def test_every_stage_is_held_that_finds_room(
    rooms: list[int], sizes: list[int], held: list[set[int]]
):
    stages, stage_bytes = {*range(1, len(sizes) + 1)}, [0, *sizes]
    others = {100 + number: own & stages for number, own in enumerate(held)}
    given_rooms = dict(enumerate(rooms, 1))
    chosen = stages_to_hold(given_rooms, stage_bytes, others)
    assert chosen.keys() == given_rooms.keys()
    for host, own in chosen.items():
        assert len({*own}) == len(own)
        assert sum(stage_bytes[stage] for stage in own) <= given_rooms[host]
    missing = stages.difference(*others.values(), *chosen.values())
    left = {
        host: rooms[host - 1] - sum(stage_bytes[s] for s in own) for host, own in chosen.items()
    }
    assert all(stage_bytes[stage] > room for stage in missing for room in left.values())


def test_replicas_are_spread_evenly():
    chosen = stages_to_hold(dict.fromkeys(range(1, 9), 10.0), [0, 1, 1, 1], {})
    assert sorted(Counter(chosen.values()).values()) == [2, 3, 3]
    assert stages_to_hold({9: 10.0}, [0, 1, 1, 1], chosen) == {9: (3,)}
    assert stages_to_hold({1: 10.0, 2: 10.0}, [0, 1, 1, 1, 1], {}) == {1: (1, 2), 2: (3, 4)}
