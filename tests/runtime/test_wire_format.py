"""What travels: how far it is from what was computed, what stays exact, how many bytes it has."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from skippipe_jax.config import Config, DataConfig, ModelConfig, NetworkConfig
from skippipe_jax.models.footprint import hop_bytes
from skippipe_jax.runtime.stage_functions import wire_of_run
from skippipe_jax.runtime.wire_format import (
    LARGEST,
    LEAST_SCALE,
    WireFormat,
    scales_of,
)

BATCH, TIME = 2, 3
# One group, several, and some whose last one is smaller.
WIDTHS = [8, 127, 128, 300]
HALF_BFLOAT16 = 2.0**-9
"""The largest share of a number by which rounding it to bfloat16 changes it."""
ALL_BITS = np.uint32(2**31 - 1).view(np.float32)
"""A NaN above which there is none: one more, and its bits are those of a zero."""
DRAW = np.array([3, 1, 4, 1], np.uint32)


def format_of(
    width: int, *, dtype: str = "int8", computed: str = "float32", marks: int = 0, **how: Any
) -> WireFormat:
    shape = jax.ShapeDtypeStruct((BATCH, TIME, width + marks), computed)
    return WireFormat(shape, dtype, width, **how)


def travelled(how: WireFormat, array: Any, draw: Any = DRAW) -> jax.Array:
    return there_and_back(how, array, draw)


@partial(jax.jit, static_argnums=0)
def there_and_back(how: WireFormat, array: jax.Array, draw: jax.Array) -> jax.Array:
    return how.unpack(how.pack(array, draw))


def scale_of_each(numbers: np.ndarray) -> np.ndarray:
    """The scale of each number's group, in which 127 of them hold the largest of the group."""
    scales = np.empty_like(numbers)
    for begin in range(0, numbers.shape[-1], 128):
        group = numbers[..., begin : begin + 128]
        scales[..., begin : begin + 128] = np.abs(group).max(axis=-1, keepdims=True) / LARGEST
    # Rounded up to bfloat16, and not below the least.
    return np.maximum(scales * (1 + 2.0**-7), LEAST_SCALE)


magnitudes = st.sampled_from([1e-38, 1e-20, 1e-3, 1.0, 1e4, 1e30, 2.5e36 * LARGEST])


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    """Activations of any width: of one size, or with a few that outweigh the others."""
    shape = (BATCH, TIME, draw(st.sampled_from(WIDTHS)))
    units = st.floats(-1, 1, width=32)
    found = draw(arrays.arrays(np.float32, shape, elements=units, fill=units))
    return found * np.float32(draw(magnitudes))


@settings(max_examples=30)
@given(numbers(), st.sampled_from(["nearest", "stochastic"]), st.integers(0, 2**32 - 1))
def test_nothing_ends_further_away_than_its_scale_allows(
    given_numbers: np.ndarray, rounding: str, seed: int
):
    how = format_of(given_numbers.shape[-1], rounding=rounding)
    found = np.asarray(travelled(how, given_numbers, np.array([seed, 0, 0, 0], np.uint32)))
    allowed = scale_of_each(given_numbers) * (0.5 if rounding == "nearest" else 1.0)
    # What the quotient and the product round, besides.
    slack = 2.0**-22 * np.abs(given_numbers) + np.finfo(np.float32).tiny
    assert np.all(np.abs(found - given_numbers) <= allowed * (1 + 2.0**-16) + slack)
    assert np.all(found[given_numbers == 0] == 0)
    assert np.all(np.sign(found) * np.sign(given_numbers) >= 0)


def test_a_scale_is_the_next_bfloat16_that_clips_nothing():
    random = np.random.default_rng(0)
    groups = random.normal(size=(2000, 4)).astype(np.float32) * 10.0 ** random.uniform(-30, 30)
    scales = np.asarray(jax.jit(scales_of)(groups))
    exact = np.abs(groups.astype(np.float64)).max(axis=-1) / LARGEST
    assert np.all(scales == scales.astype(jnp.bfloat16).astype(np.float32))
    assert np.all(scales >= exact * (1 - 2.0**-24))
    assert np.all(scales <= exact * (1 + 2.0**-7) * (1 + 2.0**-23))


def test_a_stochastic_rounding_is_right_in_the_mean():
    draws, width = 4000, 256
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(1, 1, width)), jnp.float32)
    how = WireFormat(jax.ShapeDtypeStruct(x.shape, x.dtype), "int8", width, "stochastic")
    keys = np.stack([np.full(draws, 7), *np.mgrid[:10, :20, :20].reshape(3, -1)], axis=-1)
    found = jax.jit(jax.vmap(partial(travelled, how, x)))(keys.astype(np.uint32))
    error = np.asarray(found, np.float64).mean(axis=0) - np.asarray(x, np.float64)
    scales = scale_of_each(np.asarray(x))
    # A number's roundings deviate by half a scale at most, and the mean by root(draws) times less.
    assert np.abs(error / scales).max() < 5 * 0.5 / math.sqrt(draws)
    assert abs((error / scales).mean()) < 5 * 0.5 / math.sqrt(draws * width)
    # Rounding to the nearest is not: all draws of it are one.
    nearest = travelled(format_of(width), jnp.broadcast_to(x, (BATCH, TIME, width)))
    assert np.abs(np.asarray(nearest - x)[0, 0] / scales).max() > 0.4


def test_every_part_of_a_draw_makes_another_rounding():
    how = format_of(256, rounding="stochastic")
    x = jnp.asarray(np.random.default_rng(2).normal(size=how.computed.shape), jnp.float32)
    draws = [DRAW, *(DRAW + np.eye(4, dtype=np.uint32)[part] for part in range(4))]
    found = [np.asarray(travelled(how, x, draw)).tobytes() for draw in draws]
    assert len(set(found)) == 5
    assert np.asarray(travelled(how, x, DRAW)).tobytes() == found[0]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, ALL_BITS])
def test_what_is_not_finite_does_not_become_finite(bad: float, rounding: str):
    how = format_of(300, rounding=rounding)
    x = np.ones(how.computed.shape, np.float32)
    x[0, 1, 200] = bad
    found = np.asarray(travelled(how, jnp.asarray(x)))
    # Its whole group, of that token alone.
    spoilt = np.zeros(x.shape, bool)
    spoilt[0, 1, 128:256] = True
    assert np.array_equal(np.isnan(found), spoilt)
    np.testing.assert_allclose(found[~spoilt], 1.0, rtol=2.0**-7)


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(8, "float32"), (8, "bfloat16"), *((width, "int8") for width in (8, 128, 300))],
)
def test_marks_of_documents_stay_exact(width: int, dtype: str, computed: str):
    how = format_of(width, dtype=dtype, computed=computed, marks=1)
    random = np.random.default_rng(3)
    # So large that a scale for both would round the marks away.
    x = np.concatenate(
        [1e4 * random.normal(size=(BATCH, TIME, width)), random.integers(0, 2, (BATCH, TIME, 1))],
        axis=-1,
    )
    found = travelled(how, jnp.asarray(x, computed))
    assert (found.shape, found.dtype) == (how.computed.shape, how.computed.dtype)
    assert np.array_equal(np.asarray(found[..., width], np.float32), x[..., width])
    allowed = {"float32": 0.0, "bfloat16": HALF_BFLOAT16, "int8": 0.5 / LARGEST * (1 + 2.0**-6)}
    error = np.abs(np.asarray(found, np.float32) - np.asarray(jnp.asarray(x, computed), np.float32))
    # bfloat16 is what int8 is unpacked to, too, where it is computed with.
    rounded = HALF_BFLOAT16 * (computed == "bfloat16")
    assert np.all(error <= np.abs(x).max() * (allowed[dtype] + rounded))


def test_an_array_that_has_not_travelled_stays_as_it_is():
    for how in (format_of(8, dtype="bfloat16"), format_of(8)):
        x = jnp.asarray(np.random.default_rng(4).normal(size=how.computed.shape), jnp.float32)
        assert np.array_equal(how.unpack(x), x)


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize(("width", "compute_dtype"), [(8, "float32"), (300, "bfloat16")])
@pytest.mark.parametrize(
    ("activation_dtype", "gradient_dtype"),
    [(None, None), ("bfloat16", None), ("int8", None), ("int8", "bfloat16"), (None, "int8")],
)
def test_bytes_of_a_hop_are_those_of_the_formula(
    activation_dtype: str | None,
    gradient_dtype: str | None,
    compute_dtype: str,
    width: int,
    packing: str,
):
    network = NetworkConfig(activation_dtype=activation_dtype, gradient_dtype=gradient_dtype)
    model = ModelConfig(width=width, heads=2, kv_heads=2, compute_dtype=compute_dtype)
    config = Config(
        model=model,
        data=DataConfig(microbatch_size=BATCH, sequence_length=TIME, packing=packing),
        network=network,
    )
    wire, size = wire_of_run(config), hop_bytes(config)
    found = [how.travelling for how in (wire.activations, wire.gradients)]
    assert [a.size * a.dtype.itemsize for a in found] == [size.activation, size.gradient]
    groups, marks = {8: 1, 300: 3}[width], packing == "documents"
    if activation_dtype == "int8":
        assert size.activation == BATCH * TIME * (width + marks + 2 * groups)
