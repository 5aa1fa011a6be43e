from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.serving.bound import bounds
from skippipe_sched.serving.case import HeldStages, ServingCase
from skippipe_sched.serving.placing import OBJECTIVES, Objective, place
from skippipe_sched.serving.routing import routes
from skippipe_sched.serving.simulate import simulate

from tests.sched.serving.cases import (
    STEPS,
    fewest_unheld,
    least_s,
    most_tokens_per_s,
    random_service,
    service,
    services,
)

OBJECTIVE = st.sampled_from(OBJECTIVES)


def unheld(case: ServingCase, placement: HeldStages) -> int:
    return case.stages - len({stage for stages in placement for stage in stages})


def room_left(case: ServingCase, placement: HeldStages) -> np.ndarray:
    return case.room_bytes - [case.stage_bytes[list(stages)].sum() for stages in placement]


@given(services(), OBJECTIVE)
def test_as_many_stages_as_possible_have_a_host(case: ServingCase, objective: Objective):
    placement = place(case, objective, tries=5)
    assert (room_left(case, placement) >= 0).all()
    assert unheld(case, placement) == fewest_unheld(case)
    for free, stages in zip(room_left(case, placement), placement, strict=True):
        others = {*range(1, case.stages)} - {*stages}
        assert all(case.stage_bytes[stage] > free for stage in others), "room for another stage"
    assert place(case, objective, tries=5) == placement
    assert place(case, objective, held=placement, tries=5) == placement, "nobody comes or goes"


@given(services(groups=1))
def test_one_sequence_is_as_quick_as_it_can_be(case: ServingCase):
    """Small cases are searched whole, whichever stages have no host."""
    placement = place(case, "seconds_per_token")
    found = simulate(case, routes(case, placement)).seconds_per_token
    assert found == pytest.approx(least_s(case))


def test_all_groups_get_most_of_the_tokens_that_are_possible_and_bounds_are_near_them():
    """Against all placements and routes of small cases. A sequence's bound is exact."""
    lost, gaps = [], []
    for seed in range(8):
        random = np.random.default_rng(seed)
        case = random_service(random, (3, 4) if seed % 2 else (4, 3), 2 + seed % 2)
        found = simulate(case, routes(case, place(case)), STEPS).tokens_per_s
        most, bound = most_tokens_per_s(case), bounds(case)
        lost.append(1 - found / most)
        gaps.append(bound.tokens_per_s / most - 1)
        assert bound.seconds_per_token == pytest.approx(least_s(case))
    assert np.mean(lost) < 0.005
    assert max(lost) < 0.05
    assert np.mean(gaps) < 0.05


def test_a_host_that_joins_changes_no_other():
    case = service(room_bytes=np.array([2.0, 2, 0]))
    held = place(case)
    assert held == ((0, 1), (1, 2), ()) or unheld(case, held) == 0
    more = replace(case, room_bytes=np.array([2.0, 2, 2]))
    after = place(more, held=held)
    assert after[:2] == held[:2]
    assert after[2] == (1, 2)


@given(services(stages=5), st.data())
def test_few_bytes_are_loaded_when_hosts_are_lost(case: ServingCase, data: st.DataObject):
    """No stage is without a host that could have one; others load at most what has lost its hosts.

    Where that does not do, as sizes do not fit together, only the first holds.
    """
    held = place(case, tries=0)
    lost = data.draw(st.frozensets(st.integers(1, case.hosts - 1), max_size=2))
    after = place(case, held=held, lost=lost, tries=0)
    left = replace(
        case, room_bytes=np.where([h in lost for h in range(case.hosts)], 0, case.room_bytes)
    )
    assert unheld(case, after) == fewest_unheld(left)
    assert all(after[host] == () for host in lost)
    left_held = [stages if host not in lost else () for host, stages in enumerate(held)]
    if unheld(case, tuple(left_held)) == fewest_unheld(left):
        assert all(now == before for now, before in zip(after, left_held, strict=True) if before)


def test_a_stage_that_lost_its_only_host_takes_the_place_of_one_with_another_host():
    """All hosts are full, but stage 2 has two."""
    case = service(
        step_s=np.ones((4, 4)),
        room_bytes=np.array([1.0, 2, 1, 1]),
        stage_bytes=np.ones(4),
        latency_s=np.ones((4, 4)),
        bandwidth=np.ones((4, 4)),
    )
    held = ((0,), (1, 2), (2,), (3,))
    assert place(case, held=held, lost=[3]) == ((0,), (1, 2), (3,), ())


def test_sizes_that_hardly_fit_together_are_fitted():
    """Each host is full; the search for routes alone would take a wrong turn."""
    sizes = np.array([1.0, 7, 6, 5, 4, 3, 2, 1])
    case = service(
        step_s=np.ones((4, 8)),
        room_bytes=np.array([1.0 + 9, 7, 8, 4]),
        stage_bytes=sizes,
        latency_s=np.ones((4, 4)),
        bandwidth=np.ones((4, 4)),
        groups=4,
    )
    assert unheld(case, place(case)) == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"objective": "fast"}, "objective"),
        ({"held": ((0,), (1, 2), ())}, "held[1]"),
        ({"lost": [0]}, "lost"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, field: str):
    with pytest.raises(InputError) as refused:
        place(service(), **changes)
    assert refused.value.field == field
