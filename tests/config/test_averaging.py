"""The section `averaging`: what each iteration does, and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.averaging import EXACT, parse_averaging

from skippipe_jax.config import (
    AveragingConfig,
    Config,
    parse_config,
    to_tree,
    to_yaml,
)
from skippipe_jax.config.describe import sections
from skippipe_jax.config.parsing import FORMER_KEYS
from tests.harness.messages import refusal

OUTER: dict[str, Any] = {"mode": "outer", "every": 10, "fragments": 3, "delay": 2}
properties = settings(max_examples=50)


@st.composite
def policies(draw: st.DrawFn) -> AveragingConfig:
    every = draw(st.integers(1, 12))
    return AveragingConfig(
        "outer",
        every,
        fragments=draw(st.integers(1, every)),
        delay=draw(st.integers(0, every - 1)),
        exact_steps=draw(st.integers(0, 5)),
    )


@properties
@given(policies())
def test_fragments_are_sent_as_the_planner_says_after_the_exact_steps(averaging: AveragingConfig):
    begun = averaging.exact_steps
    for iteration in range(1, begun + 2 * averaging.every):
        assert averaging.is_exact(iteration) == (iteration <= begun)
        of_policy = averaging.policy.fragment_sent_after(max(iteration - begun, 1))
        expected = None if iteration <= begun else of_policy
        assert averaging.fragment_sent_after(iteration) == expected
    applied = {
        averaging.fragment_sent_after(n + 1 - averaging.delay) for n in range(averaging.min_steps)
    }
    assert applied - {None} == {*range(averaging.fragments)}


@properties
@given(policies(), st.integers(0, 20))
def test_blocks_are_shared_out_evenly_and_in_order(averaging: AveragingConfig, more: int):
    layers = averaging.fragments + more
    blocks = [averaging.blocks_of(number, layers) for number in range(averaging.fragments)]
    assert [block for own in blocks for block in own] == [*range(layers)]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert min(map(len, blocks)) > 0


def test_a_case_says_what_the_planner_needs():
    exact = Config().averaging
    assert exact.policy is EXACT
    assert exact.of_case == {}
    assert exact.min_steps == 0
    assert exact.fragment_sent_after(20 - exact.delay) is None
    averaging = parse_config({"averaging": OUTER}).averaging
    assert averaging.dtype == "int8"
    [(key, said)] = averaging.of_case.items()
    assert key == "averaging"
    assert parse_averaging(said, key) == averaging.policy
    assert averaging.policy.is_outer
    assert AveragingConfig("outer").policy == parse_averaging({"mode": "outer"}, "averaging")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("mode", "sometimes", "unknown name"),
        ("fragments", 11, "must be at most every = 10"),
        ("dtype", "int4", "unknown name"),
        ("rate", 0.0, "must be greater than 0"),
        ("momentum", 1.0, "must be less than 1"),
        ("momentum", -0.1, "must be at least 0"),
        ("exact_steps", -1, "must be at least 0"),
        ("evry", 3, "unknown key"),
    ],
)
def test_what_is_no_averaging_is_refused(key: str, value: Any, problem: str):
    with refusal(f"averaging.{key} = {value!r}: {problem}"):
        parse_config({"averaging": OUTER | {key: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [*OUTER.items(), ("dtype", "float32"), ("rate", 1.0), ("momentum", 0.5), ("exact_steps", 3)][
        1:
    ],
)
def test_what_has_no_effect_with_exact_is_refused(key: str, value: Any):
    with refusal(f"averaging.{key} = {value!r}: has no effect with averaging.mode: exact"):
        parse_config({"averaging": {key: value}})
    # As a configuration has it that is written in full.
    parse_config({"averaging": to_tree(AveragingConfig())})


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"network": {"averaging": "collective"}}, "network.averaging = ...exact_steps"),
        ({"network": {"averaging_dtype": "bfloat16"}}, "network.averaging_dtype = ...exact_steps"),
        ({"recovery": {"lost_stage": "average"}}, "recovery.lost_stage = ...at different steps"),
        ({"train": {"steps": 11}}, "train.steps = 11...at least 12"),
        ({"cluster": {"runtime": "distributed"}}, "cluster.runtime = ...no host waits"),
        ({"recovery": {"lost_stage": "buddy"}}, "recovery.lost_stage = ...at different steps"),
        (
            {"model": {"layers": 5, "stage_layers": [3, 2]}},
            "averaging.fragments = 3...stage 1 has",
        ),
    ],
)
def test_what_contradicts_outer_is_refused(sections: dict[str, Any], told: str):
    with refusal(told):
        parse_config({"averaging": OUTER} | sections)
    parse_config(sections | {"averaging": {"mode": "exact"}})


@pytest.mark.parametrize(
    "sections",
    [
        {"network": {"averaging": "ring", "activation_dtype": "int8", "mode": "emulate"}},
        {"network": {"averaging": "collective"}, "averaging": OUTER | {"exact_steps": 1}},
        {"network": {"averaging_dtype": "bfloat16"}, "averaging": OUTER | {"exact_steps": 1}},
        {"recovery": {"lost_stage": "stop"}},
        {"train": {"steps": 12}},
        {"model": {"layers": 6, "stage_layers": [3, 3]}},
    ],
    ids=str,
)
def test_what_outer_goes_with_is_taken(sections: dict[str, Any]):
    config = parse_config({"averaging": OUTER} | sections)
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


def test_a_former_key_passes_with_its_value_without_effect_only():
    # As runs say it that were saved by an earlier version.
    assert parse_config({"recipe": {"average_parameters_every": None}}) == Config()
    assert parse_config({"data": {"prefetch": True}}) == Config()
    for value in (False, 1, 1.0, "true"):
        with refusal(f"data.prefetch = {value!r}"):
            parse_config({"data": {"prefetch": value}})


def test_former_keys_are_keys_no_more():
    now = {key.path for section in sections() for key in section.keys}
    assert not now & FORMER_KEYS.keys()
    for path, told in FORMER_KEYS.items():
        section, _, key = path.rpartition(".")
        assert section in {own.name for own in sections()}
        for tree, overrides in (({section: {key: 2}}, []), ({}, [f"{path}=2"])):
            with refusal(f"{path} = 2...{told.remedy}"):
                parse_config(tree, overrides)
