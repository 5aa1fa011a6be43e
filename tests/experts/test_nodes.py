"""Lanes of an arm on nodes of their own: what the planner is told, and the plans that are kept."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.experts import nodes, work
from skippipe_jax.experts.members import Arm, MemberFactory
from skippipe_jax.experts.nodes import division_path, lanes_of, on_nodes
from skippipe_jax.experts.tasks import TrainingTask, Workspace
from tests.experts.conftest import Run
from tests.experts.examples import place_in, write_config
from tests.experts.test_config import write_model

CASE = {
    "nodes": 6,
    "locations": ["here", "there"],
    "links": [["here", "there", 50, 0.5]],
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "stages": [3, 3],
    "path_length": 2,
    "microbatches_per_data_node": 1,
    "memory": 2,
}
SECTIONS = {
    "arms": {
        "lanes": {
            "size": {"easy": "S", "hard": "L"},
            "steps": {"easy": 2, "hard": 6},
        }
    },
    "nodes": {"case": CASE, "budget_s": 0.2},
}


@pytest.fixture
def place(folder: Path) -> Workspace:
    return place_in(folder, **SECTIONS)


def arm_of(place: Workspace) -> Arm:
    [arm] = MemberFactory(place.config).arms()
    return arm


def test_lanes_that_train_side_by_side_share_the_cores(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    for at_once in (1, 5):
        own = replace(place, config=replace(place.config, at_once=at_once))
        together = work.side_by_side(own, arm_of(own))
        assert together.config.at_once == 2
        cores = {one.environment()["PJRT_NPROC"] for one in work.trainings(together, [arm_of(own)])}
        assert cores == {"6"}


def test_lanes_have_the_steps_and_sizes_of_their_experts(place: Workspace):
    easy, hard = lanes_of(place.config, arm_of(place))
    assert [(lane.name, [one.name for one in lane.trainings]) for lane in (easy, hard)] == [
        ("easy", ["prose", "code"]), ("hard", ["tables"]),
    ]  # fmt: skip
    assert [one.steps for one in (*easy.trainings, *hard.trainings)] == [2, 2, 6]
    # The case is of the size that is probed.
    assert all((one.compute, one.bytes) == (1.0, 1.0) for one in easy.trainings)
    [large] = hard.trainings
    width, layers, vocabulary, head, ffn = 16, 2, 259, 8, (24, 32)
    block = [2 * width * width + 2 * width * head + 3 * width * own + 2 * width for own in ffn]
    whole = [2 * vocabulary * width + width + layers * own for own in block]
    assert large.bytes == pytest.approx(whole[1] / whole[0])
    # Operations of a token are two for each parameter that multiplies, and attention's.
    assert 1 < large.compute < block[1] / block[0]


def test_sizes_of_given_seeds_are_those_of_their_weights(folder: Path):
    """Also where the arm's experts are of another size than the one that is probed."""
    write_model(folder, "large", {"<s>": 0, "</s>": 1, "a": 2})
    shapes = json.loads((folder / "large" / "config.json").read_text())
    told = shapes | {"intermediate_size": 32, "vocab_size": 259}
    (folder / "large" / "config.json").write_text(json.dumps(told))
    arms = {"lanes": {"size": "L", "steps": {"easy": 2, "hard": 6}}}
    seeds = {"init_from": {"L": "hf:large"}}
    place = place_in(folder, **SECTIONS | {"arms": arms, "seeds": seeds})
    known = lanes_of(place_in(folder, **SECTIONS | {"arms": arms}).config, arm_of(place))
    assert lanes_of(place.config, arm_of(place)) == known
    assert known[0].trainings[0].bytes > 1


@pytest.mark.nightly
def test_experts_train_by_plans_of_their_lanes_nodes_that_are_kept(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
):
    place.folder.mkdir()
    arm = arm_of(place)
    assert not division_path(place, arm).exists()
    found = on_nodes(place, arm)
    written = json.loads(division_path(place, arm).read_text())
    used: list[set[int]] = []
    parts = {part["name"]: part for part in written["lanes"]}
    for lane, domains in arm.lanes.items():
        used.append(set(parts[lane]["nodes"]))
        for domain in domains:
            own = found.members[domain]
            plan = load_plan(Path(own.tree["plan"]["file"]))
            assert own.hosts == len(plan.case.nodes) == len(used[-1])
            assert own.tree["plan"] == {"file": written["plans"][domain]}
            commands = TrainingTask(place, own).commands()
            words = commands[0]()
            assert words[:2] == ["skippipe_jax", "launch"]
            assert words[-2:] == ["--hosts", str(own.hosts)]
    assert not used[0] & used[1]
    assert found.members["code"].parent is found.members["prose"]
    # The seed trains by the plan of runs.
    seed = found.members["prose"].lineage()[0]
    assert seed == arm.members["prose"].lineage()[0]

    def searches(*_: object, **__: object) -> None:
        raise AssertionError("it is divided again")

    monkeypatch.setattr(nodes, "divide", searches)
    again = on_nodes(place, arm)
    assert {name: own.digest for name, own in again.members.items()} == {
        name: own.digest for name, own in found.members.items()
    }
    other = place_in(Path(), **SECTIONS | {"nodes": {"case": CASE | {"forward_s": 0.2}}})
    assert not division_path(other, arm).exists()


def test_a_case_in_a_file_has_its_link_table_beside_it(place: Workspace, folder: Path):
    (folder / "cases").mkdir()
    (folder / "cases" / "links.csv").write_text(
        "location_a,location_b,latency_ms,bandwidth_GiB_per_s\nhere,there,50,0.5\n"
    )
    case = folder / "cases" / "case.yaml"
    case.write_text(json.dumps(CASE | {"links": "links.csv"}))
    config = {"case": "cases/case.yaml", "budget_s": 0.2}
    other = place_in(folder, **SECTIONS | {"nodes": config})
    arm = arm_of(other)
    assert len(nodes.divided(other, arm).parts) == 2
    before = division_path(other, arm)
    case.write_text(json.dumps(CASE | {"forward_s": 0.3}))
    assert division_path(other, arm) != before


def test_the_command_prints_and_draws_the_division(folder: Path, experts_command: Run):
    write_config(folder, **SECTIONS)
    result = experts_command("plan", "experts.yaml")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "lanes"
    assert [line.split()[0] for line in lines[1:4]] == ["lane", "easy", "hard"]
    drawn = folder / "experts" / "division" / "lanes.svg"
    assert lines[-1] == str(drawn)
    ElementTree.fromstring(drawn.read_text())


def test_lanes_on_nodes_train_side_by_side(place: Workspace, monkeypatch: pytest.MonkeyPatch):
    """As many at once as there are lanes, whatever `at_once` says; nodes are an arm's own."""
    asked: list[tuple[set[str], int]] = []

    def run_all(tasks: list, logs: Path, at_once: int) -> None:
        asked.append(({task.member.kind for task in tasks}, at_once))

    monkeypatch.setattr(work, "run_all", run_all)
    monkeypatch.setattr(work, "compare", lambda *_: {})
    work.train(place)
    assert asked[0] == ({"seed", "expert"}, 2)


def test_too_few_nodes_are_refused_before_anything_trains(folder: Path, experts_command: Run):
    few = SECTIONS | {"nodes": {"case": CASE | {"nodes": 2, "stages": [1, 1], "memory": 1}}}
    write_config(folder, **few)
    result = experts_command("plan", "experts.yaml")
    assert result.code == 2
    assert "parallel lanes need" in result.err
    assert result.err.count("\n") == 1
    place = place_in(folder, **few)
    with pytest.raises(InputError, match="parallel lanes"):
        on_nodes(place, arm_of(place))
