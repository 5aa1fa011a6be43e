"""Scales that are folded into the weights, against branches that are multiplied by hand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from skippipe_jax.config import ModelConfig
from skippipe_jax.models.branch_scales import BranchScales, folded
from skippipe_jax.models.llama import Block
from tests.harness.partial_models import random_model

CUT = (1, 3, 2)
CONFIG = ModelConfig(
    width=16,
    layers=6,
    heads=4,
    kv_heads=2,
    ffn_width=24,
    context=8,
    stage_layers=CUT,
    vocabulary_size=20,
)


def by_hand(config: ModelConfig, blocks: Any, scales: np.ndarray, x: jax.Array) -> jax.Array:
    """The blocks of a stage one by one; what each branch adds is multiplied where it is added."""
    structure = nnx.graphdef(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))

    @jax.jit
    def run(own: Any, attention: jax.Array, feed_forward: jax.Array, x: jax.Array) -> jax.Array:
        block: Block = nnx.merge(structure, own)
        x = x + attention * block.attend(block.attention_norm(x), None)
        return x + feed_forward * block.feed_forward(block.ffn_norm(x))

    for number, both in enumerate(scales.astype(np.float32)):
        x = run(jax.tree.map(lambda leaf: leaf[number], blocks), *both, x)  # noqa: B023
    return x


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folding_is_scaling_what_each_branch_adds(dtype: str, stage: int):
    config = ModelConfig(**{**CONFIG.__dict__, "parameter_dtype": dtype})
    random = np.random.default_rng(stage)
    # Numbers of two have bfloat16 rounded nowhere.
    drawn = (
        random.uniform(0.2, 2.0, (2, 6))
        if dtype == "float32"
        else 2.0 ** random.integers(-2, 3, (2, 6))
    )
    scales = BranchScales(*(tuple(own) for own in drawn.tolist()))
    model = random_model(config, len(CUT))
    x = jax.numpy.asarray(random.normal(size=(2, 8, 16)), "float32")
    own = drawn[:, sum(CUT[:stage]) : sum(CUT[: stage + 1])].T
    expected = by_hand(config, model.parameters[stage]["blocks"], own, x)
    found = model.scaled(scales).apply(stage, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(found - model.apply(stage, x))).max() > 0.1


def test_a_data_stage_can_be_scaled_too():
    model = random_model(CONFIG, len(CUT))
    left_out = BranchScales.of_stages([1e-9, 1.0, 1.0], model.cut)
    tokens = np.arange(8, dtype=np.int32)[None]
    x = model.scaled(left_out).embed({"tokens": tokens, "targets": tokens})
    np.testing.assert_allclose(x, model.parameters[0]["embedding"][tokens], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_two_kernels_of_a_stage_change(dtype: str):
    config = ModelConfig(**{**CONFIG.__dict__, "parameter_dtype": dtype})
    parameters = random_model(config, len(CUT)).parameters[1]
    scaled = folded(parameters, jax.numpy.full((3, 2), 0.7))
    flat = dict(jax.tree_util.tree_leaves_with_path(parameters))
    assert flat.keys() == dict(jax.tree_util.tree_leaves_with_path(scaled)).keys()
    changed = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(scaled):
        assert leaf.dtype == flat[path].dtype == dtype
        if leaf is not flat[path]:
            changed.add(path[1].key)
    assert changed == {"output", "down"}


def test_scales_of_one_leave_a_stage_as_it_is():
    model = random_model(CONFIG, len(CUT))
    scaled = model.scaled(BranchScales.of_stages([1.0, 1.0, 0.5], model.cut))
    assert scaled.parameters[0] is model.parameters[0]
    assert scaled.parameters[1] is model.parameters[1]
    assert scaled.parameters[2] is not model.parameters[2]


def test_scales_are_told_by_stages():
    cut = CONFIG.stage_partition(3)
    scales = BranchScales.of_stages([1.0, 0.6, 1 / 3], cut)
    assert scales.attention == scales.feed_forward == (1.0, 0.6, 0.6, 0.6, 1 / 3, 1 / 3)
    assert scales.scales_text(cut) == "by stages 1 0.6 0.333"
