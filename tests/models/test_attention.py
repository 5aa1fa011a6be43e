"""Every way to compute attention gives what all scores at once give, and holds less of them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.config import ModelConfig, parse_config
from skippipe_jax.config.model import SHORT
from skippipe_jax.models.attention import attend, block_of, blockwise, implementation_of, splash

LONG = 2048


@st.composite
def inputs(draw: st.DrawFn, step: int = 1, width_step: int = 2) -> tuple[Any, ...]:
    """Queries, keys, values, where documents begin or None, and a cotangent."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch, length = draw(st.integers(1, 2)), step * draw(st.integers(1, 40 // (1 + step // 40)))
    width = width_step * draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(random.normal(size=(batch, length, heads, width)), jnp.float32)

    documents = None
    if draw(st.booleans()):
        begins = random.random((batch, length)) < draw(st.floats(0, 0.5))
        places = np.where(begins, np.arange(length), 0)
        documents = jnp.asarray(np.maximum.accumulate(places, axis=1), jnp.int32)
    heads = kv_heads * group
    cotangent = normal(heads).reshape(batch, length, -1)
    return normal(heads), normal(kv_heads), normal(kv_heads), documents, cotangent


def with_gradients(function: Any, arrays: tuple[Any, ...]) -> list[jax.Array]:
    *given_arrays, documents, cotangent = arrays
    out, vjp = jax.vjp(lambda *own: function(*own, documents), *given_arrays)
    return [out, *vjp(cotangent)]


# Several times as quick, but XLA may compute a product of bfloat16 in float32.
compiled = jax.jit(with_gradients, static_argnums=0)


def plain(query: Any, key: Any, value: Any, documents: Any) -> jax.Array:
    return attend(query, key, value, documents, "xla")


@settings(max_examples=2)
@given(inputs(), st.integers(1, 17))
def test_blocks_give_what_all_scores_give(arrays: tuple[Any, ...], block: int):
    expected = compiled(plain, arrays)
    found = compiled(lambda *own: blockwise(*own, block), arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@settings(max_examples=2)
@given(inputs(step=128, width_step=128))
def test_the_kernel_of_tpus_gives_what_all_scores_give(arrays: tuple[Any, ...]):
    expected = compiled(plain, arrays)
    found = compiled(lambda *own: splash(*own, interpret=True), arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("is_packed", [False, True])
def test_blocks_in_bfloat16_are_as_close_as_all_scores(is_packed: bool):
    random = np.random.default_rng(7)
    shape = (2, 700, 4, 16)
    arrays = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(3)]
    arrays.append(jnp.asarray(random.normal(size=(2, 700, 64)), jnp.bfloat16))
    documents = jnp.asarray(np.arange(700)[None] // 190 * 190 + np.zeros((2, 1)), jnp.int32)
    given_documents = documents if is_packed else None
    wide = [array.astype(jnp.float32) for array in arrays]
    exact = with_gradients(plain, (*wide[:3], given_documents, wide[3]))
    usual = with_gradients(plain, (*arrays[:3], given_documents, arrays[3]))
    found = with_gradients(blockwise, (*arrays[:3], given_documents, arrays[3]))
    for one, other, best in zip(found, usual, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        own, usually = (float(jnp.linalg.norm(x - best)) for x in (one, other))
        assert own < 1.2 * usually


def largest_buffer(length: int, function: Any) -> int:
    """Numbers in the largest array of the compiled gradient of attention."""
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    documents = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(query: Any, key: Any, value: Any, documents: Any) -> jax.Array:
        return jnp.sum(function(query, key, value, documents) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, documents).compile()
    shapes = re.findall(r"\b(?:f32|s32|pred|bf16|u32|s8)\[([\d,]+)\]", compiled.as_text() or "")
    return max(int(np.prod([int(size) for size in found.split(",")])) for found in shapes)


def test_nothing_grows_with_the_square_of_time():
    block = block_of("cpu")
    lengths = [times * block for times in (4, 32)]
    sizes = [largest_buffer(length, blockwise) for length in lengths]
    # A square of scores, and arrays of all tokens.
    assert sizes == [max(2 * block**2, 2 * 16 * length) for length in lengths]
    assert largest_buffer(lengths[-1], plain) >= 2 * lengths[-1] ** 2


@pytest.mark.parametrize(
    ("platform", "length", "changes", "expected"),
    [
        ("cpu", SHORT, {}, "xla"),
        ("cpu", SHORT + 1, {}, "blockwise"),
        ("cpu", LONG, {"attention": "xla"}, "xla"),
        ("gpu", LONG, {}, "blockwise"),
        ("gpu", LONG, {"compute_dtype": "bfloat16"}, "cudnn"),
        ("gpu", LONG, {"compute_dtype": "bfloat16", "width": 1024}, "blockwise"),
        ("tpu", LONG, {}, "blockwise"),
        ("tpu", LONG, {"width": 512}, "splash"),
        ("tpu", LONG + 1, {"width": 512}, "blockwise"),
        ("rocm", LONG, {"compute_dtype": "bfloat16"}, "blockwise"),
    ],
)
def test_auto_is_what_the_device_has(
    platform: str, length: int, changes: dict[str, Any], expected: str
):
    assert implementation_of(ModelConfig(**changes), length, platform) == expected


@pytest.mark.parametrize(
    ("model", "data", "problem"),
    [
        ({"attention": "cudnn"}, {}, "float32"),
        ({"attention": "cudnn", "compute_dtype": "bfloat16", "width": 1024}, {}, "up to 128"),
        ({"attention": "splash", "width": 512}, {"sequence_length": 250}, "multiple of 128"),
        ({"attention": "splash"}, {"sequence_length": 256}, "head width that is a multiple of 128"),
        ({"attention": "flash"}, {}, "auto, xla, blockwise, cudnn, splash"),
    ],
)
def test_what_does_not_fit_is_refused(model: dict[str, Any], data: dict[str, Any], problem: str):
    with pytest.raises(InputError, match=problem) as refused:
        parse_config({"model": model, "data": data})
    assert refused.value.field == "model.attention"
