from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.serving.case import HeldStages, ServingCase
from skippipe_sched.serving.routing import routes
from skippipe_sched.serving.simulate import simulate

from tests.sched.serving.cases import routes_through, service, services


@st.composite
def placed(draw: st.DrawFn, groups: int) -> tuple[ServingCase, HeldStages]:
    """A service, and stages that hosts hold of which some may have no host."""
    case = draw(services(groups=groups))
    case = replace(case, room_bytes=np.full(case.hosts, case.stage_bytes.sum()))
    held = st.sets(st.integers(1, case.stages - 1)) if case.stages > 1 else st.just(set())
    own = [draw(held) for _ in range(case.hosts)]
    return case, (tuple(sorted({0} | own[0])), *(tuple(sorted(stages)) for stages in own[1:]))


@given(placed(groups=1), st.data())
def test_the_route_of_one_group_is_the_shortest(given, data: st.DataObject):
    case, placement = given
    lost = data.draw(st.frozensets(st.integers(1, case.hosts - 1)))
    (found,) = routes(case, placement, lost)
    possible = routes_through(placement, case.stages, lost)
    assert found in possible
    least_s = min(simulate(case, [route]).seconds_per_token for route in possible)
    assert simulate(case, [found]).seconds_per_token == pytest.approx(least_s)


@given(placed(groups=4), st.data())
def test_every_group_visits_every_stage_that_is_held_by_a_host_that_is_left(
    given, data: st.DataObject
):
    case, placement = given
    lost = data.draw(st.frozensets(st.integers(1, case.hosts - 1)))
    found = routes(case, placement, lost, tries=5)
    assert len(found) == case.groups
    assert routes(case, placement, lost, tries=5) == found
    assert {*found} <= {*routes_through(placement, case.stages, lost)}


def test_groups_share_hosts_that_hold_the_same():
    """Each of these hosts takes four times as long as the front."""
    step_s = np.array([[1.0] * 3, [4.0] * 3, [4.0] * 3])
    case = service(groups=12, room_bytes=np.full(3, 3.0), step_s=step_s)
    placement = ((0,), (1, 2), (1, 2))
    first = routes(case, placement, tries=0)
    assert sorted(first) == [(0, 1, 1)] * 6 + [(0, 2, 2)] * 6
    for tries in (0, 30):
        found = simulate(case, routes(case, placement, tries=tries))
        assert found.tokens_per_s == pytest.approx(2 / 8)


def test_more_tries_give_no_fewer_tokens():
    """All groups first take the front, which is near; most are better off elsewhere."""
    case = service(groups=6, room_bytes=np.full(3, 3.0), latency_s=np.full((3, 3), 9.0))
    placement = ((0, 1, 2), (1, 2), (1, 2))
    first, last = (
        simulate(case, routes(case, placement, tries=tries)).tokens_per_s for tries in (0, 60)
    )
    assert last > first


@pytest.mark.parametrize(
    ("placement", "lost", "field"),
    [
        (((0,), (1,)), (), "placement"),
        (((0,), (1, 2), (2,)), (), "placement[1]"),
        (((0,), (3,), (2,)), (), "placement[1][0]"),
        (((0,), (0,), (2,)), (), "placement[1]"),
        (((), (1,), (2,)), (), "placement[0]"),
        (((0,), (1,), (2,)), (0,), "lost"),
        (((0,), (1,), (2,)), (3,), "lost"),
    ],
)
def test_what_fits_no_case_is_refused(placement, lost, field: str):
    with pytest.raises(InputError) as refused:
        routes(service(), placement, lost)
    assert refused.value.field == field
