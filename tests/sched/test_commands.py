"""The planner's commands: what they print and write, and one line for whatever is wrong."""

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from skippipe_sched import command_server
from skippipe_sched.__main__ import main
from skippipe_sched.commands.output_files import write
from skippipe_sched.errors import TemporaryError
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.links import COLUMNS
from skippipe_sched.problem.plan import Plan, Predicted, load_plan
from skippipe_sched.timing.simulate import simulate

from tests.harness.messages import expect_error
from tests.sched.examples import PAPER, TWO_NODES, case_with, planned, same_place
from tests.sched.optimum import random_small_case

HEADER = ",".join(COLUMNS)


# What works.


def output(done: tuple[int, str, str]) -> str:
    """What a command printed that has done its work, and had nothing to warn of."""
    code, printed, errors = done
    assert (code, errors) == (0, "")
    return printed


@pytest.fixture(scope="module")
def paper_plan(tmp_path_factory):
    """A plan of the paper's case, and what the command says of it."""
    path = tmp_path_factory.mktemp("plans") / "new" / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["plan", PAPER, "-o", str(path), "--method", "balanced"]) == 0
    return path, said.getvalue()


def test_plan(paper_plan):
    path, printed = paper_plan
    plan = load_plan(path)
    assert plan.method == "balanced"
    assert f"balanced: iteration {plan.predicted.iteration_s:.2f} s" in printed
    assert printed.endswith(f"wrote {path}\n")
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_a_plan_has_a_bound_over_placements_if_asked_for(command, tmp_path):
    case, path = tmp_path / "case.yaml", tmp_path / "plan.json"
    case.write_text(yaml.safe_dump(dict(random_small_case(34).source)))
    code, printed, _ = command("plan", case, "-o", path, "--method", "balanced",
                               "--bound", "placements", "--bound-budget", "1 min")  # fmt: skip
    assert code == 0
    told = load_plan(path).predicted
    assert told.lower_bound_s is not None
    assert told.placement_bound_s is not None
    assert told.lower_bound_s < told.placement_bound_s <= told.iteration_s
    assert f", placement bound {told.placement_bound_s:.2f} s (gap " in printed
    _, printed, _ = command("simulate", path, "--json")
    assert json.loads(printed)["placement_bound_s"] == told.placement_bound_s
    refused = command("plan", case, "-o", path, "--bound", "placements", "--bound-budget", "0")
    assert refused[0] == 2
    assert "--bound-budget" in refused[2]


def test_a_search_begins_at_a_plan_of_the_same_stages(command, paper_plan, tmp_path):
    path, _ = paper_plan
    for option in ("--begin", "--improve"):
        known = command("plan", PAPER, "--method", "joint", option, path, "--budget", "0.01",
                        "--compiled", "-o", tmp_path / "plan.json")  # fmt: skip
        assert known[0] == 0
        found = load_plan(tmp_path / "plan.json").predicted.iteration_s
        assert found <= load_plan(path).predicted.iteration_s
    for change, problem in (
        ({"stages": [5, 3, 3, 3, 4, 2]}, "its stages have sizes [5, 3, 3, 3, 3, 3]"),
        ({"path_length": 5}, "its paths differ in number or length from those of the case"),
    ):
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(yaml.safe_load(Path(PAPER).read_text()) | change))
        code, _, error = command("plan", other, "--begin", path, "-o", tmp_path / "plan.json")
        assert code == 2
        assert problem in error
    of_another = ["plan", PAPER, "--method", "full", "--begin", path, "-o", tmp_path / "plan.json"]
    code, _, error = command(*of_another)
    assert code == 2
    assert "is a plan that --method full does not use. Use --method joint" in error


def test_simulate(command, paper_plan):
    path, _ = paper_plan
    plan = load_plan(path)
    printed = output(command("simulate", path))
    assert printed.startswith(f"balanced: iteration {plan.predicted.iteration_s:.2f} s")
    assert "breaks a rule" not in printed

    printed = output(command("simulate", path, "--json", "--contention", "link"))
    figures = json.loads(printed)
    assert figures["violations"] == []
    assert figures["iteration_s"] > plan.predicted.iteration_s
    assert figures["predicted_iteration_s"] == plan.predicted.iteration_s
    assert figures["lower_bound_s"] == pytest.approx(plan.predicted.lower_bound_s)
    assert 0 < figures["idle_share"] < 1


def test_a_plan_of_shared_connections_is_made_drawn_and_simulated(command, tmp_path):
    home = {"contention": "node", "uplink_Mbit_per_s": 20, "downlink_Mbit_per_s": 100}
    case = {
        **TWO_NODES,
        **home,
        "nodes": 5,
        "locations": ["here", "there", "there", "far", "far"],
        "links": [["here", "there", 10, 0.1], ["there", "far", 20, 0.1], ["here", "far", 20, 0.1]],
        "stages": [2, 3],
        "activation_bytes": 10**7,
        "stage_bytes": 10**7,
        "microbatches_per_data_node": 4,
    }
    (tmp_path / "case.yaml").write_text(json.dumps(case))
    path = tmp_path / "plan.json"
    assert command("plan", tmp_path / "case.yaml", "--method", "balanced", "-o", path)[0] == 0
    drawn = [tmp_path / f"{name}.svg" for name in ("gantt", "flows", "paths")]
    options = zip(("-o", "--flows", "--paths"), drawn, strict=True)
    done = command("plot", path, *(word for option in options for word in option))
    assert done == (0, "".join(f"wrote {drawing}\n" for drawing in drawn), "")
    for drawing in drawn:
        assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    seconds = {}
    for contention in ("none", "link", "node"):
        printed = output(command("simulate", path, "--json", "--contention", contention))
        seconds[contention] = json.loads(printed)["iteration_s"]
    assert seconds["none"] <= seconds["link"] < seconds["node"]
    assert seconds["node"] == json.loads(printed)["predicted_iteration_s"]


def test_simulate_names_broken_rules(command, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(_three_nodes()))
    plan = json.loads(path.read_text())
    plan["microbatches"] = [[0, 1], [0, 1]]
    plan["order"][1] = [["F", 0], ["F", 1], ["B", 0], ["B", 1]]
    plan["order"][2] = []
    path.write_text(json.dumps(plan))
    code, printed, _ = command("simulate", path)
    assert code == 0
    assert "breaks a rule: TC1: node 1 of stage 1" in printed


def test_simulate_asks_the_plan_for_no_prediction(command, tmp_path):
    """A plan written by hand may predict nothing: the figures are the simulator's own."""
    path = tmp_path / "plan.json"
    make_plan(same_place([1]), "full").save(path)
    plan = json.loads(path.read_text())
    plan["predicted"] = dict.fromkeys(plan["predicted"], 0)
    path.write_text(json.dumps(plan))
    printed = output(command("simulate", path))
    assert "lower bound 3.50 s (gap 0%), nodes idle 0%" in printed


def test_a_case_with_averaging_behind_its_iterations(command, tmp_path):
    """Every command says what the steady state is, and by how much a ring is late."""
    case, path = tmp_path / "case.yaml", tmp_path / "plan.json"
    averaging = {"mode": "outer", "every": 4, "fragments": 2, "delay": 0}
    source = same_place([2, 2], stage_bytes=2**33, averaging=averaging).source
    case.write_text(yaml.safe_dump(dict(source)))
    printed = output(command("plan", case, "-o", path, "--method", "balanced"))
    plan = load_plan(path)
    told = plan.predicted
    assert told.late_s == pytest.approx(told.averaging_s)
    shown = (
        f"balanced: iteration {told.iteration_s:.2f} s (pipeline {told.pipeline_s:.2f} s, longest "
        f"ring {told.averaging_s:.2f} s in the background, {told.late_s:.2f} s late), lower bound "
    )
    assert printed.startswith(shown)
    assert command("simulate", path)[1].startswith(shown)
    figures = json.loads(command("simulate", path, "--json", "--jitter", 0, "--draws", 8)[1])
    assert (figures["iteration_s"], figures["late_s"]) == (told.iteration_s, told.late_s)
    assert figures["percentile_95_s"] >= told.iteration_s >= figures["lower_bound_s"]
    drawn = [tmp_path / name for name in ("plan.svg", "flows.svg", "trace.json")]
    options = zip(("-o", "--flows", "--trace"), drawn, strict=True)
    assert command("plot", path, *(word for option in options for word in option))[0] == 0
    assert all(file.stat().st_size for file in drawn)
    printed = output(command("compare", case, "--methods", "balanced", "--budget", 0.1))
    assert f"a ring exceeds its delay by {told.late_s:.2f} s" in printed


@pytest.fixture(scope="module")
def small_plan(tmp_path_factory):
    """A plan of five nodes, by hand: churn need not search."""
    path = tmp_path_factory.mktemp("plans") / "small.json"
    case = same_place([2, 3], microbatches_per_data_node=3)
    stages = ((0, 1), (2, 3, 4))
    paths = tuple((m % 2, 2 + m % 3) for m in range(6))
    timeline = simulate(case, stages, paths)
    predicted = Predicted(timeline.iteration_s, timeline.pipeline_s, timeline.averaging_s, 0)
    Plan("by hand", stages, paths, timeline.order, predicted, case).save(path)
    return path


def test_churn(command, small_plan, tmp_path):
    files = ["--json", tmp_path / "new" / "churn.json", "--figure", tmp_path / "churn.svg"]
    few = ["--mtbf", "8h", "--days", 0.5, "--seeds", 2, "--sweep", 1, "--repair", "5min"]
    printed = output(command("simulate-faults", small_plan, *few, *files))
    first, _, head, *lines = printed.splitlines()
    assert first.startswith("5 nodes, ")
    assert head.split() == ["goodput", "16h", "8h", "4h"]
    assert printed.count("exact recovery (rewind) ") == 1
    assert lines[-1].startswith("exact recovery (rewind) ")
    told = json.loads((tmp_path / "new" / "churn.json").read_text())
    assert told["verdict"] == lines[-1]
    assert told["churn"] == {"repair_s": 300, "end_s": 43200, "seeds": [0, 1]}
    assert {point["mtbf_s"] for point in told["points"]} == {14400, 28800, 57600}
    figures = {(point["policy"], point["mtbf_s"]): point["goodput"] for point in told["points"]}
    for line in lines[:6]:
        policy, *shown = line.split()
        assert shown == [f"{figures[policy, mtbf_s]:.3f}" for mtbf_s in (57600, 28800, 14400)]
    assert ElementTree.parse(tmp_path / "churn.svg").getroot().tag.endswith("svg")
    assert command("simulate-faults", small_plan, *few)[1] == printed


def test_churn_plans_a_case_first(command, tmp_path):
    case = tmp_path / "case.yaml"
    case.write_text(yaml.safe_dump(dict(same_place([2, 2]).source)))
    given = ["--mtbf", "1d", "--days", 0.1, "--seeds", 1, "--sweep", 0, "--method", "balanced"]
    printed = output(command("simulate-faults", case, *given))
    assert printed.startswith("4 nodes, ")


SERVICE = {
    "hosts": [{"location": "here", "room_bytes": 20, "step_s": 1}] * 3,
    "links": [],
    "same_location": {"latency_ms": 500, "bandwidth_GiB_per_s": 1},
    "stage_bytes": [10] * 4,
    "activation_bytes": 0,
    "groups": 2,
    "slots": 3,
}


def test_serve_plan(command, tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(SERVICE))
    printed = output(command("serve-plan", path, "--objective", "seconds_per_token", "--json"))
    told = json.loads(printed)
    assert {stage for stages in told["placement"] for stage in stages} == {0, 1, 2, 3}
    assert [len(route) for route in told["routes"]] == [4, 4]
    # Four stages, and two hops between two hosts.
    assert told["seconds_per_token"] == told["bounds"]["seconds_per_token"] == 5
    assert told["tokens_per_s"] == pytest.approx(told["bounds"]["tokens_per_s"]) == 2 * 3 / 5
    printed = output(command("serve-plan", path))
    table = printed.splitlines()
    assert table[0].split() == ["host", "stages", "groups"]
    assert [line.split()[0] for line in table[1:4]] == ["0", "1", "2"]
    assert table[-1] == "one sequence alone: 5.0000 s/token, at least 5.0000"


def test_serve_plan_warns_of_stages_that_have_no_room(command, tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(SERVICE | {"stage_bytes": [1, 1, 1, 10**15]}))
    code, _, told = command("serve-plan", path)
    assert (code, told) == (0, "warning: the hosts have no room for stages [3]: these never run\n")


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [({"groups": 0}, [], "case.groups = 0"), ({}, ["--seed", "-1"], "seed = -1")],
)
def test_a_service_that_cannot_be_planned_is_refused(command, tmp_path, change, words, told):
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(SERVICE | change))
    expect_error(command("serve-plan", path, *words), told)


# What is wrong: each with the field of the case that the error names, its value, and what it says
# to do.


OWN_MEMORY = {"nodes": [{"memory": 2}, {"memory": "auto", "memory_bytes": 1e9}]}
WRONG_CASES = [
    ({"node": 3}, "node = 3...Remove it"),
    ({"no\nde": 3}, r"no\nde = 3...Remove it"),
    ({"memory": ...}, "memory = None...Add memory:"),
    ({"forward_s": "fast"}, "forward_s = 'fast'...Write 30s"),
    ({"forward_s": True}, "forward_s = True...Write a number"),
    ({"forward_s": float("inf")}, "forward_s = inf...below 1e+100"),
    ({"stage_bytes": float("nan")}, "stage_bytes = nan...below 1e+100"),
    ({"activation_bytes": 1e200}, "activation_bytes = 1e+200...below 1e+100"),
    ({"stage_bytes": 10**400}, "stage_bytes = 1000...below 1e+100"),
    ({"forward_s": 0}, "forward_s = 0...greater than 0"),
    ({"hop_overhead_s": -1}, "hop_overhead_s = -1...at least 0"),
    ({"backward_ratio": 0}, "backward_ratio = 0...greater than 0"),
    ({"path_length": 1.5}, "path_length = 1.5...without fraction"),
    ({"memory": True}, "memory = True...without fraction"),
    ({"memory": [1, 2]}, "memory = [1, 2]...without fraction"),
    ({"path_length": 0}, "path_length = 0...Write 1 or a greater"),
    ({"stages": []}, "stages = []...Add the missing"),
    ({"stages": [2, 0]}, "stages[1] = 0...Write 1 or a greater"),
    ({"stages": "1, 1"}, "stages = '1, 1'...Write [first"),
    ({"microbatches_per_data_node": [3, 3]}, "microbatches_per_data_node = [3, 3]...one number"),
    ({"microbatches_per_data_node": [0]}, "microbatches_per_data_node[0] = 0...Write 1 or a"),
    ({"nodes": [{"loc": "x"}, {}]}, "nodes[0].loc = 'x'...use one of: downlink"),
    ({"nodes": ["here", "there"]}, "nodes[0] = 'here'...key: value"),
    ({"nodes": "two"}, "nodes = 'two'...without fraction"),
    ({"locations": []}, "locations = []...Add the missing"),
    ({"locations": ["here", False]}, "locations[1] = False...in quotes"),
    ({"locations": ["here", "the\x07re"]}, r"locations[1] = 'the\x07re'...Remove it"),
    ({"nodes": [{"location": "\ud800"}, {}]}, r"nodes[0].location = '\ud800'...Remove it"),
    ({"locations": ["here", "ther"]}, "links = ...here to ther...Did you mean there? Add a row"),
    ({"links": "gcp13"}, "links = 'gcp13'...Use one of gcp12"),
    ({"links": "no.csv"}, "links = ...no.csv...Check the path"),
    ({"links": "\0.csv"}, r"links = ...\x00...Remove it"),
    ({"links": 12}, "links = 12...Write [first"),
    ({"links": [["here", "there", 1]]}, "links[0] = ['here'...location_a"),
    ({"links": [["here", "there", 1, 0]]}, "links[0].bandwidth_GiB_per_s = 0...at least 1e-12"),
    (
        {"same_location": {"latency_ms": 1, "bandwidth_GiB_per_s": -1}},
        "same_location.bandwidth_GiB_per_s = -1...at least 1e-12",
    ),
    ({"links": [["here", "there", -1, 1]]}, "links[0].latency_ms = -1...at least 0"),
    (
        {"links": [["here", "there", 1, 1], ["here", "there", 2, 1]]},
        "links[1] = ['here', 'there', 2, 1]...Delete one",
    ),
    (
        {"same_location": {"latency_ms": 1}},
        "same_location.bandwidth_GiB_per_s = None...Add bandwidth_GiB_per_s:",
    ),
    ({"contention": "some"}, "contention = 'some'...none, link, node"),
    ({"uplink_GiB_per_s": 1}, "uplink_GiB_per_s = 1...Write contention: node, or remove"),
    (
        {"nodes": [{}, {"downlink_Mbit_per_s": 100}], "contention": "link"},
        "nodes[1].downlink_Mbit_per_s = 100...Write contention: node, or remove",
    ),
    (
        {"contention": "node", "uplink_GiB_per_s": 1, "uplink_Mbit_per_s": 100},
        "uplink_Mbit_per_s = 100...Remove one",
    ),
    ({"contention": "node", "uplink_Mbit_per_s": 0}, "uplink_Mbit_per_s = 0...at least 1e-12"),
    ({"contention": "node", "uplink_Gbit_per_s": 1}, "uplink_Gbit_per_s = 1...Did you mean"),
    ({"rules": None}, "rules = None...key: value"),
    ({"rules": {"jumps": 1}}, "rules.jumps = 1...Remove it"),
    ({"rules": {"max_jump": -1}}, "rules.max_jump = -1...Write 0 or"),
    ({"rules": {"max_swap_distance": 0}}, "rules.max_swap_distance = 0...Write 1 or"),
    ({"nodes": 10**22}, "nodes = 1...must be at most"),
    ({"memory": 10**22}, "memory = 1...must be at most"),
    ({"microbatches_per_data_node": 10**22}, "microbatches_per_data_node = 1...at most"),
    ({"microbatches_per_data_node": [10**22]}, "microbatches_per_data_node[0] = 1...most"),
    # What follows from a model, and there is none.
    ({"activation_bytes": "auto"}, "activation_bytes = 'auto'...skippipe estimate-memory"),
    ({"gradient_bytes": "auto"}, "gradient_bytes = 'auto'...skippipe estimate-memory"),
    ({"stage_bytes": "auto"}, "stage_bytes = 'auto'...skippipe estimate-memory"),
    ({"memory": "auto"}, "memory = 'auto'...skippipe estimate-memory"),
    ({"memory": "auto", "memory_bytes": 24e9}, "memory = ...skippipe estimate-memory"),
    (OWN_MEMORY, "nodes[1].memory = 'auto'...skippipe estimate-memory"),
    ({"nodes": [{}, {"memory_bytes": 0}]}, "nodes[1].memory_bytes = 0"),
]


@pytest.mark.parametrize(("change", "told"), WRONG_CASES)
def test_a_wrong_case_is_refused_in_one_line(command, tmp_path, change, told):
    path = tmp_path / "case.yaml"
    given = {key: value for key, value in (TWO_NODES | change).items() if value is not ...}
    # JSON is YAML, but for numbers that YAML 1.1 spells otherwise.
    content = json.dumps(given).replace("Infinity", ".inf").replace("NaN", ".nan")
    path.write_text(content.replace("1e+200", "1.0e+200"), encoding="utf-8")
    expect_error(command("plan", path, "-o", tmp_path / "plan.json"), f"case.{told}")
    assert not (tmp_path / "plan.json").exists()


OPEN = {
    "case.stages": {"stages": "auto", "stage_count": 2},
    "case.path_length": {"path_length": "auto"},
}


@pytest.mark.parametrize(("field", "change"), OPEN.items())
def test_an_open_case_is_refused_where_a_fixed_one_is_required(
    command, small_plan, tmp_path, field, change
):
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(dict(same_place([2, 3]).source) | change))
    told = f"{field} = 'auto': compare needs fixed...skippipe plan first"
    expect_error(command("compare", path), told)
    done = command("plan", path, "-o", tmp_path / "plan.json", "--placement", small_plan)
    expect_error(done, "--placement = ...requires a case with fixed...Replace auto in the case")


WRONG_YAML = {
    "empty": ("", "None", "key: value"),
    "a list": ("[1, 2]", "[1, 2]", "key: value"),
    "no YAML": ("nodes: [1,\n  2", "line 2", "Correct"),
    "two documents": ("nodes: 1\n---\nnodes: 2\n", "line 2", "Correct"),
    "a tab": ("nodes:\n\t- 1", "line 2, column 1", "Correct"),
    "a key twice": ("nodes: 1\nstages: [1]\nnodes: 2\n", "line 3, column 1: the key 'nodes'", ""),
    "a key twice within": ("rules: {max_jump: 1, max_jump: 2}", "line 1, column 22", "Correct"),
    "a day that is none": ("nodes: 2024-13-45", "line 1, column 8: not a valid timestamp", ""),
    "a tag that lies": ("nodes: !!int many", "line 1, column 8: not a valid int", "Correct"),
    "a Python object": ("nodes: !!python/object:os.system {}", "line 1, column 8", "Correct"),
    "a list for a key": ("? [a, b]\n: 1", "line 1", "Correct"),
    "a control character": ("nodes: \x01", "not valid YAML", "Correct"),
    "deep": ("[" * 5000, "not valid YAML", "Correct"),
    "too many digits": (f"nodes: {'9' * 5000}", "column 8: not a valid int", "Correct"),
}


@pytest.mark.parametrize(("content", "value", "remedy"), WRONG_YAML.values(), ids=WRONG_YAML.keys())
def test_a_case_that_is_not_a_yaml_mapping_is_refused(command, tmp_path, content, value, remedy):
    path = tmp_path / "case.yaml"
    path.write_text(content, encoding="utf-8")
    done = command("plan", path, "-o", tmp_path / "plan.json")
    expect_error(done, f"case = ...{value}...{remedy}")


@pytest.mark.parametrize("name", ["case", "plan"])
def test_files_that_cannot_be_read_are_refused(command, tmp_path, name):
    def run(path):
        if name == "case":
            return command("plan", path, "-o", tmp_path / "out.json")
        return command("simulate", path)

    expect_error(run(tmp_path / "missing"), f"{name} = ...missing...Check the path")
    expect_error(run(tmp_path), f"{name} = ...Is a directory...Check the path")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    expect_error(run(tmp_path / "binary"), f"{name} = ...not UTF-8...Give a text file")


WRONG_TABLES = [
    ("", "case.links (mine.csv, line 1) = ''...first line must be location_a"),
    ("a,b,ms,bw\n", "case.links (mine.csv, line 1) = 'a,b,ms,bw'...first line"),
    (
        "location_a,location_b,latency_ms,bandwidth_Mbps\n",
        "case.links (mine.csv, line 1) = ...bandwidth_Mbps...units ms, us, s, GiB_per_s",
    ),
    (f"{HEADER}\nhere,there,1\n", "case.links (mine.csv, line 2) = ...here...location_a"),
    (
        f"{HEADER}\nhere,there,-1,1\n",
        "case.links (mine.csv, line 2).latency_ms = -1.0...at least 0",
    ),
    (
        f"{HEADER}\nhere,there,quick,1\n",
        "case.links (mine.csv, line 2).latency_ms = 'quick'...Write a number",
    ),
    (
        f"{HEADER}\nhere,there,1,1\nthere,here,1,inf\n",
        "case.links (mine.csv, line 3).bandwidth_GiB_per_s = inf...Write a number",
    ),
    (f'{HEADER}\n"here,there,1,1\n', "case.links = ...not valid CSV...quotes"),
    (f"{HEADER}\n,there,1,1\n", "case.links[0] = ''...Write a name"),
]


@pytest.mark.parametrize(("content", "told"), WRONG_TABLES)
def test_a_wrong_link_table_is_refused(command, tmp_path, content, told):
    (tmp_path / "mine.csv").write_text(content, encoding="utf-8")
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(TWO_NODES | {"links": "mine.csv"}), encoding="utf-8")
    expect_error(command("plan", path, "-o", tmp_path / "plan.json"), told)


def _three_nodes():
    """A plan on a data node and two replicas of one stage, with two microbatches."""
    case = same_place([1, 2], microbatches_per_data_node=2)
    stages, paths = ((0,), (1, 2)), ((0, 1), (0, 2))
    order = simulate(case, stages, paths).order
    return Plan("by hand", stages, paths, order, Predicted(0, 0, 0, 0), case).to_json()


def _case(plan, **change):
    plan["case"] = plan["case"] | change


# Of the plan above: stages [[0], [1, 2]], microbatches [[0, 1], [0, 2]].
WRONG_PLANS = [
    (lambda p: p.update(format="plan"), "plan.format = 'plan'...skippipe-plan"),
    (lambda p: p.update(version=2), "plan.version = 2...Write 1"),
    (lambda p: p.update(version="1"), "plan.version = '1'...Write a number"),
    (lambda p: p.pop("order"), "plan.order = None...Add order:"),
    (lambda p: p.update(notes=1), "plan.notes = 1...Remove it"),
    (lambda p: p.update(method=None), "plan.method = None...Write a name"),
    (lambda p: p.update(method="a\nb"), r"plan.method = 'a\nb'...Remove it"),
    (
        lambda p: p.update(stages=[[0], [1, 1]]),
        "plan.stages[1][1] = 1: is already in plan.stages[1][0]...List each node once",
    ),
    (lambda p: p.update(stages=[[0], [1]]), "plan.stages = ...node 2...Add it"),
    (lambda p: p["stages"].append([]), "plan.stages[2] = []...Add the missing"),
    (lambda p: p["stages"][1].append(3), "plan.stages[1][2] = 3...Write 2 or a smaller"),
    (lambda p: p.update(microbatches=[]), "plan.microbatches = []...Add"),
    (lambda p: p.update(microbatches=[[0, 1], []]), "plan.microbatches[1] = []...Add the missing"),
    (lambda p: p["microbatches"].append([0, 3]), "plan.microbatches[2][1] = 3...Write 2 or a"),
    (lambda p: p["microbatches"].append([-1, 1]), "plan.microbatches[2][0] = -1...Write 0 or a"),
    (
        lambda p: p["microbatches"].append([1, 2]),
        "plan.microbatches[2][0] = 1: must be a data node...Start the path at one of [0]",
    ),
    (
        lambda p: p["microbatches"].append([0, 1, 2]),
        "plan.microbatches[2][2] = 2: the path visits stage 1 twice (CC1), first on node 1",
    ),
    (lambda p: p["microbatches"].append(0), "plan.microbatches[2] = 0...Write [first"),
    (
        lambda p: p["microbatches"].append([False, 1]),
        "plan.microbatches[2][0] = False...without fraction",
    ),
    (lambda p: p["order"].pop(), "plan.order = ...2 entries...Add or"),
    (
        lambda p: p["order"][1].pop(),
        "plan.order[1] = ...lacks the B of microbatch 0 on node 1...Add it",
    ),
    (
        lambda p: p["order"][1].append(["B", 0]),
        "plan.order[1][2] = ['B', 0]: is a duplicate...once",
    ),
    (
        lambda p: p["order"][2].append(p["order"][1].pop()),
        "plan.order[1] = ...lacks the B of microbatch 0...Add it",
    ),
    (
        lambda p: p["order"][1].insert(0, ["F", 1]),
        "plan.order[1][0] = ...no path has this operation on this node...on the node that runs it",
    ),
    (lambda p: p["order"][0].append(["F", 2]), "plan.order[0][6] = ['F', 2]...once"),
    (lambda p: p["order"][1].append(["G", 0]), "plan.order[1][2] = 'G'...F, L, B"),
    (lambda p: p["order"][1].append(["F", 0, 1]), "plan.order[1][2] = ['F', 0, 1]...microbatch]"),
    (
        lambda p: p["order"][1].reverse(),
        "plan.order = ...B of microbatch 0 on node 1 waits for the L of microbatch 0...Reorder",
    ),
    (
        lambda p: _case(p, memory=1),
        "plan.order[0][1] = ...2 microbatches in flight on node 0, whose memory holds 1...raise",
    ),
    (
        lambda p: p["predicted"].update(iteration_s=float("inf")),
        "plan.predicted.iteration_s = inf...below",
    ),
    (
        lambda p: p["predicted"].update(pipeline_s=float("nan")),
        "plan.predicted.pipeline_s = nan...below",
    ),
    (lambda p: p["predicted"].update(averaging_s=-1), "plan.predicted.averaging_s = -1...at least"),
    (lambda p: _case(p, memory=0), "case.memory = 0...Write 1 or a greater"),
    (lambda p: p.update(case=None), "case = None...key: value"),
]


@pytest.mark.parametrize(("change", "told"), WRONG_PLANS)
def test_a_wrong_plan_is_refused_in_one_line(command, tmp_path, change, told):
    plan = _three_nodes()
    change(plan)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    expect_error(command("simulate", path), told)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("", "line 1 column 1"),
        ('{"format": "skippipe-plan"', "line 1 column 27"),
        ("[" * 50_000, "recursion"),
        (f'{{"version": {"9" * 5000}}}', "4300 digits"),
        ("[]", "must be a mapping"),
    ],
    ids=["empty", "cut off", "deep", "too many digits", "a list"],
)
def test_a_plan_that_is_not_a_json_object_is_refused(command, tmp_path, content, value):
    path = tmp_path / "plan.json"
    path.write_text(content, encoding="utf-8")
    expect_error(command("simulate", path), f"plan = ...{value}")
    expect_error(command("plot", path, "-o", tmp_path / "plan.svg"), f"plan = ...{value}")


@pytest.mark.parametrize(
    "output", [".", "/", "folder", "file/plan.json", "/proc/none/plan.json", "plan.png"]
)
@pytest.mark.parametrize("name", ["plan", "plot"])
def test_an_output_that_cannot_be_written_is_refused(command, tmp_path, monkeypatch, name, output):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "plan.json").write_text(json.dumps(_three_nodes()))
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(TWO_NODES))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    source = "case.yaml" if name == "plan" else "plan.json"
    expect_error(command(name, source, "-o", output), f"--output = '{output}'...Give ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_part_of_a_new_file(tmp_path):
    def fill(path: Path):
        path.write_text("part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(TemporaryError, match="cannot be written: No space"):
        write("--output", tmp_path / "plan.json", fill)
    assert not list(tmp_path.iterdir())


WRONG_CHURN = {
    "unknown unit": ("--repair", "2 weeks", "'2 weeks'", "Write 30s, 5min, 2h or 7d"),
    "unit alone": ("--heartbeat", "s", "'s'", "Write 30s"),
    "text for a time": ("--restart", "two h", "'two h'", "Write 30s"),
    "negative time": ("--restore=-1s", None, "at least 0", "at least 0"),
    "negative time behind a space": ("--mtbf", "-5h", "-5.0", "greater than 0"),
    "negative fraction": ("--repair", "-.5h", "-0.5", "at least 0"),
    "endless": ("--mtbf", "inf d", "inf", "below 1e+100"),
    "no time between faults": ("--mtbf", "0h", "0.0", "greater than 0"),
    "more faults than fit": ("--mtbf", "0.001s", "0.000125s", "fewer --days"),
    "no days": ("--days", 0, "0.0", "greater than 0"),
    "days that are not": ("--days", "nan", "nan", "below 1e+100"),
    "too short": ("--days", 1e-6, "is too short for a step", "Give more days"),
    "no seeds": ("--seeds", 0, "0", "Write 1"),
    "negative seed": ("--seed", -1, "-1", "Write 0"),
    "negative sweep": ("--sweep", -1, "-1", "Write 0"),
    "no checkpoints": ("--checkpoint-every", 0, "0", "Write 1"),
    "no copies": ("--copy-every", 0, "0", "Write 1"),
    "negative state": ("--state-factor", -1, "-1", "at least 0"),
    "no plans": ("--plans", 0, "0", "Write 1"),
    "a folder for figures": ("--json", "/", "'/'", "path of a file"),
    "a folder for the picture": ("--figure", "/", "'/'", "path of a file"),
}


@pytest.mark.parametrize(
    ("option", "given", "value", "remedy"), WRONG_CHURN.values(), ids=WRONG_CHURN.keys()
)
def test_wrong_churn_is_refused_in_one_line(command, small_plan, option, given, value, remedy):
    words = ["--mtbf", "2h", "--repair", "0s", option, *([] if given is None else [given])]
    told = f"{option.partition('=')[0]} = ...{value}...{remedy}"
    expect_error(command("simulate-faults", small_plan, *words), told)


def test_a_negative_seed_is_refused(command, tmp_path):
    done = command("plan", PAPER, "-o", tmp_path / "plan.json", "--seed", "-1")
    expect_error(done, "--seed = -1...Give 0 or more")


def test_errors_reach_the_terminal_as_one_line_and_exit_code_2(tmp_path):
    """In a process of its own, from another folder, with a case that holds a mistake."""
    case = Path(PAPER).read_text(encoding="utf-8").replace("path_length: 4", "path_length: 7")
    (tmp_path / "case.yaml").write_text(case, encoding="utf-8")
    command = [sys.executable, "-m", "skippipe_sched", "plan", "case.yaml", "-o", "plan.json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: case\.path_length = 7: .* Write 6 or less, .*\n", done.stderr)


def test_each_command_to_a_standby_is_answered_by_its_exit_code(tmp_path, capfd):
    case, found = tmp_path / "case.yaml", tmp_path / "plan.json"
    words = ["plan", str(case), "--method", "balanced", "-o", str(found)]
    case.write_text(json.dumps(TWO_NODES))
    lines = [json.dumps(own) + "\n" for own in (words, [*words, "--budget", "0"], words)]
    answers, before = io.StringIO(), sys.stdout
    command_server.serve(io.StringIO("".join(lines)), answers)
    assert answers.getvalue().split() == ["0", "2", "0"]
    assert found.exists()
    assert sys.stdout is before
    said = capfd.readouterr()
    assert said.out == "", "nobody reads it"
    assert "--budget" in said.err


def test_options_that_would_have_no_effect_are_refused(command, tmp_path):
    plan = tmp_path / "plan.json"
    planned(case_with(), ((0,), (1,)), ((0, 1),))[0].save(plan)
    for option in ("--draws", "--seed"):
        expect_error(command("simulate", plan, option, 7), f"{option} = 7: has no effect...jitter")
    twice = command("plot", plan, "-o", tmp_path / "a.svg", "--flows", tmp_path / "a.svg")
    expect_error(twice, "--flows = ...is named by two options...Give each its own path")
    assert [*tmp_path.iterdir()] == [plan]


@pytest.mark.parametrize(
    ("name", "option", "more"),
    [
        ("plan", "--output", ()),
        ("compare", "--output", ()),
        ("compare", "--json", ()),
        ("plot", "--flows", ()),
        ("simulate-faults", "--figure", ("--mtbf", "1d")),
    ],
)
def test_the_file_that_is_read_is_not_replaced_by_the_output(command, tmp_path, name, option, more):
    source = tmp_path / "case.yaml"
    planned(case_with(), ((0,), (1,)), ((0, 1),))[0].save(source)
    if name != "plot":
        source.write_text(yaml.safe_dump(dict(case_with().source)), encoding="utf-8")
    content = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    refused = command(name, source, option, tmp_path / "link", *more)
    expect_error(refused, f"{option} = ...is the file that this command reads...another path")
    assert source.read_bytes() == content
