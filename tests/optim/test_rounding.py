"""Rounding by chance: the mean is exact, replicas agree, and small updates add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.config import ModelConfig, OptimizerConfig
from skippipe_jax.optim.rounding import rounded_like, to_bfloat16
from skippipe_jax.runtime.stage_functions import (
    SQUARED_NORM,
    TOKENS,
    TOTALS,
    StageFunctions,
    stage_functions,
)

MODEL = ModelConfig(
    vocabulary_size=19,
    width=16,
    layers=4,
    heads=2,
    kv_heads=1,
    ffn_width=24,
    context=8,
    parameter_dtype="bfloat16",
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, moment_dtype="bfloat16")


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=8), st.integers(0, 99))
def test_a_number_becomes_one_of_its_neighbours(numbers: list[float], seed: int):
    wide = jnp.asarray(numbers, jnp.float32)
    found = np.asarray(to_bfloat16(wide, jax.random.key(seed)).astype(jnp.float32))
    bits = np.asarray(wide).view(np.uint32)
    lower = (bits >> 16 << 16).view(np.float32)
    higher = ((bits + np.uint32(0xFFFF)) >> 16 << 16).view(np.float32)
    for own, one, other, number in zip(found, lower, higher, wide.tolist(), strict=True):
        if np.isfinite(number):
            assert own in (one, other)
        else:
            np.testing.assert_equal(own, number)


def test_the_mean_is_exact():
    number = np.float32(1 + 2**-7 * 0.3)
    rounded = to_bfloat16(jnp.full(100_000, number), jax.random.key(0)).astype(jnp.float32)
    assert set(np.unique(rounded).tolist()) == {1.0, 1 + 2**-7}
    # Six deviations of the mean of so many.
    bound = 6 * 2**-7 * np.sqrt(0.3 * 0.7 / 100_000)
    assert abs(float(jnp.mean(rounded)) - number) < bound


def stage_tree(first_layer: int, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers that depend on the block's place in the whole model, and how they are held."""
    rows = jnp.arange(first_layer, first_layer + layers, dtype=jnp.float32)[:, None]
    wide = {"blocks": {"kernel": rows + jnp.linspace(0.01, 0.9, 64)}}
    return wide, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)


@pytest.mark.nightly
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(1, 5))
def test_a_block_is_rounded_alike_however_the_model_is_cut(seed: int, count: int, at: int):
    def rounded(first_layer: int, layers: int) -> np.ndarray:
        draw = np.array([seed, first_layer], np.uint32)
        tree = rounded_like(*stage_tree(first_layer, layers), draw, jnp.int32(count))
        return np.asarray(tree["blocks"]["kernel"].astype(jnp.float32))

    whole = rounded(0, 6)
    np.testing.assert_array_equal(np.concatenate([rounded(0, at), rounded(at, 6 - at)]), whole)


def test_steps_arrays_and_blocks_are_drawn_apart():
    held = {
        "blocks": {"a": jnp.zeros((2, 500), jnp.bfloat16), "b": jnp.zeros((2, 500), jnp.bfloat16)}
    }
    wide = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1 + 2**-8, jnp.float32), held)
    draw = np.zeros(2, np.uint32)
    of_steps = [rounded_like(wide, held, draw, jnp.int32(step))["blocks"] for step in (1, 2)]
    rows = [row.astype(jnp.float32) for own in of_steps for leaf in own.values() for row in leaf]
    for number, row in enumerate(rows):
        for other in rows[number + 1 :]:
            assert 0.3 < float(jnp.mean(row == other)) < 0.7


def functions_of(optimizer: OptimizerConfig = OPTIMIZER, **changes: Any) -> StageFunctions:
    model = dataclasses.replace(MODEL, **changes)
    return stage_functions(model, optimizer, 100, True, 2, 16)


def summed() -> jax.Array:
    return jnp.zeros(TOTALS).at[TOKENS].set(16.0).at[SQUARED_NORM].set(1.0)


@pytest.mark.parametrize(
    "moment_dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"]
)
def test_updates_smaller_than_the_last_bit_add_up(moment_dtype: str):
    """With a rate so small that each update rounds to nothing, the mean moves as in float32."""
    optimizer = dataclasses.replace(
        OPTIMIZER, learning_rate=1e-4, final_ratio=1.0, weight_decay=0.0, moment_dtype=moment_dtype
    )
    draw = np.array([0, 0], np.uint32)
    moved = {}
    for dtype in ("float32", "bfloat16"):
        functions = functions_of(optimizer, parameter_dtype=dtype)
        parameters, state, gradients = functions.create(jax.random.key(0), 0)
        parameters = jax.tree.map(lambda leaf: jnp.ones_like(leaf), parameters)
        for _ in range(20):
            gradients = jax.tree.map(lambda leaf: leaf + 0.1, gradients)
            given = parameters, state, gradients, summed(), draw
            parameters, state, gradients = functions.update(*given)
        wide = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(parameters)]
        moved[dtype] = float(jnp.mean(jnp.concatenate([1 - leaf.ravel() for leaf in wide])))
    # Twenty updates of 1e-4, half of the last bit below 1; rounded to the nearest, none would be.
    assert moved["float32"] == pytest.approx(2e-3, rel=1e-2)
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.1)
