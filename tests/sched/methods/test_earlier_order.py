"""What is left of a plan's order: all of it if nothing changed, and else nothing that locks."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.methods.repair import order_by_start_times, start_times
from skippipe_sched.problem.plan import load_plan
from skippipe_sched.timing.simulate import simulate, simulate_plan

from tests.sched.examples import planned, routed_cases, same_place

PLANS = Path("experiments/paper/plans")


@given(routed_cases())
@settings(max_examples=50)
def test_a_plan_that_stays_keeps_its_order(example):
    plan, timeline = planned(*example)
    order = order_by_start_times(start_times(plan), plan.case, plan.microbatches)
    assert order is not None
    assert simulate(plan.case, plan.stages, plan.microbatches, order).iteration_s == (
        timeline.iteration_s
    )


def test_nodes_wait_as_a_search_found_that_they_should():
    plan = load_plan(PLANS / "skip33_swaps.json")
    order = order_by_start_times(start_times(plan), plan.case, plan.microbatches)
    assert order == simulate_plan(plan).order == plan.order
    dispatched = simulate(plan.case, plan.stages, plan.microbatches)
    assert dispatched.iteration_s > 1.2 * plan.predicted.iteration_s


@given(routed_cases(), st.data())
@settings(max_examples=100)
def test_on_other_replicas_it_runs_or_is_none(example, data):
    """Every visit may be on any other replica now, of a case with any memory."""
    case, stages, paths = example
    before, _ = planned(case, stages, paths)
    now = [
        tuple(data.draw(st.sampled_from(stages[before.stage_of[node]])) for node in path)
        for path in paths
    ]
    order = order_by_start_times(start_times(before), case, now)
    if order is None:
        assert any(
            before.stage_of[a] > before.stage_of[b] for path in now for a, b in pairwise(path)
        )
        return
    plan, _ = planned(case, stages, now)
    simulate_plan(replace(plan, order=order))


def test_paths_that_swap_may_lock_and_are_told_of():
    """Two microbatches over two nodes of one place each, in opposite orders, at one time."""
    case = same_place([2, 2, 2], memory=1, rules={"max_swaps": 1})
    apart = [(0, 2, 4), (1, 5, 3)]
    plan, _ = planned(case, [(0, 1), (2, 3), (4, 5)], apart)
    assert order_by_start_times(start_times(plan), case, apart) is not None
    assert order_by_start_times(start_times(plan), case, [(0, 2, 4), (1, 4, 2)]) is None


def test_what_had_to_wait_is_later_all_the_way():
    """Microbatch 1 waits for room on node 0 until 10 s, and so lets microbatch 2 pass on node 2."""
    nodes = [{"memory": 1}, {"memory": 1}, {"memory": 3}]
    case = same_place([2, 1], nodes=nodes, microbatches_per_data_node=[2, 1])
    start_s = [[0, 1, 2, 3, 10], [0.5, 3.5, 4, 5, 6], [11, 12, 14, 15, 16]]
    order = order_by_start_times(start_s, case, [(0, 2), (0, 2), (1, 2)])
    assert order is not None
    forwards = [run.microbatch for run in order[2] if run.kind == "F"]
    assert forwards == [0, 2, 1]
    assert [str(run)[0] for run in order[0]] == ["F", "L", "B"] * 2
