"""The bound that is reckoned at once: no plan beats it, and simple ones reach it."""

import pytest
from hypothesis import given, settings
from skippipe_sched.timing.quick_bound import quick_lower_bound_s

from tests.sched.examples import case_with, planned, routed_cases, same_place

ROUNDING = 1 - 1e-12


@given(routed_cases())
@settings(max_examples=100)
def test_no_plan_beats_the_quick_bound(example):
    case, stages, paths = example
    _, timeline = planned(case, stages, paths)
    bound_s = quick_lower_bound_s(case, min(map(len, paths)))
    assert 0 < bound_s * ROUNDING <= timeline.iteration_s


def test_one_microbatch_alone_reaches_it():
    """F, F, L, B and B take 1 + 1 + 0.5 + 2 + 2 s, and four hops 1 s each."""
    assert quick_lower_bound_s(case_with(), 2) == pytest.approx(10.5)
    # Two of the hops with an activation, and two with its gradient.
    larger = case_with(activation_bytes=2**30, gradient_bytes=2**31)
    assert quick_lower_bound_s(larger, 2) == pytest.approx(10.5 + 2 * 1 + 2 * 2)


@pytest.mark.parametrize("memory", [1, 3])
def test_data_nodes_alone_reach_it(memory):
    """Three microbatches of 3.5 s each, and then an averaging of two steps of a millisecond."""
    case = same_place([2], memory=memory, microbatches_per_data_node=3)
    assert quick_lower_bound_s(case, 1) == pytest.approx(10.502)


def test_where_each_node_has_a_part_of_the_work_all_of_it_counts():
    """The data node's own work takes 140 s, that of both nodes 260 s, half of it on each."""
    case = same_place([1, 1], stage_cost=[1, 2], memory=40, microbatches_per_data_node=40)
    assert quick_lower_bound_s(case, 2) == pytest.approx(40 * 9.5 / 2)
