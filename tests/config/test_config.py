"""The configuration: where its values come from, and what is refused on the way."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

import skippipe_jax
from skippipe_jax.config import (
    PRESETS,
    CheckpointConfig,
    Config,
    DataConfig,
    MixtureConfig,
    ModelConfig,
    OptimizerConfig,
    PlanConfig,
    RopeScaling,
    TrainConfig,
    load_config,
    parse_config,
    require_same_run,
    resume,
    to_yaml,
)
from skippipe_jax.config.describe import sections


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def refused(tree: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_config(tree)
    return caught.value


def test_an_empty_file_is_the_defaults(tmp_path: Path):
    assert load(tmp_path, "") == load(tmp_path, "{}") == Config()


def test_file_overrides_preset_overrides_defaults(tmp_path: Path):
    model = load(tmp_path, "model: {preset: 8b, layers: 8}").model
    assert model.layers == 8  # the file
    assert (model.width, model.kv_heads, model.rope_theta) == (4096, 8, 500000.0)  # the preset
    assert (model.recompute, model.tied_head) == ("none", False)  # the defaults
    assert dataclasses.replace(model, layers=32) == ModelConfig(preset="8b", **PRESETS["8b"])


def test_set_overrides_the_file(tmp_path: Path):
    config = load(
        tmp_path,
        "model: {preset: tiny, layers: 8}\ntrain: {steps: 7}",
        "model.layers=2",
        "model.layers=6",
        "model.preset=500m",
        "optimizer.learning_rate=3e-4",
        "model.rope_scaling.factor=4",
        "model.stage_layers=[1, 2, 3]",
        "data.held_out=0.5",
        "run_dir=runs/a=b",
        "compilation_cache=null",
    )
    assert (config.model.layers, config.model.width) == (6, 1024)
    assert config.model.rope_scaling == RopeScaling(factor=4.0)
    assert config.model.stage_layers == (1, 2, 3)
    assert (config.train.steps, config.data.held_out) == (7, 0.5)
    assert config.optimizer.learning_rate == 3e-4
    assert (config.run_dir, config.compilation_cache) == ("runs/a=b", None)
    assert parse_config({"run_dir": "~/runs/a"}).run_dir == str(Path.home() / "runs/a")


@pytest.mark.parametrize(
    ("text", "rate"), [("3e-4", 3e-4), ("3.0e-4", 3e-4), ("'3e-4'", 3e-4), ("1", 1.0)]
)
def test_numbers_may_be_written_as_people_write_them(tmp_path: Path, text: str, rate: float):
    found = load(tmp_path, f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate
    assert (found, type(found)) == (rate, float)


@pytest.mark.parametrize(
    ("tree", "field", "meant"),
    [
        ({"trian": {"steps": 3}}, "config.trian", "train"),
        ({"train": {"step": 3}}, "train.step", "steps"),
        ({"model": {"preset": "tiny", "zzz": 3}}, "model.zzz", None),
        ({"model": {"rope_scaling": {"faktor": 2}}}, "model.rope_scaling.faktor", "factor"),
        ({"recipe": {"phases": [{"from_stop": 3}]}}, "recipe.phases[0].from_stop", "from_step"),
        ({3: 4}, "config.3", None),
    ],
)
def test_unknown_keys_are_refused_at_every_level(tree: Any, field: str, meant: str | None):
    error = refused(tree)
    assert (error.field, error.problem) == (field, "unknown key")
    assert "use one of: " in error.remedy
    guess = error.remedy.partition("? ")[0] if "Did you mean" in error.remedy else None
    assert guess == (meant and f"Did you mean {meant}")


PYTHON = {"source": "python"}
WRONG_DATA: tuple[tuple[str, dict[str, Any]], ...] = (
    ("path", {"source": "text"}),
    ("path", {"path": "text"}),
    ("path", {"source": "text", "path": ""}),
    ("path", {"source": "mixture", "path": "a", "mixture": [PYTHON]}),
    ("text_field", {"source": "jsonl", "path": "a", "text_field": ""}),
    ("packing", {"source": "chat", "path": "a"}),
    ("today", {"source": "chat", "path": "a", "packing": "documents", "today": "tomorrow"}),
    ("today", {"today": "2026-11-22"}),
    ("too_long", {"packing": "documents", "too_long": "shorten"}),
    ("too_long", {"packing": "windows", "too_long": "drop"}),
    ("mixture", {"source": "mixture"}),
    ("mixture", {"mixture": [PYTHON]}),
    ("mixture", {"source": "mixture", "mixture": [*[PYTHON | {"weight": 1e-9}] * 2, PYTHON]}),
    ("mixture[0].source", {"source": "mixture", "mixture": [{"source": "mixture"}]}),
    ("mixture[1].path", {"source": "mixture", "mixture": [PYTHON, {"source": "text"}]}),
    ("mixture[0].weight", {"source": "mixture", "mixture": [PYTHON | {"weight": 0.0}]}),
    ("held_out", {"held_out": 0.1, "source": "tokens", "path": "tokens"}),
)
ROUNDED = {"activation_dtype": "int8", "gradient_rounding": "stochastic"}
WRONG: dict[str, list[Any]] = {
    "train.steps": ["100", True, 1.5, 1.0, None, [1], 0],
    "model.layers": ["four"],
    "model.stage_layers": [4, "2, 2"],
    "model.tied_head": [1, "yes please"],
    "model.rope_scaling": [8.0],
    "model.preset": ["13b"],
    "model.width": [10**22],
    "optimizer.learning_rate": ["fast", True, float("nan"), float("inf")],
    "optimizer.warmup_steps": [2**31],
    "optimizer.decay_steps": [2.5, 2**31],
    "data.source": [3, "web"],
    "data.path": [["a", "b"]],
    "data.sequence_length": [300, 0],
    "data.microbatch_size": [0],
    "data.held_out": [0.0, 1.0, float("nan")],
    "data.shuffle_seed": [-1, 2**32],
    "data.packing": ["tight"],
    "data.tokenizer": [""],
    "plan.case": [3, ["nodes"]],
    "plan.file": [{"stages": 3}],
    "plan.method": ["best"],
    "plan.seed": [-1],
    "checkpoint.every": [0],
    "checkpoint.keep": [0],
    "checkpoint.keep_every": [0],
    "checkpoint.copy_to": [""],
    "cluster.host_of_node": [3],
    "cluster.heartbeat_timeout_s": [0],
    "recovery.lost_stage": ["wait"],
    "recovery.buddy_every": [0],
    "validation.every": [0],
    "validation.sequences": [0],
    "network.activation_dtype": ["int4"],
    "network.gradient_dtype": ["float16"],
    "network.averaging_dtype": ["int8"],
    "network.gradient_rounding": ["stochastic"],
    "run_dir": [None, "", 3, "s3://bucket/run"],
    "compilation_cache": [False],
    "seed": [-1, "0", 2**32],
    "init_from": [
        *("model", "hf:", "gguf:model", ":", 3, ""),
        *("run:", "run:@3", "run:seed@", "run:seed@last", "run:seed@-1", "run:seed@1.5", "ru:x"),
    ],
    "model": [None, "tiny"],
    "train": [[{"steps": 3}]],
    "train.metrics_port": [0, 65536],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_wrong_values_are_refused(field: str, value: Any):
    section, _, key = field.partition(".")
    error = refused({section: {key: value} if key else value})
    assert error.field == field
    assert error.value is value or error.value == value


@pytest.mark.parametrize("tree", [None, [], "model", 3])
def test_what_is_no_mapping_is_no_configuration(tree: Any):
    assert refused(tree).problem == "is not a mapping"


@pytest.mark.parametrize(
    ("field", "tree"),
    [
        *((f"data.{key}", {"data": values}) for key, values in WRONG_DATA),
        ("checkpoint.keep_every", {"checkpoint": {"keep_every": 30, "every": 20}}),
        ("plan.file", {"plan": {"file": "plan.json", "case": "case.yaml"}}),
        ("data.mixture[1].wait", {"data": {"mixture": [{"source": "text"}, {"wait": 3}]}}),
        ("data.mixture[0].source", {"data": {"mixture": [{"source": 3}]}}),
        ("network.gradient_rounding", {"network": ROUNDED | {"gradient_dtype": "bfloat16"}}),
        ("log.profile_steps", {"log": {"profile_steps": [0]}}),
        ("log.profile_steps", {"train": {"steps": 5}, "log": {"profile_steps": [2, 6]}}),
    ],
)
def test_values_that_make_no_run_are_refused(field: str, tree: Any):
    assert refused(tree).field == field


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.steps", "--set"),
        ("=3", "--set"),
        ("train.steps=[1", "--set"),
        ("run_dir.sub=3", "--set"),
        ("train.stepz=3", "train.stepz"),
        ("train.=3", "train."),
        ("train.steps=", "train.steps"),
    ],
)
def test_overrides_that_override_nothing_are_refused(tmp_path: Path, override: str, field: str):
    with pytest.raises(InputError) as caught:
        load(tmp_path, "run_dir: here", override)
    assert caught.value.field == field


CASE = {"nodes": 2, "locations": ["Köln"], "links": [["Köln", "here", 1.5, 1e-3]]}
CONFIGS = st.builds(
    Config,
    run_dir=st.text("abcä: #'\"/-", min_size=1).filter(str.isprintable),
    seed=st.integers(0, 2**32 - 1),
    compilation_cache=st.sampled_from([None, "~/cache"]),
    model=st.builds(
        ModelConfig,
        preset=st.sampled_from([None, "tiny", "8b"]),
        stage_layers=st.none() | st.just((1, 3)),
        rope_scaling=st.none() | st.builds(RopeScaling, factor=st.floats(0.1, 1e5)),
        norm_epsilon=st.floats(1e-30, 1),
        tied_head=st.booleans(),
    ),
    plan=st.sampled_from(
        [PlanConfig(), PlanConfig(file="plan.json"), PlanConfig(case="a"), PlanConfig(case=CASE)]
    ),
    data=st.sampled_from(
        [
            DataConfig(),
            DataConfig(source="text", path="1e3"),
            DataConfig(source="mixture", mixture=(MixtureConfig("python", weight=0.5),)),
        ]
    ),
    optimizer=st.builds(OptimizerConfig, learning_rate=st.floats(0, 1e50)),
    train=st.builds(TrainConfig, steps=st.integers(1, 10**9)),
    checkpoint=st.builds(CheckpointConfig, every=st.integers(1, 99), keep=st.integers(1, 9)),
)


@given(CONFIGS)
def test_what_is_written_reads_back_the_same(config: Config):
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"model": {"layers": 8, "rope_scaling": {}}}, "model.layers"),
        ({"model": {"rope_scaling": {"factor": 2.0}}}, "model.rope_scaling.factor"),
        ({"model": {}}, "model.rope_scaling"),
        ({"model": {"rope_scaling": {}, "parameter_dtype": "bfloat16"}}, "model.parameter_dtype"),
        ({"data": {"microbatch_size": 2}}, "data.microbatch_size"),
    ],
)
def test_a_run_goes_on_only_as_the_run_it_was(change: Any, field: str):
    base = {"model": {"rope_scaling": {}}}
    saved, now = parse_config(base), parse_config(base | change)
    with pytest.raises(InputError) as caught:
        require_same_run(now, saved)
    assert caught.value.field == field
    assert f"Set {field}=" in caught.value.remedy


def test_the_remedy_of_a_changed_run_can_be_taken_literally(tmp_path: Path):
    saved, now = Config(), parse_config({"model": {"preset": "tiny", "tied_head": True}})
    given = to_yaml(now)
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            require_same_run(load(tmp_path, given), saved)
        remedy = caught.value.remedy.split(",")[0].removeprefix("Set ")
        given = to_yaml(load(tmp_path, given, remedy))
    require_same_run(load(tmp_path, given), saved)


def test_how_a_run_goes_on_may_change():
    now = parse_config(
        {
            "run_dir": "moved",
            "optimizer": {"learning_rate": 1.0},
            "averaging": {"mode": "outer"},
            "model": {"stage_layers": [5, 5], "recompute": "block", "layers": 10},
            "train": {"steps": 90},
            "checkpoint": {"every": 1},
            "cluster": {"host_of_node": [0]},
            "plan": {"method": "full", "case": {"nodes": 3}},
        }
    )
    assert require_same_run(now, parse_config({"model": {"layers": 10}})) == [
        ("optimizer.learning_rate", 1.0, 3e-4),
        ("averaging.mode", "outer", "exact"),
        ("model.stage_layers", [5, 5], None),
        ("model.recompute", "block", "none"),
    ]


def test_every_key_is_read_somewhere():
    """Outside the checks that a dataclass makes of its own values."""

    class Reads(ast.NodeVisitor):
        def __init__(self):
            self.names: set[str] = set()

        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            if node.name != "__post_init__":
                self.generic_visit(node)

        def visit_Attribute(self, node: ast.Attribute) -> None:
            self.names.add(node.attr)
            self.generic_visit(node)

    reads = Reads()
    for path in Path(skippipe_jax.__file__).parent.rglob("*.py"):
        reads.visit(ast.parse(path.read_text()))
    keys = {key.path: key.name for section in sections() for key in section.keys}
    assert {"model.rope_scaling.factor", "cluster.host_of_node", "seed"} <= keys.keys()
    unread = {key for key, name in keys.items() if name not in reads.names}
    assert not unread


def test_hosts_compare_a_run_key_by_key_and_long_values_by_a_digest():
    own = Config(model=ModelConfig(width=64))
    other = replace(own, model=replace(own.model, context=512, recompute="block"))
    before, after = resume.identity(own), resume.identity(other)
    assert {name: after[name] for name in before if before[name] != after[name]} == {
        "model.context": "512"  # What is recomputed may change.
    }
    assert resume.settings(other)["model.recompute"] == "block"
    longer = resume.settings(replace(own, init_from="hf:" + "a" * 300))
    assert len(longer["init_from"]) == 16
    assert longer.keys() == resume.settings(own).keys()
    # Each host has its own secret file, cache and address.
    here = replace(
        own, cluster=replace(own.cluster, secret="/home/a/secret", bind_address="10.0.0.1")
    )
    here = replace(here, compilation_cache="/tmp/a")
    assert resume.settings(here) == resume.settings(own)
