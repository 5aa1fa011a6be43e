"""`skippipe estimate-memory`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case
from skippipe_sched.search.budget import Search

from skippipe_jax.cli.main import main
from skippipe_jax.config import parse_config
from skippipe_jax.models.footprint import (
    bytes_saved_by_blocks,
    message_bytes,
    passing_bytes,
)
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.optim.outer import fragments_of
from tests.harness.training_runs import SMALL_CASE

MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
CONFIG: dict[str, Any] = {
    "model": MODEL,
    "plan": {"case": SMALL_CASE},
    "data": {"sequence_length": 32, "microbatch_size": 2},
}


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command on a configuration; its exit code, and what it printed."""

    def run(config: dict[str, Any], *words: str) -> tuple[int, str, str]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        code = main(["estimate-memory", "--config", str(path), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_one_object_with_all_figures(command: Any):
    code, said, _ = command(CONFIG, "--json")
    figures = json.loads(said)
    assert code == 0
    data, inner = figures["stages"]
    # By hand: two blocks of 16 x 16 twice, 16 x 8 twice, 16 x 24 three times and two norms.
    block = 2 * 256 + 2 * 128 + 3 * 384 + 32
    assert inner["parameters"] == 2 * block
    assert data["parameters"] == 2 * block + 2 * 259 * 16 + 16
    assert inner["bytes"]["gradients"] == 4 * 2 * block
    assert inner["replicas"] == 2
    sent = figures["bytes_per_iteration"]
    assert sent["hop"] == 2 * 32 * 16 * 4
    # Two microbatches go to the other stage and back, and their gradients do.
    assert sent["pipeline"] == 2 * 4 * sent["hop"]
    assert sent["averaging"] == 2 * 4 * 2 * block
    [nodes] = figures["nodes"]
    assert (nodes["nodes"], nodes["in_flight"], nodes["stage"]) == ([0, 1, 2], 2, 0)
    assert nodes["bytes"] == data["bytes"]
    assert (nodes["memory_bytes"], nodes["usable_bytes"], nodes["one_more_bytes"]) == (None,) * 3
    assert figures["case"] == {
        "activation_bytes": sent["hop"],
        "stage_bytes": [4 * data["parameters"], 4 * inner["parameters"]],
    }


def test_copies_for_buddies_are_counted_on_hosts(command: Any):
    words = ("--set", "recovery.lost_stage=buddy")
    _, said, _ = command(CONFIG, "--json", *words)
    figures = json.loads(said)
    for stage, own in zip(figures["stages"], figures["copies"], strict=True):
        copied = stage["bytes"]["parameters"] + stage["bytes"]["optimizer"]
        assert own == {
            "stage": stage["stage"], "bytes": copied, "first_host": copied, "buddy": 2 * copied,
        }  # fmt: skip
    _, said, _ = command(CONFIG, *words)
    assert "buddy checkpoints in the memory of the first host" in said
    _, said, _ = command(CONFIG, "--json")
    assert "copies" not in json.loads(said)


def test_hops_that_differ_by_direction_are_told_apart(command: Any):
    words = ("--set", "network.activation_dtype=int8", "--set", "network.gradient_dtype=bfloat16")
    _, said, _ = command(CONFIG, *words)
    assert "1.15 kB per hop and 2.05 kB per hop back" in said
    assert "activation_bytes: 1152, gradient_bytes: 2048, stage_bytes:" in said


def test_it_explains_how_many_microbatches_fit(command: Any):
    """And warns of a number that is greater, without refusing it."""
    case = SMALL_CASE | {"microbatches_per_data_node": 9, "memory_bytes": 1_300_000}
    config = CONFIG | {"plan": {"case": case | {"memory": "auto"}}}
    code, said, warned = command(config, "--json")
    [nodes] = json.loads(said)["nodes"]
    assert (code, warned) == (0, "")
    count, usable = nodes["in_flight"], nodes["usable_bytes"]
    assert 1 < count < 9
    assert usable == pytest.approx(0.9 * 1_300_000)
    assert nodes["bytes"]["total"] <= usable < nodes["bytes"]["total"] + nodes["one_more_bytes"]
    # A hop more may be on its way, and what a microbatch keeps is kept once more.
    assert nodes["one_more_bytes"] == nodes["bytes"]["kept"] + 4096
    told = command(config)[1].splitlines()[3]
    assert f"with {count} in flight" in told
    assert "1.17 MB are usable, 0.9 of 1.30 MB; one more would take " in told
    code, _, warned = command(CONFIG | {"plan": {"case": case | {"memory": count + 1}}}, "--json")
    assert code == 0
    assert warned.startswith(f"warning: case.memory = {count + 1} is more than nodes 0-2 can hold")


def test_a_plan_counts_by_its_own_paths(command: Any, tmp_path: Path):
    case = parse_case(SMALL_CASE | {"stages": [1, 1, 1], "path_length": 2})
    for method, visits in (("balanced", 4), ("full", 6)):
        make_plan(case, method, Search(budget_s=0.1)).save(tmp_path / "plan.json")
        config = CONFIG | {"plan": {"file": str(tmp_path / "plan.json")}}
        config["model"] = MODEL | {"layers": 3}
        _, by_file, _ = command(config, "--json")
        sent = json.loads(by_file)["bytes_per_iteration"]
        assert sent["pipeline"] == 2 * visits * sent["hop"]
        config["plan"] = {"case": dict(case.source), "method": method}
        assert command(config, "--json")[1] == by_file


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"plan": {"measure": True, "case": {"stages": [1, 1]}}}, "plan"),
        ({"plan": {"case": "nowhere.yaml"}}, "case"),
        ({"model": MODEL | {"layers": 3}}, "model.layers"),
        ({"plan": {"case": SMALL_CASE | {"memory": "auto"}}}, "case.memory_bytes"),
        (
            {"plan": {"case": SMALL_CASE | {"memory": "auto", "memory_bytes": 1e4}}},
            "case.memory_bytes",
        ),
        ({"model": MODEL | {"depth": 3}}, "model.depth"),
    ],
)
def test_what_cannot_be_told_is_refused(command: Any, change: dict[str, Any], named: str):
    code, said, error = command(CONFIG | change)
    assert (code, said) == (2, "")
    assert error.startswith(f"error: {named} = ")


def test_the_page_shows_what_the_command_prints(command: Any):
    """And its example is the configuration of experiments/paper, told in short."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "memory.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", page, re.M | re.S))
    _, said, _ = command(yaml.safe_load(blocks["yaml"]))
    assert said == blocks["text"]
    # With memory: auto, as the command that the page shows has it.
    commands = re.findall(r"skippipe estimate-memory --config 8b\.yaml (--set .*)$", page, re.M)
    of_room, of_meshes = (
        command(yaml.safe_load(blocks["yaml"]), *words.split())[1] for words in commands
    )
    [line] = re.findall(r"^    (nodes 0-19: .*)$", page, re.M)
    assert line in of_room.splitlines()
    [taken] = re.findall(r"takes (\S+ GB) of each of 4 devices on its data nodes", page)
    assert f"stage 0 takes {taken} on each of 4 devices with 16 in flight" in of_meshes
    launched = (root / "experiments" / "paper" / "configs" / "8b.yaml").read_text(encoding="utf-8")
    assert command(yaml.safe_load(launched))[1] == said


OUTER = {"mode": "outer", "every": 4, "fragments": 2, "delay": 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tied_head", [False, True])
def test_messages_have_the_bytes_of_the_formula(dtype: str, tied_head: bool):
    model = MODEL | {"layers": 6, "stage_layers": [3, 3], "tied_head": tied_head}
    config = parse_config(CONFIG | {"model": model, "averaging": OUTER | {"dtype": dtype}})
    for stage, shapes in enumerate(stage_shapes(config.model, 2)):
        for number, fragment in enumerate(fragments_of(config.averaging, 3)):
            shape = fragment.message_shape(shapes)
            formula = message_bytes(config, 3, number, is_data_stage=stage == 0)
            assert shape.size * shape.dtype.itemsize == formula


def test_what_outer_averaging_holds_and_sends(command: Any):
    # So few tokens, and so many blocks, that what passes within one is less than a fragment.
    blocks = 8
    few = CONFIG | {
        "model": MODEL | {"layers": 2 * blocks},
        "data": {"sequence_length": 4, "microbatch_size": 1},
    }

    def stages(**averaging: Any) -> tuple[list[Any], dict[str, Any]]:
        code, said, _ = command(few | {"averaging": averaging}, "--json")
        assert code == 0
        return json.loads(said)["stages"], json.loads(said)

    exact, _ = stages()
    (data, inner), figures = stages(**OUTER)
    # A single data node averages nothing; the two others do.
    assert (data["replicas"], inner["replicas"]) == (1, 2)
    for own, before in zip((data, inner), exact, strict=True):
        of_outer = ("outer", "changes", "working", "total")
        assert {k: v for k, v in own["bytes"].items() if k not in of_outer} == {
            k: v for k, v in before["bytes"].items() if k not in of_outer
        }
        assert (before["bytes"]["outer"], before["bytes"]["changes"]) == (0, 0)
    assert data["bytes"] == exact[0]["bytes"]
    count = inner["parameters"]
    assert inner["bytes"]["outer"] == 12 * count
    # Sent after 2 and 4 of 4 iterations and applied three later, both fragments are under way.
    config = parse_config(few | {"averaging": OUTER})
    sent = sum(message_bytes(config, blocks, number, is_data_stage=False) for number in (0, 1))
    assert count < sent < 1.1 * count
    assert inner["bytes"]["changes"] == 4 * count + 2 * sent
    # Parameters, anchor and momentum of a half of it, more than the gradients of all and a block's.
    working, model = exact[1]["bytes"]["working"], config.model
    passing = bytes_saved_by_blocks(model, config.data, 1) + passing_bytes(model, config.data)
    assert (working, inner["bytes"]["working"]) == (4 * count + passing, 12 * count // 2)
    always = exact[1]["bytes"]["total"] - working + 12 * count
    assert inner["bytes"]["total"] == always + 4 * count + 2 * sent + 6 * count
    # Each of two replicas sends its message once, over four iterations.
    assert figures["bytes_per_iteration"]["averaging"] == round(2 * sent / 4)
    assert figures["case"]["averaging"] == OUTER | {"dtype": "int8"}

    (_, seldom), _ = stages(**OUTER | {"delay": 2})
    assert seldom["bytes"]["changes"] == inner["bytes"]["changes"] // 2
    (_, at_once), _ = stages(**OUTER | {"delay": 0, "exact_steps": 3})
    assert at_once["bytes"]["changes"] == seldom["bytes"]["changes"]


def test_the_table_has_columns_of_outer_averaging(command: Any):
    _, said, _ = command(CONFIG | {"averaging": OUTER})
    head, data, inner, _, sent, in_a_case = said.splitlines()
    names = re.split(r"  +", head)
    assert names[7:12] == ["outer", "in flight", "in transit", "waiting", "working"]
    columns = dict(zip(names, re.split(r"  +", inner), strict=True))
    assert columns["outer"] == "46.8 kB"
    assert dict(zip(names, re.split(r"  +", data), strict=True))["in transit"] == "0 B"
    assert sent.endswith(" for averaging (mean of 4 iterations)")
    assert "averaging: {'mode': 'outer', 'every': 4," in in_a_case
    assert "in transit" not in command(CONFIG)[1]
    # What is under way is among what waits.
    _, said, _ = command(CONFIG | {"plan": {"case": SMALL_CASE | {"stages": [2, 1]}}})
    _, more, _ = command(
        CONFIG | {"plan": {"case": SMALL_CASE | {"stages": [2, 1]}}, "averaging": OUTER}
    )
    assert said.splitlines()[3] != more.splitlines()[3]


@pytest.mark.parametrize("plan", [{}, {"plan": "auto"}])
def test_without_a_plan_one_machine_is_estimated_as_it_is_planned_for(command: Any, plan: Any):
    code, said, note = command({"model": MODEL, "data": CONFIG["data"]} | plan)
    assert code == 0
    assert "0 (data)       4      1 " in said
    assert "an iteration of 2 microbatches sends 0 B of activations and gradients" in said
    assert "this estimate is for one machine with one device" in note
    assert "skippipe measure -o case.yaml" in note
