"""What is kept between forward and backward changes memory, and no gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skippipe_jax.config import ModelConfig, OptimizerConfig
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.runtime.stage_functions import stage_functions
from tests.harness.oracle import relative_error

TIME = 24
MODEL = ModelConfig(
    vocabulary_size=19, width=16, layers=4, heads=2, kv_heads=1, ffn_width=24, context=TIME
)


@functools.cache
def forward_and_backward(model: ModelConfig, recompute: str) -> tuple[Any, list[jax.Array]]:
    """What an inner stage leaves for its backward pass, and all gradients."""
    plain, functions = (
        stage_functions(own, OptimizerConfig(), 10, False, 3, 2 * TIME)
        for own in (model, dataclasses.replace(model, recompute=recompute))
    )
    parameters = plain.initialize(jax.random.key(0), 1)
    gradients = plain.no_gradients(parameters)
    random = np.random.default_rng(0)
    inputs, cotangent = (
        jnp.asarray(random.normal(size=(2, TIME, MODEL.width)), model.compute_dtype)
        for _ in range(2)
    )
    gauge = jnp.zeros(2, jnp.int32)
    _, saved, gauge = functions.forward(parameters, gauge, inputs)
    of_inputs, gradients, _ = functions.backward(parameters, gradients, gauge, saved, cotangent)
    assert of_inputs is not None
    return saved, [of_inputs, *jax.tree.leaves(gradients)]


@pytest.mark.parametrize(
    ("attention", "compute_dtype"),
    [
        ("xla", "float32"),
        pytest.param("xla", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("blockwise", "float32", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("recompute", [own for own in RECOMPUTE if own != "none"])
def test_gradients_are_the_same_whatever_is_kept(
    recompute: str, attention: str, compute_dtype: str
):
    model = dataclasses.replace(MODEL, attention=attention, compute_dtype=compute_dtype)
    _, expected = forward_and_backward(model, "none")
    _, found = forward_and_backward(model, recompute)
    if compute_dtype == "bfloat16":
        assert relative_error(found, expected) < 0.05
        return
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_products_wait_in_the_memory_of_the_host():
    saved, _ = forward_and_backward(MODEL, "offload_dot_with_no_batch_dims")
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(saved) if leaf.ndim > 3}
    assert "pinned_host" in kinds
