"""Configuration files that extend others: what they say together, and which one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from skippipe_sched.errors import InputError
from skippipe_sched.problem.links import COLUMNS, rows_of

from skippipe_jax.cli.main import main
from skippipe_jax.config import load_config, parse_config
from skippipe_jax.config.describe import schema
from skippipe_jax.config.parsing import read_files
from skippipe_jax.experts.config import load_experts
from tests.harness.messages import refusal

BASE = """\
run_dir: runs/base
model: {width: 64, layers: 4, heads: 4, kv_heads: 2, ffn_width: 96, rope_scaling: {factor: 4.0}}
data:
  source: mixture
  mixture: [{source: python}]
train: {steps: 7}
cluster: {host_of_node: [0, 1]}
"""
MIDDLE = "extends: ../base.yaml\nmodel: {layers: 6}\nseed: 3\n"
LAST = """\
extends: middle.yaml
run_dir: runs/last
model: {rope_scaling: {low_frequency_factor: 2.0}}
cluster: {host_of_node: [0]}
"""


@pytest.fixture
def last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The last of three files, of which the first lies in another folder."""
    monkeypatch.chdir(tmp_path)
    Path("inner").mkdir()
    Path("base.yaml").write_text(BASE)
    Path("inner/middle.yaml").write_text(MIDDLE)
    Path("inner/last.yaml").write_text(LAST)
    return Path("inner/last.yaml")


def refused(path: Path, *overrides: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    return caught.value


def test_mappings_are_merged_at_every_depth_and_all_else_is_replaced(last: Path):
    config = load_config(last)
    assert (config.run_dir, config.seed, config.train.steps) == ("runs/last", 3, 7)
    assert (config.model.width, config.model.layers) == (64, 6)
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.factor == 4.0
    assert config.model.rope_scaling.low_frequency_factor == 2.0
    assert config.cluster.host_of_node == (0,)


def test_set_comes_after_all_files(last: Path):
    config = load_config(last, ["model.layers=8", "train={}"])
    assert (config.model.layers, config.train.steps) == (8, 100)


def test_what_is_shown_is_the_same_configuration_and_names_the_files(
    last: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["config", "--config", str(last), "--set", "model.heads=8"]) == 0
    shown = capsys.readouterr().out
    assert parse_config(yaml.safe_load(shown)) == load_config(last, ["model.heads=8"])
    lines = [line.strip() for line in shown.splitlines()]
    assert "run_dir: runs/last  # inner/last.yaml" in lines
    assert "layers: 6  # inner/middle.yaml" in lines
    assert "width: 64  # inner/../base.yaml" in lines
    assert "mixture:  # inner/../base.yaml" in lines
    assert "heads: 8  # --set" in lines
    assert "execution: strict" in lines


def test_a_file_alone_is_shown_without_its_name(last: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--config", "base.yaml"]) == 0
    assert "#" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mistake", "field"),
    [
        ("train: {steps: 0}", "train.steps"),
        ("cluster: 3", "cluster"),
        ("trian: {steps: 3}", "config.trian"),
        ("trian: 3", "config.trian"),
        ("cluster: {host_of_node: [0, one]}", "cluster.host_of_node[1]"),
    ],
)
def test_a_wrong_value_names_the_file_that_says_it(last: Path, mistake: str, field: str):
    last.write_text("extends: middle.yaml\n")
    Path("base.yaml").write_text(yaml.safe_dump(yaml.safe_load(BASE) | yaml.safe_load(mistake)))
    assert refused(last).field == f"inner/../base.yaml: {field}"


def test_a_wrong_override_names_no_file_and_neither_does_a_file_alone(last: Path):
    assert refused(last, "train.steps=0").field == "train.steps"
    Path("base.yaml").write_text("train: {steps: 0}")
    assert refused(Path("base.yaml")).field == "train.steps"


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("gone.yaml", "cannot be read: No such file"),
        ("last.yaml", "leads back to a file that extends this one"),
        ("../inner/last.yaml", "leads back to a file that extends this one"),
        ("list.yaml", "is not a mapping"),
        ("broken.yaml", "is not valid YAML at line 1"),
        ("3", "must be text"),
    ],
)
def test_files_that_cannot_be_extended_are_refused(last: Path, base: str, problem: str):
    Path("inner/list.yaml").write_text("[]")
    Path("inner/broken.yaml").write_text("{")
    Path("inner/middle.yaml").write_text(f"extends: {base}\n")
    error = refused(last)
    assert error.field == "inner/middle.yaml: extends"
    assert error.problem.startswith(problem)
    assert error.value
    assert error.remedy


def test_a_link_table_lies_beside_the_file_that_names_it(last: Path):
    Path("base.yaml").write_text("plan: {case: {links: links.csv}}")
    Path("links.csv").write_text(f"{','.join(COLUMNS)}\na,b,5,1\n")
    named = read_files(last, "--config").tree["plan"]["case"]["links"]
    assert rows_of(named, last.parent) == [["a", "b", 5, 1]]


def test_the_file_of_experts_may_extend_another(last: Path):
    Path("experts.yaml").write_text(
        "domains: [{name: a, path: a}, {name: b, path: b}]\nsizes: {M: {}}\nseeds: {steps: 5}\n"
        "arms: {one: {size: M, steps: 3}}\n"
    )
    Path("inner/more.yaml").write_text("extends: ../experts.yaml\narms: {one: {steps: 0}}\n")
    with refusal("inner/more.yaml: arms.one.steps = "):
        load_experts(Path("inner/more.yaml"))
    experts = load_experts(Path("inner/more.yaml"), ["arms.one.steps=4"])
    assert (experts.arms["one"].size, experts.arms["one"].steps) == ("M", 4)


def test_editors_take_the_key():
    jsonschema.validate({"extends": "base.yaml"}, json.loads(json.dumps(schema())))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"extends": ["base.yaml"]}, schema())
