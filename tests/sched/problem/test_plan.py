"""The plan as a file: what it says, and that writing and reading it changes nothing."""

import json

from hypothesis import given, settings
from skippipe_sched.problem.plan import (
    load_plan,
    microbatch_chain,
    parse_plan,
)

from tests.sched.examples import RECKONED, case_with, planned, routed_cases


def test_the_chain_of_a_microbatch():
    chain = microbatch_chain(7, (3, 0, 5))
    assert [(operation.kind, operation.node) for operation in chain] == [
        *(("F", 3), ("F", 0), ("F", 5)),
        ("L", 3),
        *(("B", 5), ("B", 0), ("B", 3)),
    ]
    assert {operation.microbatch for operation in chain} == {7}
    assert [operation.kind for operation in microbatch_chain(0, (2,))] == ["F", "L", "B"]


def test_the_file_is_as_designed(tmp_path):
    case = case_with()
    plan, _ = planned(case, ((0,), (1,)), ((0, 1),))
    plan.save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "format": "skippipe-plan",
        "version": 1,
        "method": "example",
        "stages": [[0], [1]],
        "microbatches": [[0, 1]],
        "order": [[["F", 0], ["L", 0], ["B", 0]], [["F", 0], ["B", 0]]],
        "predicted": {
            "iteration_s": 10.5,
            "pipeline_s": 10.5,
            "averaging_s": 0,
            "lower_bound_s": 5.25,
        },
        "case": case.source,
    }


def test_saving_replaces_a_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("an older plan")
    planned(case_with(), ((0,), (1,)), ((0, 1),))[0].save(path)
    assert load_plan(path).microbatches == ((0, 1),)


@given(routed_cases())
@settings(max_examples=50)
def test_a_plan_survives_its_file(example):
    plan, _ = planned(*example)
    again = parse_plan(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    for name in ("method", "stages", "microbatches", "order", "predicted", "stage_of"):
        assert getattr(again, name) == getattr(plan, name)
    for name in vars(plan.case).keys() - RECKONED:
        assert getattr(again.case, name) == getattr(plan.case, name)
    assert again.to_json() == plan.to_json()
