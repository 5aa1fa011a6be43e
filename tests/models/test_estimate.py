"""`python -m skippipe_jax.memory`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case
from skippipe_sched.search.budget import Search

from skippipe_jax import memory
from skippipe_jax.config import parse_config
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.models.footprint import kept_bytes, stage_parameters
from skippipe_jax.runtime.stage_functions import stage_functions
from tests.training_runs import SMALL_CASE

MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
CONFIG: dict[str, Any] = {
    "model": MODEL,
    "plan": {"case": SMALL_CASE},
    "data": {"sequence_length": 32, "microbatch_size": 2},
}


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run the command on a configuration; its exit code, and what it printed."""

    def run(config: dict[str, Any], *words: str) -> tuple[int, str, str]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        monkeypatch.setattr("sys.argv", ["memory", "--config", str(path), *words])
        code = memory.main()
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


def test_a_table_for_people(command: Any):
    code, said, _ = command(CONFIG, "--set", "model.recompute=stage")
    head, data, inner, nodes, sent, in_a_case = said.splitlines()
    assert code == 0
    assert head.split()[:3] == ["stage", "layers", "nodes"]
    assert data.startswith("0 (data)")
    assert inner.split()[:4] == ["1", "2", "2", "3,904"]
    assert "2 x 4.10 kB" in inner
    assert nodes.startswith("nodes 0-2: stage 0 takes ")
    assert nodes.endswith("; an iteration has no more")
    assert "2 microbatches" in sent
    assert in_a_case.endswith("activation_bytes: 4096, stage_bytes: [48832, 15616]")


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
    assert "its first host and its buddy keep in their own memory" in said
    _, said, _ = command(CONFIG, "--json")
    assert "copies" not in json.loads(said)


def test_hops_that_differ_by_direction_are_told_apart(command: Any):
    words = ("--set", "network.activation_dtype=int8", "--set", "network.gradient_dtype=bfloat16")
    _, said, _ = command(CONFIG, "--json", *words)
    figures = json.loads(said)
    sent = figures["bytes_per_iteration"]
    assert (sent["hop"], sent["gradient_hop"]) == (64 * (16 + 2), 64 * 16 * 2)
    assert sent["pipeline"] == 4 * (sent["hop"] + sent["gradient_hop"])
    assert figures["case"]["activation_bytes"] == sent["hop"]
    assert figures["case"]["gradient_bytes"] == sent["gradient_hop"]
    _, said, _ = command(CONFIG, *words)
    assert "1.15 kB a hop and 2.05 kB a hop back" in said
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
    assert "1.17 MB may be filled, 0.9 of 1.30 MB; one more would take " in told
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
        ({"plan": "auto"}, "plan.measure"),
        ({"plan": {}}, "plan.case"),
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


@pytest.mark.parametrize("is_data_stage", [True, False])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_forward_that_ran_keeps_what_the_formula_says(recompute: str, is_data_stage: bool):
    config = parse_config(CONFIG | {"model": MODEL | {"recompute": recompute}})
    functions = stage_functions(config.model, config.optimizer, 1, is_data_stage, 2, 64)
    parameters, _, _ = functions.create(jax.random.key(0), 0)
    inputs = jnp.zeros((2, 32), jnp.int32) if is_data_stage else jnp.ones((2, 32, 16))
    _, saved, _ = functions.forward(parameters, jax.device_put(np.zeros(2, np.int32)), inputs)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(saved))
    formula = kept_bytes(config, 2, is_data_stage=is_data_stage)
    assert kept == pytest.approx(formula, rel=0.02)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    assert count == stage_parameters(config.model, 2, is_data_stage=is_data_stage)


def test_the_page_shows_what_the_command_prints(command: Any):
    """And its example is the configuration of experiments/paper, told in short."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "memory.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", page, re.M | re.S))
    _, said, _ = command(yaml.safe_load(blocks["yaml"]))
    assert said == blocks["text"]
    # With memory: auto, as the command that the page shows has it.
    [words] = re.findall(r"skippipe_jax\.memory --config 8b\.yaml (--set .*)$", page, re.M)
    [line] = re.findall(r"^    (nodes 0-19: .*)$", page, re.M)
    assert line in command(yaml.safe_load(blocks["yaml"]), *words.split())[1].splitlines()
    launched = (root / "experiments" / "paper" / "configs" / "8b.yaml").read_text(encoding="utf-8")
    assert command(yaml.safe_load(launched))[1] == said
