"""When replicas average: what a case says of it, and what follows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.problem.averaging import EXACT, MOST_ITERATIONS, AveragingPolicy
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.node_addition import NewNode, with_more_nodes
from skippipe_sched.problem.node_subset import with_nodes
from skippipe_sched.problem.plan import parse_plan

from tests.harness.messages import refusal
from tests.sched.examples import TWO_NODES, case_with, planned


def test_a_case_that_says_nothing_averages_in_every_iteration():
    assert case_with().averaging == case_with(averaging={}).averaging == EXACT
    assert case_with(averaging={"mode": "exact"}).averaging == EXACT
    assert not EXACT.is_outer
    assert EXACT.fragment_bytes(1e9) == 1e9


def test_what_outer_leaves_out_has_its_defaults():
    usual = AveragingPolicy("outer", every=20, fragments=4, delay=1, dtype="int8")
    assert case_with(averaging={"mode": "outer"}).averaging == usual
    own = {"mode": "outer", "every": 6, "fragments": 3, "delay": 5, "dtype": "bfloat16"}
    assert case_with(averaging=own).averaging == AveragingPolicy("outer", 6, 3, 5, "bfloat16")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("auto", " = 'auto'...Write {mode: outer}"),
        ({"mode": "inner"}, ".mode = 'inner'...Use one of: exact, outer"),
        ({"every": 20}, ".every = 20...Remove this key, or write mode: outer"),
        ({"mode": "exact", "dtype": "int8"}, ".dtype = ...Remove this key, or write mode: outer"),
        ({"mode": "outer", "every": 0}, ".every = 0...at least 1"),
        ({"mode": "outer", "every": 10**9}, f".every = ...at most {MOST_ITERATIONS}"),
        ({"mode": "outer", "every": 2.5}, ".every = 2.5...whole number"),
        ({"mode": "outer", "fragments": 0}, ".fragments = 0...at least 1"),
        ({"mode": "outer", "every": 3}, ".fragments = 4...Write 3 or less, or raise every to 4"),
        ({"mode": "outer", "delay": -1}, ".delay = -1...at least 0"),
        ({"mode": "outer", "delay": 20}, ".delay = 20...Write 19 or less, or raise every to 21"),
        ({"mode": "outer", "dtype": "int4"}, ".dtype = 'int4'...Did you mean int8?"),
        ({"mode": "outer", "momentum": 0.9}, ".momentum = 0.9: unknown key"),
    ],
)
def test_wrong_settings_are_refused(given, told):
    with refusal(f"case.averaging{told}"):
        case_with(averaging=given)


@given(data=st.data())
def test_in_a_cycle_every_fragment_is_sent_once_and_evenly(data):
    every = data.draw(st.integers(1, 40))
    fragments = data.draw(st.integers(1, every))
    policy = AveragingPolicy("outer", every, fragments)
    sent = [policy.fragment_sent_after(iteration) for iteration in range(1, 2 * every + 1)]
    assert sent[:every] == sent[every:]
    assert [fragment for fragment in sent[:every] if fragment is not None] == [*range(fragments)]
    for fragment in range(fragments):
        offset = ((fragment + 1) * every) // fragments
        assert sent[offset - 1] == fragment
    assert sent[every - 1] == fragments - 1


@pytest.mark.parametrize(
    ("dtype", "width"), [("float32", 4.0), ("bfloat16", 2.0), ("int8", 1.0 + 4 / 128)]
)
def test_a_fragment_has_its_part_of_the_bytes_in_its_dtype(dtype, width):
    policy = AveragingPolicy("outer", 20, 4, 1, dtype)
    numbers = 4096
    assert policy.fragment_bytes(4 * 4 * numbers) == width * numbers


def test_the_policy_stays_with_plans_and_with_other_nodes():
    case = parse_case(TWO_NODES | {"nodes": 3, "stages": [2, 1], "averaging": {"mode": "outer"}})
    plan, timeline = planned(case, [[0, 1], [2]], [[0, 2], [1, 2]])
    written = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert written["case"]["averaging"] == {"mode": "outer"}
    assert written["predicted"]["late_s"] == timeline.late_s
    read = parse_plan(written)
    assert read.case.averaging == case.averaging
    assert read.predicted == plan.predicted
    assert with_nodes(case, [0, 2], [1, 1], [2]).averaging == case.averaging
    assert with_more_nodes(case, [NewNode("elsewhere")]).averaging == case.averaging


def test_a_plan_of_before_averages_exactly():
    plan, _ = planned(case_with(), [[0], [1]], [[0, 1]])
    written = plan.to_json()
    assert "averaging" not in written["case"]
    assert "late_s" not in written["predicted"]
    assert parse_plan(written).case.averaging == EXACT
    with refusal("plan.predicted.late_s = 0: unknown key"):
        parse_plan(written | {"predicted": written["predicted"] | {"late_s": 0}})
    outer = written | {"case": dict(written["case"]) | {"averaging": {"mode": "outer"}}}
    with refusal("plan.predicted.late_s = None: is missing"):
        parse_plan(outer)
