"""Cross-entropy by chunks against the plain one, and what is compiled for it."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig
from skippipe_jax.data.batches import IGNORED_TARGET
from skippipe_jax.models.cross_entropy import Head, cross_entropy, scores
from skippipe_jax.models.footprint import LOGIT_BYTES, MOST_LOGIT_BYTES, tokens_of_chunk
from skippipe_jax.models.node_memory import memory_of_node
from skippipe_jax.runtime.stage_functions import TOTALS, stage_functions

TOKENS, WIDTH, VOCABULARY = 7, 6, 11
Axes = Literal["wv", "vw"]


def random_arrays(axes: Axes, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the head gets, its matrix, and targets, some of which do not count."""
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(TOKENS, WIDTH))
    # Logits that are far apart, and far from 0.
    matrix = random.normal(size=(WIDTH, VOCABULARY), scale=3.0) + 2.0
    targets = random.integers(0, VOCABULARY, TOKENS)
    targets[random.random(TOKENS) < 0.3] = IGNORED_TARGET
    return (
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(matrix if axes == "wv" else matrix.T, jnp.float32),
        jnp.asarray(targets, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def by_chunks(
    hidden: jax.Array, matrix: jax.Array, targets: jax.Array, axes: Axes, z_loss: float, chunk: int
) -> Any:
    """The sums without a gradient; the sums, and the gradient of half of what is minimised."""

    def loss(hidden: jax.Array, matrix: jax.Array) -> Any:
        minimised, *terms = cross_entropy(hidden, Head(matrix, axes), targets, z_loss, chunk)
        return 0.5 * minimised, tuple(terms)

    with_gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return loss(hidden, matrix), with_gradient(hidden, matrix)


@functools.partial(jax.jit, static_argnums=(3, 4))
def at_once(
    hidden: jax.Array, matrix: jax.Array, targets: jax.Array, axes: Axes, z_loss: float
) -> Any:
    """The same from the logits of all tokens."""

    def loss(hidden: jax.Array, matrix: jax.Array) -> Any:
        logits = hidden @ (matrix if axes == "wv" else matrix.T)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
        counted, log_z = targets >= 0, jax.nn.logsumexp(logits, axis=-1)
        of_z = z_loss * jnp.sum(jnp.where(counted, log_z**2, 0.0))
        nats = jnp.sum(jnp.where(counted, nats, 0.0))
        return 0.5 * (nats + of_z), (nats, of_z)

    with_gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, matrix)
    return with_gradient[0], with_gradient


# Few kinds of program, each of which is compiled once, for many arrays.
@settings(max_examples=30)
@given(
    st.sampled_from([1, 3, TOKENS, TOKENS + 2]),
    st.sampled_from([("wv", 0.0), ("vw", 0.3)]),
    st.integers(0, 2**31),
)
def test_chunks_say_what_all_logits_at_once_do(chunk: int, kind: tuple[Axes, float], seed: int):
    axes, z_loss = kind
    arrays = random_arrays(axes, seed)
    found, expected = by_chunks(*arrays, axes, z_loss, chunk), at_once(*arrays, axes, z_loss)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, TOKENS])
def test_scores_are_those_of_all_logits_at_once(chunk: int):
    hidden, matrix, targets = random_arrays("wv", seed=3)
    best = jnp.argmax(hidden @ matrix, axis=-1)
    targets = targets.at[:2].set(jnp.array([best[0], IGNORED_TARGET]))
    nats, likeliest = scores(hidden, Head(matrix, "wv"), targets, chunk)
    (_, (total, _)), _ = at_once(hidden, matrix, targets, "wv", 0.0)
    np.testing.assert_allclose(jnp.sum(nats), total, rtol=1e-5)
    np.testing.assert_array_equal(likeliest, (best == targets) | (targets < 0))
    assert not jnp.all(likeliest)


def test_gradients_have_the_dtypes_of_what_they_are_of():
    hidden, matrix, targets = random_arrays("wv", seed=0)

    def gradients(dtype: Any, chunk: int) -> Any:
        def loss(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
            return cross_entropy(hidden, Head(matrix, "wv"), targets, 0.0, chunk)[0]

        return jax.grad(loss, argnums=(0, 1))(hidden.astype(dtype), matrix)

    exact, rounded = gradients("float32", TOKENS), gradients("bfloat16", 3)
    assert [leaf.dtype for leaf in rounded] == [jnp.bfloat16, jnp.float32]
    for one, other in zip(rounded, exact, strict=True):
        assert 0 < np.abs(one.astype(jnp.float32) - other).max() < 0.05 * np.abs(other).max()


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk"),
    [(4096, 128_256, 1024), (4096, 32_000, 4096), (2048, 259, 2048), (4099, 128_256, 1025)],
)
def test_chunks_are_few_alike_and_bounded(tokens: int, vocabulary: int, chunk: int):
    assert tokens_of_chunk(tokens, vocabulary) == chunk
    assert chunk * vocabulary * LOGIT_BYTES <= MOST_LOGIT_BYTES


def test_a_vocabulary_beyond_all_bounds_is_taken_token_by_token():
    assert tokens_of_chunk(5, MOST_LOGIT_BYTES) == 1


# What is compiled, for a vocabulary and a microbatch as large as those of Llama 3.

MANY_TOKENS, LARGE, CHUNK = 4096, 128_256, 1024
NARROW = 16


def data_stage(compute_dtype: str, tied: bool) -> Config:
    return Config(
        model=ModelConfig(
            vocabulary_size=LARGE,
            width=NARROW,
            layers=1,
            heads=2,
            kv_heads=1,
            ffn_width=24,
            context=MANY_TOKENS,
            tied_head=tied,
            compute_dtype=compute_dtype,
        ),
        data=DataConfig(sequence_length=MANY_TOKENS, microbatch_size=1),
    )


def lowered(config: Config) -> dict[str, Any]:
    """The loss with its gradient, and the validation loss."""
    functions = stage_functions(config.model, OptimizerConfig(), 1, True, 1, MANY_TOKENS)
    shape = jax.ShapeDtypeStruct
    parameters, _, gradients = jax.eval_shape(functions.create, jax.random.key(0), 0)
    x = shape((1, MANY_TOKENS, NARROW), config.model.compute_dtype)
    totals, gauge = shape((TOTALS,), jnp.float32), shape((2,), jnp.int32)
    targets = shape((1, MANY_TOKENS), jnp.int32)
    loss: Any = functions.loss
    held_out: Any = functions.held_out
    return {
        "loss": loss.lower(parameters, gradients, totals, gauge, x, targets),
        "held out": held_out.lower(parameters, x, targets),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_multiplies_in_the_compute_dtype_forward_and_backward(tied: bool):
    """As it is lowered: a processor then computes bfloat16 in float32 itself."""
    text = lowered(data_stage("bfloat16", tied))["loss"].as_text()
    product = re.compile(r"stablehlo\.dot_general .* : \((\S+), (\S+)\) -> (\S+)$", re.M)
    products = product.findall(text)
    assert len(products) == 3
    for left, right, result in products:
        assert left.endswith("xbf16>")
        assert right.endswith("xbf16>")
        assert result.endswith("xf32>")
        assert any(f"{LARGE}x" in shape for shape in (left, right, result))


@pytest.mark.parametrize("tied", [False, True])
def test_no_array_of_all_logits_is_compiled(tied: bool):
    config = data_stage("float32", tied)
    node = memory_of_node(config, 1, is_data_stage=True, replicas=1, in_flight=1, under_way=1)
    for name, program in lowered(config).items():
        compiled = program.compile()
        shapes = re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
        sizes = (math.prod(int(axis) for axis in shape.split(",")) for shape in shapes)
        assert max(sizes) == CHUNK * LARGE, name
        made = compiled.memory_analysis().temp_size_in_bytes
        assert 0.45 * node.working < made < 1.1 * node.working, name
