"""The paper's models at full size, counted without allocating and held against the formulas."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.plan import load_plan

from experiments.paper import shapes
from skippipe_jax import Run
from skippipe_jax.cli.main import main
from skippipe_jax.config import Config, load_config
from skippipe_jax.models.estimate import planned_case_and_visits
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.models.node_memory import memory_of_node
from skippipe_jax.storage.run_dir import PLAN
from tests.harness.pictures import overlapping_texts
from tests.models.test_in_flight import small_configs

AGREE = 0.02


def config_of(name: str) -> Config:
    return load_config(shapes.CONFIGS / f"{name}.yaml")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shapes.measure(True, tmp_path_factory.mktemp("shapes"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", shapes.MODELS)
def test_formulas_agree_with_what_is_counted(measured: dict[str, Any], name: str):
    model = measured["models"][name]
    assert model["largest_difference"] < AGREE
    least, most = {"500m": (0.4e9, 0.5e9), "1.5b": (1.5e9, 1.8e9), "8b": (8.03e9, 8.04e9)}[name]
    assert least < model["parameters"] < most


@settings(max_examples=8)
@given(small_configs(), st.integers(1, 3), st.booleans())
def test_formulas_agree_for_any_shape(config: Config, layers: int, is_data_stage: bool):
    formula = dataclasses.asdict(
        memory_of_node(
            config,
            layers,
            is_data_stage=is_data_stage,
            replicas=2,
            in_flight=2,
            under_way=2,
        )
    )
    counted = shapes.counted_memory(config, layers, is_data_stage=is_data_stage)
    for part, count in counted.items():
        assert shapes.relative(formula[part], count) < AGREE, part


@pytest.mark.nightly
@pytest.mark.parametrize("name", shapes.MODELS)
def test_the_planner_is_told_what_is_sent(measured: dict[str, Any], name: str):
    config, model = config_of(name), measured["models"][name]
    case, visits = planned_case_and_visits(config, shapes.CONFIGS)
    assert 1 - case.path_length / len(case.stages) == pytest.approx(1 / 3)
    assert visits == case.path_length * sum(case.microbatches)
    assert case.activation_bytes == model["bytes_per_iteration"]["counted"]["hop"]
    averaged = 2 if config.network.averaging_dtype == "bfloat16" else 4
    of_stages = stage_shapes(config.model, len(case.stages))
    assert list(case.stage_bytes) == [averaged * parameter_count(stage) for stage in of_stages]
    # Nobody gives up waiting for a host while all goes as planned.
    assert config.network.deadline_s > 1.5 * model["balanced_plan"]["iteration_s"]


@pytest.mark.nightly
def test_a_launched_configuration_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = np.random.default_rng(0).choice(list(b"skipping pipeline stages \n"), 40_000)
    (tmp_path / "text").write_bytes(bytes(text.tolist()))
    small = {
        "run_dir": tmp_path / "run",
        "compilation_cache": "null",
        "model.vocabulary_size": 259,
        "model.width": 32,
        "model.heads": 4,
        "model.kv_heads": 2,
        "model.ffn_width": 48,
        "data.source": "text",
        "data.path": tmp_path / "text",
        "data.sequence_length": 16,
        "plan.method": "balanced",
        "plan.case.nodes": 6,
        "plan.case.stages": [1] * 6,
        "plan.case.microbatches_per_data_node": 5,
        "plan.case.memory": "auto",
        "plan.case.memory_bytes": 1.11e6,
        "train.steps": 1,
        "validation.every": "null",
    }
    words = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    path = shapes.CONFIGS / "8b.yaml"
    assert main(["train", "--config", str(path), *words]) == 0
    [line] = Run(tmp_path / "run").metrics
    assert line["loss"] == pytest.approx(np.log(259), rel=0.05)
    assert line["tokens"] == 5 * 16
    plan = load_plan(tmp_path / "run" / PLAN)
    assert {node.memory for node in plan.case.nodes} < {2, 3, 4}
    peaks = {int(node): peak for node, peak in line["peak_in_flight"].items()}
    assert all(peak <= plan.case.nodes[node].memory for node, peak in peaks.items())


@pytest.mark.nightly
def test_the_committed_figures_are_those_of_this_code_and_can_be_read(measured: dict[str, Any]):
    path = shapes.CONFIGS.parent / "results" / f"{shapes.NAME}.json"
    committed = json.loads(path.read_text(encoding="utf-8"))
    assert committed["cuts"] == json.loads(json.dumps(measured["cuts"]))
    for name, model in measured["models"].items():
        of_stages = [stage["by_formula"] for stage in committed["models"][name]["stages"]]
        assert of_stages == [stage["by_formula"] for stage in model["stages"]]
    for kinds in committed["compiled"].values():
        for own in kinds.values():
            assert 0.5 < own["xla"] / own["formula"] < 2
    figure = shapes.draw(committed)
    assert len(figure.axes) == 3
    assert overlapping_texts(figure) == []


@pytest.mark.nightly
def test_the_page_says_which_nodes_for_which_model(measured: dict[str, Any]):
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| (\S+) \| (\d+ GB) \| `(\w+)` \| (\d+), (\d+) \| (.*) \|$", re.M)
    rows = row.findall(page)
    assert {name for name, *_ in rows} == {*shapes.MODELS}
    for name, memory, attention, data_blocks, inner_blocks, cut in rows:
        fits = measured["cuts"][name][attention][memory]
        assert (fits["data_blocks"], fits["inner_blocks"]) == (int(data_blocks), int(inner_blocks))
        layers = fits["coarsest"] and fits["coarsest"]["stage_layers"]
        said = f"{len(layers)} stages: {', '.join(map(str, layers))}" if layers else "-"
        assert cut == said
