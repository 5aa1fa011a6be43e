"""The parts of the model, and how it is cut; `tests/interop` holds the whole against others'."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from skippipe_sched.errors import InputError

from skippipe_jax.config import PRESETS, ModelConfig, RopeScaling
from skippipe_jax.models.llama import (
    DataStage,
    RMSNorm,
    parameter_count,
    stage_shapes,
)

BATCH, TIME = 2, 12
SMALL = ModelConfig(
    vocabulary_size=259, width=16, layers=4, heads=4, kv_heads=2, ffn_width=24, context=32
)
RANDOM = np.random.default_rng(1)
FIRST_STATE = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def draw_as_ever() -> None:
    """Have a test draw the same whichever others ran before it, also of other modules."""
    RANDOM.bit_generator.state = FIRST_STATE


@functools.partial(nnx.jit, static_argnums=(0, 1))
def created(config: ModelConfig, layers: int, first_layer: int, key: jax.Array) -> DataStage:
    """A data stage as a run creates it."""
    return DataStage(config, layers, first_layer, key)


Module = TypeVar("Module", bound=nnx.Module)


def random_module(create: Callable[[], Module]) -> Module:
    """A module with parameters so large, scales too, that whatever is left out shows."""
    structure, shapes = nnx.split(nnx.eval_shape(create))

    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(RANDOM.normal(scale=0.4, size=shape.shape), shape.dtype)

    return nnx.merge(structure, jax.tree.map(drawn, shapes))


def whole_model(config: ModelConfig) -> DataStage:
    """All layers in one stage."""
    return random_module(lambda: DataStage(config, config.layers, 0, jax.random.key(0)))


@nnx.jit
def outputs_of(model: DataStage, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The residual stream after all layers, and the logits."""
    x = model(tokens)
    return x, model.logits(x)


def logits_of(model: DataStage, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(outputs_of(model, jnp.asarray(tokens))[1])


def random_tokens(config: ModelConfig) -> np.ndarray:
    return RANDOM.integers(0, config.vocabulary_size, (BATCH, TIME), dtype=np.int32)


def naive_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + epsilon) * scale


def test_norm_divides_by_the_root_of_the_mean_square():
    norm = RMSNorm(dataclasses.replace(SMALL, norm_epsilon=0.1))
    norm.scale[...] = jnp.arange(16.0)
    x = RANDOM.normal(size=(3, 5, 16)).astype(np.float32)
    np.testing.assert_allclose(norm(jnp.asarray(x)), naive_norm(x, np.arange(16.0), 0.1), rtol=1e-5)


def test_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(RANDOM.normal(size=(4, 16)) * 100, jnp.bfloat16)
    exact = naive_norm(np.asarray(x, np.float64), np.ones(16), SMALL.norm_epsilon)
    result = RMSNorm(SMALL)(x)
    assert result.dtype == jnp.bfloat16
    # One rounding of the result: half of the 8 bits of a bfloat16.
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=2**-8)


def test_loss_is_the_sum_over_targets_that_count():
    model, tokens = whole_model(SMALL), random_tokens(SMALL)
    targets = random_tokens(SMALL)
    targets[0, 3:] = -1
    x, logits = outputs_of(model, jnp.asarray(tokens))
    logits = np.asarray(logits, np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    counted = [(b, t) for b in range(BATCH) for t in range(TIME) if targets[b, t] >= 0]
    nats, count = model.loss(x, jnp.asarray(targets))
    assert count == len(counted) == TIME + 3
    expected = -sum(math.log(chances[b, t, targets[b, t]]) for b, t in counted)
    np.testing.assert_allclose(nats, expected, rtol=1e-5)


def test_a_new_model_guesses():
    config = dataclasses.replace(SMALL, initial_deviation=0.02)
    model = created(config, 2, 0, jax.random.key(3))
    x, _ = outputs_of(model, jnp.asarray(random_tokens(SMALL)))
    nats, count = model.loss(x, jnp.asarray(random_tokens(SMALL)))
    assert abs(float(nats / count) - math.log(SMALL.vocabulary_size)) < 0.05
    usual = created(SMALL, 2, 0, jax.random.key(3))
    for own, deviation in ((model, 0.02), (usual, SMALL.width**-0.5)):
        for matrix in (own.embedding, own.head.kernel, own.blocks.query.kernel):
            assert float(np.std(matrix[...])) == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize(
    ("preset", "layer", "total"),
    [
        ("tiny", 803_328, 4 * 803_328 + 2 * 259 * 256 + 256),
        ("500m", 16_779_264, 24 * 16_779_264 + 2 * 32_000 * 1024 + 1024),
        ("1.5b", 67_112_960, 24 * 67_112_960 + 2 * 32_000 * 2048 + 2048),
        ("8b", 218_112_000, 8_030_261_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, layer: int, total: int):
    config = ModelConfig(preset=preset, **PRESETS[preset])
    shapes = stage_shapes(config, 4)
    assert parameter_count(shapes[1]) == layer * config.layers // 4
    assert parameter_count(shapes) == total


def test_parameters_do_not_depend_on_the_cut():
    key = jax.random.key(3)
    # A whole stage of a data node is its own blocks and more, so data stages can stand for all.
    layers_of = {
        size: [
            nnx.to_pure_dict(nnx.state(created(SMALL, size, first, key)))
            for first in range(0, 4, size)
        ]
        for size in (1, 2)
    }
    for layer in range(4):
        single, half = layers_of[1][layer], layers_of[2][layer // 2]
        own = jax.tree.map(lambda leaf, layer=layer: leaf[layer % 2], half["blocks"])
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), single["blocks"], own)
        np.testing.assert_array_equal(single["embedding"], half["embedding"])
        np.testing.assert_array_equal(single["head"]["kernel"], half["head"]["kernel"])
    queries = [np.asarray(state["blocks"]["query"]["kernel"][0]) for state in layers_of[1]]
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(queries, 2))


def test_depth_does_not_grow_the_traced_program():
    def equations(layers: int) -> int:
        config = dataclasses.replace(SMALL, layers=layers)
        structure, parameters = nnx.split(whole_model(config))

        def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
            model: DataStage = nnx.merge(structure, parameters)
            return model.loss(model(tokens), tokens)[0]

        traced = jax.make_jaxpr(jax.grad(loss))(parameters, random_tokens(config))
        return str(traced).count(" = ")

    assert equations(2) == equations(12) > 100


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
    config = dataclasses.replace(SMALL, compute_dtype="bfloat16")
    model = whole_model(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    tokens = random_tokens(config)
    x, rounded = outputs_of(model, jnp.asarray(tokens))
    assert x.dtype == jnp.bfloat16
    assert rounded.dtype == jnp.float32
    full = logits_of(nnx.merge(nnx.graphdef(whole_model(SMALL)), nnx.state(model)), tokens)
    assert 0 < np.abs(rounded - full).max() < 0.02 * np.abs(full).max() + 0.01


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("model.heads", {"width": 10, "heads": 4}),
        ("model.heads", {"width": 12, "heads": 4}),  # heads of width 3, which has no halves
        ("model.kv_heads", {"kv_heads": 3}),
        ("model.layers", {"layers": 0}),
        ("model.context", {"context": 0}),
        ("model.norm_epsilon", {"norm_epsilon": 0.0}),
        ("model.rope_theta", {"rope_theta": -1.0}),
        ("model.recompute", {"recompute": "all"}),
        ("model.compute_dtype", {"compute_dtype": "int8"}),
        ("model.attention", {"attention": "flash"}),
    ],
)
def test_shapes_that_fit_no_model_are_refused(field: str, shape: dict[str, Any]):
    with pytest.raises(InputError) as caught:
        dataclasses.replace(SMALL, **shape)
    assert caught.value.field == field


def test_scaling_that_divides_by_zero_is_refused():
    with pytest.raises(InputError, match=r"rope_scaling\.high_frequency_factor = 1\.0"):
        RopeScaling(low_frequency_factor=1.0, high_frequency_factor=1.0)
    with pytest.raises(InputError, match=r"rope_scaling\.factor = 0"):
        RopeScaling(factor=0.0)


@pytest.mark.parametrize(
    ("given", "stages", "layers"),
    [(None, 2, (2, 2)), (None, 4, (1, 1, 1, 1)), ((1, 3), 2, (1, 3))],
)
def test_layers_spread_over_stages(given: Any, stages: int, layers: tuple[int, ...]):
    assert dataclasses.replace(SMALL, stage_layers=given).stage_partition(stages) == layers


@pytest.mark.parametrize(
    ("field", "given", "stages"),
    [
        ("model.layers", None, 3),
        ("model.stage_layers", (2, 2), 3),
        ("model.stage_layers", (2, 1), 2),
        ("model.stage_layers", (4, 0), 2),
    ],
)
def test_layers_that_do_not_spread_are_refused(field: str, given: Any, stages: int):
    with pytest.raises(InputError) as caught:
        dataclasses.replace(SMALL, stage_layers=given).stage_partition(stages)
    assert caught.value.field == field
