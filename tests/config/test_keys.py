"""What is told of the keys: in words, in the schema, and of what differs from the defaults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.cli.main import main
from skippipe_jax.config import Config, load_config, parse_config, to_tree
from skippipe_jax.config.describe import (
    describe_keys,
    described,
    differences,
    schema,
    sections,
    summary,
)
from skippipe_jax.config.parsing import OTHER_TRAINERS_KEYS

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CONFIGS = [EXPERIMENTS / "quickstart.yaml", *sorted(EXPERIMENTS.glob("paper/configs/*.yaml"))]
VALIDATOR = jsonschema.Draft202012Validator(schema())


def is_valid(tree: Any) -> bool:
    return not [*VALIDATOR.iter_errors(tree)]


def read(path: Path) -> Any:
    return fields.load_yaml(path, "config")


def test_every_docstring_tells_of_the_keys_that_there_are():
    kinds = {type(value) for value in vars(Config()).values() if dataclasses.is_dataclass(value)}
    for kind in {Config, *kinds}:
        _, told = described(kind)
        assert list(told) == [field.name for field in dataclasses.fields(kind)]


def test_every_default_is_told_as_yaml_has_it():
    tree = to_tree(Config())
    outer = [section for section in sections() if section.name in ("", *tree)]
    for section in outer:
        own = tree[section.name] if section.name else tree
        assert {key.name: key.default for key in section.keys} == own


def test_keys_are_told_in_words():
    told = describe_keys()
    assert "train.steps = 100\n    integer: total steps" in told
    assert 'model.recompute = "none"\n    one of none, dots_with_no_batch_dims_saveable, ' in told
    assert "recipe.phases.from_step = 0\n" in told
    assert len(told.splitlines()) == 2 * sum(len(section.keys) for section in sections())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_committed_configurations_satisfy_the_schema(path: Path):
    VALIDATOR.validate(read(path))
    # What a run saves is one, too.
    VALIDATOR.validate(to_tree(load_config(path)))


def test_the_quickstart_names_the_schema():
    first = CONFIGS[0].read_text().partition("\n")[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads((EXPERIMENTS / name).read_text())["$schema"] == VALIDATOR.META_SCHEMA["$id"]


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(schema())


GOOD: tuple[Any, ...] = (
    {},
    {"plan": "auto"},
    {"network": "emulate"},
    {"network": {"activation_dtype": "int8", "gradient_rounding": "stochastic"}},
    {"plan": {"case": "case.yaml"}},
    {"plan": {"case": {"stages": "auto", "stage_count": 3}, "measure": True}},
    {"model": {"rope_scaling": None, "preset": "8b", "rope_theta": 10000}},
    {"recipe": {"phases": [{"from_step": 0}, {"from_step": 9, "path_length": 2}]}},
    {"data": {"source": "mixture", "mixture": [{"path": "a", "weight": 2}, {"path": "b"}]}},
    {"checkpoint": {"copy_to": None}, "compilation_cache": None},
)
BAD: tuple[Any, ...] = (
    {"trian": {"steps": 3}},
    {"train": {"stepz": 3}},
    {"train": {"steps": "many"}},
    {"train": {"steps": 2.5}},
    {"train": None},
    {"plan": "automatic"},
    {"plan": {"case": {"node": 3}}},
    {"network": {"mode": "emulated"}},
    {"network": {"gradient_dtype": "int4"}},
    {"model": {"recompute": "blocks"}},
    {"recipe": {"phases": [{"step": 0}]}},
    {"cluster": {"host_of_node": 3}},
    [],
)


@pytest.mark.parametrize("tree", GOOD, ids=str)
def test_the_schema_takes_what_is_a_configuration(tree: Any):
    parse_config(tree)
    VALIDATOR.validate(tree)


@pytest.mark.parametrize("tree", BAD, ids=str)
def test_the_schema_refuses_what_is_none(tree: Any):
    if "plan" not in tree or isinstance(tree["plan"], str):  # Cases are read when they are planned.
        with pytest.raises(InputError):
            parse_config(tree)
    assert not is_valid(tree)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_differs_from_the_defaults_gives_the_configuration_again(path: Path):
    config = load_config(path)
    assert parse_config(differences(config)) == config
    assert parse_config(yaml.safe_load(summary(config))) == config
    assert len(summary(config).splitlines()) < 40


def test_what_is_as_by_default_is_not_shown():
    assert differences(Config()) == {}
    changed = parse_config({"train": {"steps": 7}, "model": {"preset": "8b"}, "seed": 0})
    assert differences(changed) == {"model": {"preset": "8b"}, "train": {"steps": 7}}
    none = parse_config({"compilation_cache": None})
    assert differences(none) == {"compilation_cache": None}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.head=3", "heads"),
        ("model.recompute=blocks", "block"),
        ("plan.method=joins", "joint"),
    ],
)
def test_what_was_meant_is_guessed(override: str, meant: str):
    with pytest.raises(InputError, match=rf"Did you mean {meant}\? .*[Uu]se one of: "):
        parse_config({}, [override])


def test_keys_of_other_trainers_are_known():
    with pytest.raises(InputError, match=r"optimizer\.lr .*Write optimizer\.learning_rate instead"):
        parse_config({"optimizer": {"lr": 1e-3}})
    assert {*OTHER_TRAINERS_KEYS.values()} <= {
        key.path for section in sections() for key in section.keys
    }


def test_a_key_is_set_of_what_auto_stands_for():
    config = parse_config({"plan": "auto"}, ["plan.budget_s=1"])
    assert (config.plan.measure, config.plan.budget_s) == (True, 1.0)
    with pytest.raises(InputError, match="plan is not a section"):
        parse_config({"plan": "manual"}, ["plan.budget_s=1"])


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_the_command_shows_a_configuration_in_full(capsys: pytest.CaptureFixture[str]):
    words = ["show", "--config", str(CONFIGS[0]), "--set", "train.steps=7"]
    shown = told(capsys, *words)
    assert parse_config(yaml.safe_load(shown)) == load_config(CONFIGS[0], ["train.steps=7"])
    assert yaml.safe_load(shown)["optimizer"]["beta1"] == 0.9
    assert told(capsys, "keys") == describe_keys() + "\n"
    assert json.loads(told(capsys, "schema")) == schema()
