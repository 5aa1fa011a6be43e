"""The update against AdamW of Optax, and its schedule written down in NumPy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import ModelConfig, OptimizerConfig
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.optim.update_rule import decays, learning_rate_schedule, update_rule

CONFIG = OptimizerConfig(
    learning_rate=0.1,
    warmup_steps=3,
    final_ratio=0.2,
    beta1=0.8,
    beta2=0.9,
    epsilon=1e-3,
    weight_decay=0.3,
)


def rates(config: OptimizerConfig, steps: int, count: int) -> list[float]:
    schedule = learning_rate_schedule(config, steps)
    return [float(np.asarray(schedule(step))) for step in range(count)]


def test_learning_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    expected = [0.1 * (step + 1) / 4 for step in range(3)]
    for step in range(3, 12):
        share = min(step - 3, 7) / 7
        expected.append(0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2))
    np.testing.assert_allclose(rates(CONFIG, 10, 12), expected, rtol=1e-5)


def test_decay_steps_make_the_schedule_independent_of_how_long_the_run_is():
    config = OptimizerConfig(warmup_steps=2, decay_steps=20)
    assert rates(config, 5, 25) == rates(config, 500, 25)
    assert rates(OptimizerConfig(warmup_steps=2), 20, 25) == rates(config, 5, 25)


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"), [(9, 5, [0.1, 0.2, 0.3, 0.4, 0.5]), (0, 10, [1.0])]
)
def test_the_warmup_is_as_long_as_is_said(warmup: int, steps: int, expected: list[float]):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup)
    np.testing.assert_allclose(rates(config, steps, len(expected)), expected, rtol=1e-5)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_a_stable_rate_falls_over_the_last_part_only(shape: str):
    config = dataclasses.replace(
        CONFIG, schedule="warmup-stable-decay", decay_fraction=0.4, decay_shape=shape
    )
    expected = [0.1 * (step + 1) / 4 for step in range(3)]
    for step in range(3, 14):
        gone = min(max(step - 6, 0), 4) / 4
        fallen = gone if shape == "linear" else math.sqrt(gone)
        expected.append(0.1 * (1 - 0.8 * fallen))
    np.testing.assert_allclose(rates(config, 10, 14), expected, rtol=1e-5)


def test_the_warmup_goes_before_the_decay():
    config = OptimizerConfig(
        learning_rate=1.0,
        warmup_steps=6,
        schedule="warmup-stable-decay",
        decay_fraction=1.0,
        final_ratio=0.0,
    )
    expected = [*((step + 1) / 7 for step in range(6)), 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    np.testing.assert_allclose(rates(config, 10, 12), expected, atol=1e-6)


def test_updates_are_those_of_optax_and_one_that_is_skipped_leaves_the_state_as_it_was():
    own, theirs = (
        update_rule(CONFIG, steps=10),
        optax.adamw(
            learning_rate_schedule(CONFIG, 10),
            b1=CONFIG.beta1,
            b2=CONFIG.beta2,
            eps=CONFIG.epsilon,
            weight_decay=CONFIG.weight_decay,
        ),
    )
    parameters = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)}
    state = other = own.init(parameters)
    for number in range(3):
        gradients = jax.tree.map(lambda leaf, n=number: leaf * (n - 1.5), parameters)
        updates, state = jax.jit(own.update)(gradients, state, parameters)
        expected, other = jax.jit(theirs.update)(gradients, other, parameters)
        jax.tree.map(np.testing.assert_array_equal, (updates, state), (expected, other))
    wrong = jax.tree.map(lambda leaf: leaf * jnp.nan, parameters)
    _, after = jax.jit(own.update)(wrong, state, parameters, is_skipped=jnp.bool_(True))
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize(
    ("switches", "more"),
    [
        ({}, set()),
        ({"embeddings": False}, {"0/embedding"}),
        ({"head": False}, {"0/head/kernel"}),
        ({"embeddings": False, "head": False}, {"0/embedding", "0/head/kernel"}),
    ],
)
def test_all_but_the_scales_of_norms_decay(
    switches: dict[str, bool], more: set[str], tied_head: bool
):
    shapes = stage_shapes(ModelConfig(tied_head=tied_head), 2)
    marked = jax.tree_util.tree_leaves_with_path(decays(shapes, **switches))
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): flag for path, flag in marked}
    exempt = {name for name, decaying in names.items() if not decaying}
    norms = {"blocks/attention_norm/scale", "blocks/ffn_norm/scale"}
    always = {f"{s}/{norm}" for s in (0, 1) for norm in norms} | {"0/final_norm/scale"}
    assert exempt == always | (more & set(names))
    assert {"0/embedding", "1/blocks/down/kernel"} < set(names)


def test_what_does_not_decay_only_learns():
    parameters: Any = {name: {"kernel": jnp.ones(2)} for name in ("down", "head")}
    parameters["embedding"] = jnp.ones(2)
    transformation = update_rule(dataclasses.replace(CONFIG, decay_embeddings=False), steps=10)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    updates: Any
    updates, _ = transformation.update(zeros, transformation.init(parameters), parameters)
    first_rate = rates(CONFIG, 10, 1)[0]
    np.testing.assert_array_equal(updates["embedding"], 0.0)
    for name in ("down", "head"):
        np.testing.assert_allclose(updates[name]["kernel"], -first_rate * 0.3, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("warmup_steps", -1),
        ("final_ratio", 1.5),
        ("beta1", 1.0),
        ("beta2", 1.0),  # the mean square would stay 0, and every update be 0 / 0
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("weight_decay", -0.1),
        ("clip_norm", 0.0),
        ("decay_steps", 10),
        ("schedule", "constant"),
        ("decay_shape", "cosine"),
        ("decay_fraction", 0.0),
        ("decay_fraction", 1.5),
        ("skip_above_norm", 0.0),
        ("skip_above_norm", math.inf),
        ("z_loss", -1e-4),
    ],
)
def test_values_out_of_range_are_refused(field: str, value: Any):
    with pytest.raises(InputError) as caught:
        OptimizerConfig(**{field: value})
    assert caught.value.field == f"optimizer.{field}"
    assert caught.value.value is value


@pytest.mark.parametrize(("field", "value"), [("decay_fraction", 0.4), ("decay_shape", "1-sqrt")])
def test_what_another_schedule_takes_is_refused(field: str, value: Any):
    with pytest.raises(InputError) as caught:
        OptimizerConfig(**{field: value})
    assert caught.value.field == f"optimizer.{field}"
    assert caught.value.remedy == "Remove it, or write schedule: warmup-stable-decay"
    OptimizerConfig(schedule="warmup-stable-decay", **{field: value})
