"""The bounds where iterations follow one another without a barrier: no plan's mean is below."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.problem.case import parse_case
from skippipe_sched.timing.averaging import least_averaged_s, rings_of_iteration
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.simulate import forecast, simulate

from tests.sched.examples import balanced_cases, in_order, outer, policies, replicas, same_place

ROUNDING = 1 - 1e-9
# F 1 s, L half a second, B 2 s.
ALONE_S = 3.5


def require_below(case, stages, paths):
    iteration_s = forecast(case, stages, paths).iteration_s
    bound_s = lower_bound_s(case, len(paths[0]))
    assert 0 < bound_s * ROUNDING <= iteration_s
    return iteration_s, bound_s


@given(balanced_cases(), policies(), st.sampled_from([0, 2**26, 2**33]))
def test_no_plan_that_keeps_the_rules_beats_the_bound(example, policy, size):
    """With rings that are in time, and others that are not."""
    case, stages, paths = example
    case = parse_case(dict(outer(case, **policy).source) | {"stage_bytes": size})
    require_below(case, stages, paths)


def data_nodes(ring_s: float, **averaging):
    """Three of them alone."""
    return replicas(ring_s, (1.0, 1.0, 1.0), **averaging)


@pytest.mark.parametrize(
    ("ring_s", "every", "fragments", "delay", "seconds"),
    [
        (3.0, 4, 1, 1, ALONE_S),
        (9.5, 4, 1, 1, ALONE_S + 6 / 4),
        (9.5, 4, 1, 3, ALONE_S),
        (9.5, 4, 2, 1, ALONE_S + 6 / 2),
        (9.5, 4, 4, 1, 9.5),
        (9.5, 4, 4, 3, 9.5),
        (2.0, 1, 1, 0, ALONE_S + 2),
        (2.0, 4, 1, 0, ALONE_S + 2 / 4),
    ],
)
def test_data_nodes_alone_reach_the_bound_whatever_their_rings_take(
    ring_s, every, fragments, delay, seconds
):
    case, stages, paths = data_nodes(ring_s, every=every, fragments=fragments, delay=delay)
    iteration_s, bound_s = require_below(case, stages, paths)
    assert iteration_s == pytest.approx(seconds)
    assert bound_s == pytest.approx(seconds)


def test_with_one_data_node_an_iteration_ends_before_the_next_begins():
    """So the bound has the whole way of an inner node's microbatches, and is reached by one."""
    case = outer(same_place([1, 1, 1]))
    stages, paths = in_order([1, 1, 1]), ((0, 1, 2),)
    iteration_s, bound_s = require_below(case, stages, paths)
    assert iteration_s == pytest.approx(simulate(case, stages, paths).pipeline_s)
    assert bound_s == pytest.approx(iteration_s)


def test_inner_nodes_may_begin_an_iteration_before_others_have_ended_theirs():
    """A slow inner node is busy all the time, and what comes before and after hides behind it."""
    case = same_place(
        [2, 1],
        nodes=[{"forward_s": 1}, {"forward_s": 1}, {"forward_s": 20}],
        microbatches_per_data_node=2,
    )
    paths = tuple((node, 2) for node in (0, 1) * 2)
    alone = simulate(case, ((0, 1), (2,)), paths)
    case = outer(case)
    iteration_s, bound_s = require_below(case, ((0, 1), (2,)), paths)
    assert iteration_s < alone.iteration_s
    assert bound_s <= iteration_s


def test_what_rings_leave_between_them_is_work():
    rings = rings_of_iteration(data_nodes(1.0, every=6, fragments=2, delay=2)[0].averaging)
    assert rings == pytest.approx((0.5, 1 / 3, 2.0, False))
    # Of six iterations four pass under two rings of 30 s, and two take 3 s at least.
    assert least_averaged_s(rings, 5.0, 30.0, 3.0) == pytest.approx((2 * 30 + 2 * 3) / 6)
    assert least_averaged_s(rings, 12.0, 30.0, 3.0) == 12.0
    # With no iteration between them rings follow one another.
    late = rings_of_iteration(data_nodes(1.0, every=6, fragments=2, delay=5)[0].averaging)
    assert late.delay == pytest.approx(3.0)
    assert least_averaged_s(late, 5.0, 30.0, 3.0) == pytest.approx(10.0)
