"""Cases that no plan can serve: refused with the reason and the smallest change that helps."""

import json

import pytest
import yaml
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case

from tests.harness.messages import expect_error

LINKS = [["here", "there", 10, 1], ["here", "far", 20, 1], ["there", "far", 20, 1]]
POSSIBLE = {
    "nodes": 6,
    "locations": ["here", "there", "far"],
    "links": LINKS,
    "activation_bytes": 2**20,
    "stage_bytes": 2**20,
    "forward_s": 1,
    "stages": [2, 2, 2],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}

# What makes the case impossible; field, reason and remedy; and that remedy done.
IMPOSSIBLE = [
    ({"memory": 0}, "case.memory = 0: must be at least 1...Write 1", {"memory": 1}),
    (
        {"nodes": [*[{}] * 5, {"memory": 0}]},
        "case.nodes[5].memory = 0: must be at least 1...Write 1",
        {"nodes": [*[{}] * 5, {"memory": 1}]},
    ),
    (
        {"path_length": 5},
        "case.path_length = 5: ...only 3 stages...Write 3 or less, or add 2 to case.stages",
        {"path_length": 3},
    ),
    (
        {"nodes": 5},
        "case.stages = [2, 2, 2]: ...case.nodes has 5...Remove 1 from case.stages..., or add 1",
        {"stages": [2, 2, 1]},
    ),
    (
        {"nodes": 8},
        "case.stages = [2, 2, 2]: ...case.nodes has 8...Add 2 to case.stages in total, or remove 2",
        {"stages": [4, 2, 2]},
    ),
    (
        {"nodes": 2},
        "case.stages = [2, 2, 2]: ...case.nodes has 2...remove 1 of the stages or add 1",
        {"nodes": 3, "stages": [1, 1, 1]},
    ),
    (
        {"links": LINKS[:2]},
        "case.links = 'there to far': no link...(1 missing in total)...Add a row: there,far,",
        {"links": LINKS},
    ),
    (
        {"links": LINKS[:1]},
        "case.links = 'far': ...nodes [2, 5]...Move these nodes...or add 2 rows...here,far,",
        {"locations": ["here", "there"]},
    ),
    (
        {"links": [["here", "there", 10, -1], *LINKS[1:]]},
        "case.links[0].bandwidth_GiB_per_s = -1: must be at least 1e-12...Write a number at least",
        {"links": [["here", "there", 10, 1e-12], *LINKS[1:]]},
    ),
    (
        {"bandwidth_factor": 0},
        "case.bandwidth_factor = 0: must be at least 1e-12...Write a number at least",
        {"bandwidth_factor": 1e-12},
    ),
    (
        {"microbatches_per_data_node": ..., "microbatches": 1},
        "case.microbatches = 1: there are 2 data nodes...Write 2...or make the first stage 1",
        {"microbatches": 2},
    ),
    (
        {"microbatches": 4},
        "case.microbatches = 4: cannot be combined with microbatches_per_data_node...Remove one",
        {"microbatches_per_data_node": ...},
    ),
    (
        {"microbatches_per_data_node": ...},
        "case.microbatches_per_data_node = None: is missing...Add microbatches_per_data_node:",
        {"microbatches_per_data_node": 1},
    ),
    (
        {"rules": {"max_jump": 0}},
        "case.rules.max_jump = 0: no paths visit every inner stage...Raise max_jump (up to 1)",
        {"rules": {"max_jump": 1}},
    ),
]


@pytest.mark.parametrize(("change", "told", "repair"), IMPOSSIBLE)
def test_refused_with_reason_and_remedy_and_the_remedy_helps(
    command, tmp_path, change, told, repair
):
    def plan(changes):
        given = {k: v for k, v in (POSSIBLE | changes).items() if v is not ...}
        (tmp_path / "case.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
        output = tmp_path / "plan.json"
        return command("plan", tmp_path / "case.yaml", "-o", output, "--method", "balanced")

    expect_error(plan(change), told)
    assert plan(change | repair)[0] == 0


def test_an_order_that_needs_more_memory_than_there_is_says_how_much(command, tmp_path):
    """Three microbatches in flight, which the message tells although it stops at the second."""
    changes = {"microbatches_per_data_node": 3, "memory": 3}
    plan = make_plan(parse_case(POSSIBLE | changes), "balanced").to_json()
    data_node = plan["stages"][0][0]
    own = [m for m, path in enumerate(plan["microbatches"]) if path[0] == data_node]
    plan["order"][data_node] = [[kind, m] for kind in "FLB" for m in own]
    path = tmp_path / "plan.json"

    def simulate(memory):
        plan["case"] = plan["case"] | {"memory": memory}
        path.write_text(json.dumps(plan), encoding="utf-8")
        return command("simulate", path)

    told = f"plan.order[{data_node}][1] = ['F', {own[1]}]: puts 2 microbatches..."
    expect_error(simulate(1), told + "raise the node's memory in plan.case to 3.")
    assert simulate(2)[0] == 2
    assert simulate(3)[0] == 0
