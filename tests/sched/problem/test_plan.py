"""The plan as a file. test_methods.py shows that it is read as it was written."""

import json
import os

from skippipe_sched.problem.plan import load_plan, microbatch_chain

from tests.sched.examples import case_with, planned


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


def test_a_plan_is_written_to_a_pipe_and_through_a_link_without_replacing_them(tmp_path):
    plan, _ = planned(case_with(), ((0,), (1,)), ((0, 1),))
    pipe, link = tmp_path / "pipe", tmp_path / "latest.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    plan.save(pipe)
    os.set_blocking(reader, False)
    assert json.loads(os.read(reader, 100_000)) == plan.to_json()
    os.close(reader)
    link.symlink_to("first.json")
    plan.save(link)
    assert link.is_symlink()
    assert load_plan(tmp_path / "first.json").microbatches == plan.microbatches
