"""What every method's plan keeps, whatever the case; and the lower bound against brute force."""

import json
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.bound import lower_bound_s
from skippipe_sched.case import Rules, parse_case
from skippipe_sched.errors import InputError
from skippipe_sched.methods import METHODS, make_plan
from skippipe_sched.plan import parse_plan
from skippipe_sched.rules import sequence_problem, violations
from skippipe_sched.search import Search
from skippipe_sched.simulate import simulate, simulate_plan

from tests.sched.examples import cases, in_order, same_place

ROUNDING = 1 - 1e-12


def _balance_is_possible(case) -> bool:
    """Whether sets of stages under the rules can visit inner stages equally often: by trying."""
    inner = len(case.stages) - 1
    length = case.path_length - 1
    sets = [
        chosen
        for chosen in combinations(range(1, inner + 1), length)
        if sequence_problem((0, *chosen), Rules(0, 1, case.rules.max_jump)) is None
    ]
    microbatches = sum(case.microbatches)
    most = -(-microbatches * length // inner) if inner else 0
    reached = {(0,) * inner}
    for _ in range(microbatches):
        reached = {
            tuple(count + (stage in chosen) for stage, count in enumerate(visits, start=1))
            for visits in reached
            for chosen in sets
        }
        reached = {visits for visits in reached if not visits or max(visits) <= most}
    return any(not visits or max(visits) - min(visits) <= 1 for visits in reached)


@pytest.mark.parametrize("method", METHODS)
@given(case=cases(), seed=st.integers(0, 2**40))
@settings(max_examples=120, deadline=None)
def test_every_plan_keeps_what_a_plan_promises(method, case, seed):
    if method != "full" and not _balance_is_possible(case):
        with pytest.raises(InputError, match=r"case\.rules\.max_jump"):
            make_plan(case, method, Search(seed))
        return
    plan = make_plan(case, method, Search(seed))
    assert violations(case, plan.stages, plan.microbatches) == []
    length = len(case.stages) if method == "full" else case.path_length
    assert {len(path) for path in plan.microbatches} == {length}

    written = json.dumps(plan.to_json(), allow_nan=False)
    read = parse_plan(json.loads(written))
    assert json.dumps(read.to_json()) == written
    assert read.case.nodes == case.nodes
    assert read.case.link_table == case.link_table
    assert (read.stages, read.microbatches, read.order) == (
        plan.stages,
        plan.microbatches,
        plan.order,
    )

    timeline = simulate_plan(read)
    predicted = plan.predicted
    assert timeline.iteration_s == predicted.iteration_s
    assert timeline.pipeline_s == predicted.pipeline_s
    assert timeline.averaging_s == predicted.averaging_s
    assert predicted.iteration_s >= predicted.lower_bound_s * ROUNDING
    assert predicted.lower_bound_s > 0

    assert make_plan(case, method, Search(seed)).to_json() == plan.to_json()


def test_a_full_plan_goes_to_near_replicas():
    case = parse_case(
        {
            **same_place([2, 2]).source,
            "nodes": [{"location": place} for place in ("east", "west", "west", "east")],
            "links": [["east", "west", 100, 1]],
        }
    )
    assert make_plan(case, "full").microbatches == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("inner", "length", "jump"), [(3, 1, 0), (4, 2, 0), (5, 2, 1), (5, 3, 0), (5, 1, 3), (4, 3, 0)]
)
def test_a_jump_limit_that_leaves_no_balanced_plan_is_refused(inner, length, jump):
    case = same_place(
        [1] * (inner + 1),
        path_length=length + 1,
        microbatches_per_data_node=30,
        rules={"max_jump": jump},
    )
    with pytest.raises(InputError) as refused:
        make_plan(case, "balanced")
    assert refused.value.field == "case.rules.max_jump"
    assert refused.value.value == jump


@pytest.mark.parametrize(
    ("inner", "length", "jump", "microbatches"), [(7, 3, 1, 2), (6, 3, 1, 12), (6, 2, 2, 10)]
)
def test_a_balanced_plan_is_found_where_few_sets_of_stages_balance(
    inner, length, jump, microbatches
):
    case = same_place(
        [1] * (inner + 1),
        path_length=length + 1,
        microbatches_per_data_node=microbatches,
        rules={"max_jump": jump},
    )
    for seed in range(3):
        make_plan(case, "balanced", Search(seed))


def test_rules_far_beyond_the_stages_limit_nothing():
    rules = dict.fromkeys(("max_swaps", "max_swap_distance", "max_jump"), 10**30)
    case = same_place([2, 2, 2, 2], path_length=3, microbatches_per_data_node=3, rules=rules)
    plan = make_plan(case, "balanced")
    assert violations(case, plan.stages, plan.microbatches) == []


def test_balanced_uses_swaps_where_they_are_allowed():
    def swapped(max_swaps):
        case = same_place(
            [2, 1, 1, 1],
            path_length=4,
            microbatches_per_data_node=4,
            rules={"max_swaps": max_swaps},
        )
        plan = make_plan(case, "balanced")
        return [a > b for path in plan.microbatches for a, b in pairwise(path[1:])]

    assert not any(swapped(0))
    assert any(swapped(1))


# The lower bound.


def _every_plan(case):
    """Every placement, and for each all choices of paths of `path_length` stages."""
    length = case.path_length - 1
    sequences = list(permutations(range(1, len(case.stages)), length))
    sent = [node for node, count in enumerate(case.microbatches) for _ in range(count)]
    for nodes in permutations(range(len(case.nodes))):
        stages = tuple(tuple(nodes[place] for place in stage) for stage in in_order(case.stages))
        if any(list(stage) != sorted(stage) for stage in stages[1:]):
            continue  # Inner replicas in another order are the same placement.
        routes = [
            route
            for sequence in sequences
            for route in product(*(stages[stage] for stage in sequence))
        ]
        for chosen in product(routes, repeat=len(sent)):
            yield stages, tuple((stages[0][n], *r) for n, r in zip(sent, chosen, strict=True))


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_no_plan_of_a_tiny_case_beats_the_lower_bound(data):
    sizes, microbatches = data.draw(
        st.sampled_from(
            [
                ([1], 3),
                ([2], [1, 2]),
                ([1, 1], 2),
                ([1, 2], 2),
                ([2, 1], [2, 1]),
                ([2, 2], 1),
                ([1, 1, 1], 2),
                ([3, 1], 1),
            ]
        )
    )
    speed = st.sampled_from([0.25, 1.0, 3.0])
    places = [f"place {index}" for index in range(sum(sizes))]
    latency = st.integers(1, 2000)
    case = {
        **same_place(sizes).source,
        "nodes": [{"location": place, "forward_s": data.draw(speed)} for place in places],
        "links": [
            [a, b, data.draw(latency), data.draw(st.sampled_from([0.1, 1.0]))]
            for a in places
            for b in places
            if a != b
        ],
        "activation_bytes": data.draw(st.sampled_from([0, 2**27])),
        "stage_bytes": data.draw(st.sampled_from([0, 2**30])),
        "loss_ratio": data.draw(st.sampled_from([0, 0.5])),
        "path_length": data.draw(st.integers(1, len(sizes))),
        "microbatches_per_data_node": microbatches,
        "memory": data.draw(st.integers(1, 2)),
        "contention": "none",
    }
    case = parse_case(case)
    best_s = min(simulate(case, *plan).iteration_s for plan in _every_plan(case))
    assert lower_bound_s(case, case.path_length) * ROUNDING <= best_s


def test_the_bound_is_reached_by_one_microbatch_alone():
    case = same_place([1, 1, 1])
    plan = make_plan(case, "full")
    assert plan.predicted.iteration_s == pytest.approx(plan.predicted.lower_bound_s)


def test_the_bound_is_reached_by_data_nodes_alone():
    case = same_place(
        [3], path_length=1, microbatches_per_data_node=[2, 5, 1], stage_bytes=2**30, forward_s=2
    )
    plan = make_plan(case, "full")
    assert plan.predicted.iteration_s == pytest.approx(plan.predicted.lower_bound_s)
