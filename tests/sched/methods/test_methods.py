"""What every method's plan keeps, whatever the case."""

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.fields import INT32_MAX
from skippipe_sched.methods import METHODS, balanced, make_plan
from skippipe_sched.problem.case import Rules, parse_case
from skippipe_sched.problem.plan import parse_plan
from skippipe_sched.problem.rules import sequence_problem, violations
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan

from tests.sched.examples import cases, outer, policies, same_place

# Little enough for many examples.
BUDGET_S = 0.05


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
@given(
    case=cases(),
    policy=st.none() | policies(),
    size=st.sampled_from([2**24, 2**33]),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=12)
def test_every_plan_keeps_what_a_plan_promises(method, case, policy, size, seed):
    """Also one of averaging behind the iterations, whose rings may be late."""
    if policy is not None:
        case = parse_case({**outer(case, **policy).source, "stage_bytes": size})
    if "full" not in method and not _balance_is_possible(case):
        with pytest.raises(InputError, match=r"case\.rules\.max_jump"):
            make_plan(case, method, Search(seed, BUDGET_S))
        return
    plan = make_plan(case, method, Search(seed, BUDGET_S))
    assert violations(case, plan.stages, plan.microbatches) == []
    length = len(case.stages) if "full" in method else case.path_length
    assert {len(path) for path in plan.microbatches} == {length}

    written = json.dumps(plan.to_json(), allow_nan=False)
    read = parse_plan(json.loads(written))
    assert json.dumps(read.to_json()) == written
    assert read.case.nodes == case.nodes
    assert read.case.link_table == case.link_table
    for name in ("stages", "microbatches", "order"):
        assert getattr(read, name) == getattr(plan, name)

    bound_s = plan.predicted.lower_bound_s
    assert bound_s is not None
    assert simulate_plan(read).predicted(bound_s) == plan.predicted
    assert 0 < bound_s * (1 - 1e-9) <= plan.predicted.iteration_s


def test_a_full_plan_goes_to_near_replicas():
    case = parse_case(
        {
            **same_place([2, 2]).source,
            "nodes": [{"location": place} for place in ("east", "west", "west", "east")],
            "links": [["east", "west", 100, 1]],
        }
    )
    search = Search(budget_s=BUDGET_S, placement=((0, 1), (2, 3)))
    assert make_plan(case, "full", search).microbatches == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("inner", "length", "jump", "microbatches"), [(7, 3, 1, 2), (6, 3, 1, 12), (6, 2, 2, 10)]
)
def test_a_balanced_plan_is_found_where_few_sets_of_stages_balance(
    inner, length, jump, microbatches
):
    """Of a data node and inner stages of one node each, of which paths visit `length`."""
    sizes = {"path_length": length + 1, "microbatches_per_data_node": microbatches}
    case = same_place([1] * (inner + 1), **sizes, rules={"max_jump": jump})
    for seed in range(3):
        make_plan(case, "balanced", Search(seed))


def test_rules_far_beyond_the_stages_limit_nothing():
    rules = dict.fromkeys(("max_swaps", "max_swap_distance", "max_jump"), INT32_MAX)
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


@pytest.mark.parametrize("ends", ["budget", "interrupt"])
def test_balanced_tries_as_many_paths_as_its_budget_pays_for(monkeypatch, ends):
    """With a large case or after Ctrl-C it simulates no candidates, and takes the shortest hops."""
    monkeypatch.setattr(balanced, "_cost", lambda *_: pytest.fail("a candidate is simulated"))
    few = ends == "interrupt"
    case = same_place([2, 2, 2], path_length=2, microbatches_per_data_node=4 if few else 150)
    search = Search(budget_s=1.0)
    search.end.interrupted = few
    make_plan(case, "balanced", search)
