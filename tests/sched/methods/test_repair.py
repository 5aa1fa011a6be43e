"""Going on at once when nodes are lost: the same cut, the same microbatches, other replicas."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.figures.gantt import gantt
from skippipe_sched.methods import make_plan, with_prediction
from skippipe_sched.methods.repair import (
    fill_empty_stages,
    kept_stages,
    order_by_start_times,
    repair_plan,
    start_times,
)
from skippipe_sched.methods.routes import Routes
from skippipe_sched.problem.plan import load_plan, parse_plan
from skippipe_sched.problem.rules import violations
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.simulate import simulate, simulate_plan

from tests.harness.messages import refusal
from tests.sched.examples import (
    balanced_cases,
    in_order,
    outer,
    planned,
    policies,
    routed_cases,
    same_place,
)

PAPER = Path("experiments/paper/plans")
ROUNDING = 1 - 1e-9


def sequences(plan):
    return [[plan.stage_of[node] for node in path] for path in plan.microbatches]


def require_goes_on(before, after, kept, stages):
    """That `after` is a whole plan of the nodes `kept` in `stages`, and otherwise `before`."""
    nodes = sorted(kept)
    number = {node: new for new, node in enumerate(nodes)}
    assert after.case.nodes == tuple(before.case.nodes[node] for node in nodes)
    assert after.stages == tuple(tuple(number[node] for node in stage) for stage in stages)
    assert sequences(after) == sequences(before)
    for was, now in zip(before.microbatches, after.microbatches, strict=True):
        for old, new in zip(was, now, strict=True):
            stage = before.stage_of[old]
            assert set(stages[stage]) != set(before.stages[stage]) or new == number[old]
    read = parse_plan(json.loads(json.dumps(after.to_json(), allow_nan=False)))
    assert read.to_json() == after.to_json()
    timeline = simulate_plan(read)
    assert timeline.iteration_s == after.predicted.iteration_s
    assert timeline.pipeline_s == after.predicted.pipeline_s
    assert after is before or after.predicted.lower_bound_s is None


@st.composite
def random_plans(draw: st.DrawFn):
    """Plans with random paths, which keep the rules of their cases."""
    case, stages, paths = draw(balanced_cases())
    policy = draw(st.none() | policies())
    case = case if policy is None else outer(case, **policy)
    return with_prediction(case, "random", Routes(stages, paths))


def draw_kept(data, plan):
    """Some nodes of every stage."""
    return {
        node
        for stage in plan.stages
        for node in data.draw(st.lists(st.sampled_from(stage), min_size=1, unique=True))
    }


@given(plan=random_plans(), data=st.data())
def test_a_plan_that_keeps_the_rules_keeps_them_on_fewer_nodes(plan, data):
    """And says what the steady state there is, where nobody waits for averaging."""
    kept = draw_kept(data, plan)
    after = repair_plan(plan, kept)
    require_goes_on(plan, after, kept, kept_stages(plan, kept))
    assert violations(after.case, after.stages, after.microbatches) == []
    assert after.case.averaging == plan.case.averaging
    assert after.predicted.late_s == simulate_plan(after).late_s


@given(example=routed_cases(), data=st.data())
def test_a_plan_of_any_paths_goes_on_wherever_nodes_are_left(example, data):
    """Whole stages may be lost too."""
    plan, _ = planned(*example)
    everyone = range(len(plan.case.nodes))
    kept = data.draw(
        st.lists(st.sampled_from(everyone), min_size=len(plan.stages), unique=True).map(set)
    )
    stages = fill_empty_stages(plan, kept)
    before = kept_stages(plan, kept)
    assert sorted(node for stage in stages for node in stage) == sorted(kept)
    moved = sum(len(set(now) - set(was)) for was, now in zip(before, stages, strict=True))
    assert moved == before.count(())
    require_goes_on(plan, repair_plan(plan, kept, stages), kept, stages)


@given(plan=random_plans(), data=st.data())
@settings(max_examples=20)
def test_paths_lead_past_stages_that_are_left_out(plan, data):
    """And keep the rules among the stages that are left, of which nodes may be lost too."""
    inner = range(1, len(plan.stages))
    left_out = data.draw(st.sets(st.sampled_from(inner)) if inner else st.just(set()))
    kept = draw_kept(data, plan) - {node for stage in left_out for node in plan.stages[stage]}
    after = repair_plan(plan, kept, kept_stages(plan, kept), left_out)
    assert after.case.left_out == tuple(sorted(left_out))
    assert [stage for stage, nodes in enumerate(after.stages) if not nodes] == sorted(left_out)
    assert sequences(after) == [
        [stage for stage in own if stage not in left_out] for own in sequences(plan)
    ]
    read = parse_plan(json.loads(json.dumps(after.to_json(), allow_nan=False)))
    assert read.to_json() == after.to_json()
    assert violations(read.case, read.stages, read.microbatches) == []
    timeline = simulate_plan(read)
    assert timeline.iteration_s == after.predicted.iteration_s
    bound_s = lower_bound_s(read.case, min(map(len, read.microbatches)))
    assert 0 < bound_s * ROUNDING <= timeline.iteration_s


def test_a_stage_is_left_out_only_where_the_plan_says_so():
    case = same_place([1, 1, 1], path_length=3)
    plan, _ = planned(case, in_order([1, 1, 1]), [(0, 1, 2)])
    after = repair_plan(plan, {0, 2}, ((0,), (), (2,)), [1])
    assert (after.case.path_length, after.microbatches) == (2, ((0, 1),))
    written = after.to_json()
    for left_out, told in (
        ([], "case.stages[1] = 0: must be at least 1"),
        ([0], "case.left_out[0] = 0: must be at least 1"),
        ([1, 2], "case.stages[2] = 1: must be at most 0"),
    ):
        with refusal(told):
            parse_plan(written | {"case": written["case"] | {"left_out": left_out}})
    with refusal("case.left_out = [1]: is not supported by planning"):
        make_plan(after.case, "balanced")
    with refusal("stages[0] = []: has no node; ... it has [0]"):
        repair_plan(plan, {1, 2}, ((), (1,), (2,)), [0])
    assert "Stage 1 · bypassed" in gantt(after, simulate_plan(after))


def test_no_node_moves_to_a_stage_that_is_left_out():
    case = same_place([1, 1, 3, 1])
    plan, _ = planned(case, in_order([1, 1, 3, 1]), [(0, 1, 2)])
    assert fill_empty_stages(plan, {0, 2, 3}, left_out=[1]) == ((0,), (), (3,), (2,))
    with pytest.raises(InputError, match=r"only 2 nodes remain, and each of the 3 stages needs"):
        fill_empty_stages(plan, {0, 2}, left_out=[1])


def test_when_all_nodes_are_there_the_plan_is_the_plan():
    plan = load_plan(PAPER / "skip33.json")
    assert repair_plan(plan, range(20)) is plan
    assert repair_plan(plan, range(20), fill_empty_stages(plan, range(20))) is plan


@pytest.mark.parametrize(
    ("given", "lost", "left"),
    [
        ([4, 4, 4], 2, [6, 6]),
        ([4, 3, 3], 0, [5, 5]),
        ([4, 4, 3], 2, [6, 5]),
        ([8, 2, 5], 2, [12, 3]),
    ],
    ids=["evenly", "evenly again", "the rest where it was", "in proportion"],
)
def test_data_nodes_share_what_a_lost_one_sent(given, lost, left):
    case = same_place([3], microbatches_per_data_node=given)
    paths = [(node,) for node, count in enumerate(given) for _ in range(count)]
    plan, _ = planned(case, in_order([3]), paths)
    kept = {0, 1, 2} - {lost}
    after = repair_plan(plan, kept)
    assert after.case.microbatches == tuple(left)
    old = sorted(kept)
    assert all(
        old[now[0]] == was[0]
        for was, now in zip(plan.microbatches, after.microbatches, strict=True)
        if was[0] != lost
    )


def test_quicker_replicas_get_more_and_otherwise_near_ones_are_taken():
    """Stage 1 loses node 5; of the others node 3 is as quick as node 2 and 4 together."""
    speeds = [1, 1, 2, 1, 2, 1]
    places = ["east", "west", "east", "west", "west", "east"]
    case = same_place(
        [2, 4],
        nodes=[{"location": p, "forward_s": s} for p, s in zip(places, speeds, strict=True)],
        links=[["east", "west", 1000, 1]],
        microbatches_per_data_node=6,
    )
    inner = [2, 2, 5, 5, 5, 5, 3, 3, 3, 3, 4, 4]
    paths = [(index // 6, node) for index, node in enumerate(inner)]
    plan, _ = planned(case, in_order([2, 4]), paths)
    after = repair_plan(plan, {0, 1, 2, 3, 4})
    assert Counter(path[1] for path in after.microbatches) == {2: 3, 3: 6, 4: 3}
    # Nothing in the west need go to the east, and three in the east stay there.
    assert all(node in (3, 4) for data_node, node in after.microbatches if data_node == 1)


def test_where_nothing_is_gained_live_replicas_keep_their_visits():
    case = same_place([1, 3], microbatches_per_data_node=6)
    plan, _ = planned(case, in_order([1, 3]), [(0, node) for node in (2, 1, 3, 2, 1, 3)])
    after = repair_plan(plan, {0, 1, 2})
    first, second = (after.microbatches[index][1] for index in (2, 5))
    assert {first, second} == {1, 2}
    assert [path[1] for path in after.microbatches] == [2, 1, first, 2, 1, second]


def test_visits_of_live_replicas_trade_places_around_a_link_that_is_too_slow():
    """Without, one path would lead from the Netherlands to London, and take 300 s."""
    plan = load_plan(PAPER / "skip33.json")
    assert repair_plan(plan, set(range(20)) - {14}).predicted.iteration_s < 60


def test_nodes_still_wait_where_that_is_quicker():
    """What the search found of the order outlives a node."""
    plan = load_plan(PAPER / "skip33.json")
    after = repair_plan(plan, set(range(20)) - {10})
    dispatched = simulate(after.case, after.stages, after.microbatches)
    assert after.predicted.iteration_s < 0.95 * dispatched.iteration_s


@pytest.mark.parametrize("name", ["skip33", "full"])
def test_whichever_node_the_papers_plan_loses_it_goes_on_soon(name):
    plan = load_plan(PAPER / f"{name}.json")
    longest_s = 1.5 * plan.predicted.iteration_s
    for lost in range(0, 20, 3):
        kept = set(range(20)) - {lost}
        after = repair_plan(plan, kept)
        require_goes_on(plan, after, kept, kept_stages(plan, kept))
        assert after.method == f"{plan.method}, nodes lost: 1"
        assert violations(after.case, after.stages, after.microbatches) == []
        assert after.predicted.iteration_s < longest_s


def test_a_lost_stage_is_refused_unless_it_is_refilled():
    case = same_place([2, 3, 1], memory=1)
    plan, _ = planned(case, in_order([2, 3, 1]), [(0, 2, 5), (1, 3, 5)])
    with pytest.raises(InputError, match=r"stages\[2\] = \[\]: has no node; .* it has \[5\]"):
        repair_plan(plan, {0, 1, 2, 3, 4})
    with pytest.raises(InputError, match=r"only 2 nodes remain, and each of the 3 stages needs"):
        fill_empty_stages(plan, {0, 4})
    with pytest.raises(InputError, match=r"must be 3 stages that list each of the nodes"):
        repair_plan(plan, {0, 2, 5}, ((0,), (2,), (4,)))
    with pytest.raises(InputError, match=r"the case has no node 6"):
        fill_empty_stages(plan, {0, 2, 6})


@pytest.mark.parametrize(
    ("sizes", "changed", "kept", "stages"),
    [
        ([2, 3, 1], {}, {0, 1, 2, 3, 4}, ((0, 1), (3, 4), (2,))),
        ([2, 3, 1], {3: {"forward_s": 0.5}}, {0, 1, 2, 3, 4}, ((0, 1), (2, 4), (3,))),
        ([2, 3, 1], {4: {"memory": 9}}, {0, 1, 2, 3, 4}, ((0, 1), (2, 3), (4,))),
        ([2, 2, 1], {}, {0, 1, 2, 3}, ((0, 1), (3,), (2,))),
        ([3, 2, 1], {}, {0, 1, 2, 3, 4}, ((1, 2), (3, 4), (0,))),
        ([1, 4, 1], {}, {1, 2, 3, 4}, ((1,), (3, 4), (2,))),
    ],
    ids=["the largest gives", "its fastest", "or its roomiest", "an inner one of equal ones",
         "or the data stage", "two are lost"],
)  # fmt: skip
def test_which_nodes_move_to_lost_stages(sizes, changed, kept, stages):
    nodes = [changed.get(node, {}) for node in range(sum(sizes))]
    case = same_place(sizes, nodes=nodes)
    paths = [tuple(stage[0] for stage in in_order(sizes))]
    plan, _ = planned(case, in_order(sizes), paths)
    assert fill_empty_stages(plan, kept) == stages


def test_no_node_without_the_text_moves_to_the_data_stage():
    case = same_place([1, 3, 2])
    plan, _ = planned(case, in_order([1, 3, 2]), [(0, 1, 4)])
    kept = {1, 2, 3, 4, 5}
    assert fill_empty_stages(plan, kept) == ((1,), (2, 3), (4, 5))
    assert fill_empty_stages(plan, kept, {1, 2}) == ((3,), (1, 2), (4, 5))
    assert fill_empty_stages(plan, kept, {1, 2, 3}) == ((4,), (1, 2, 3), (5,))
    with pytest.raises(InputError, match="none of the remaining nodes has the text"):
        fill_empty_stages(plan, kept, kept)
    # Other stages read none.
    assert fill_empty_stages(plan, {0, 1, 2, 3}, {1, 2, 3}) == ((0,), (2, 3), (1,))


# What is left of a plan's order: all of it if nothing changed, and else nothing that locks.


@given(routed_cases())
def test_a_plan_that_stays_keeps_its_order(example):
    plan, timeline = planned(*example)
    order = order_by_start_times(start_times(plan), plan.case, plan.microbatches)
    assert order is not None
    assert simulate(plan.case, plan.stages, plan.microbatches, order).iteration_s == (
        timeline.iteration_s
    )


def test_nodes_wait_as_a_search_found_that_they_should():
    plan = load_plan(PAPER / "skip33_swaps.json")
    order = order_by_start_times(start_times(plan), plan.case, plan.microbatches)
    assert order == simulate_plan(plan).order == plan.order
    dispatched = simulate(plan.case, plan.stages, plan.microbatches)
    assert dispatched.iteration_s > 1.2 * plan.predicted.iteration_s


@given(routed_cases(), st.data())
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
