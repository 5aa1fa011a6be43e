"""Rounding to fewer bytes: parameters and moments to bfloat16, and arrays in hops to int8.

Rounding to bfloat16 is stochastic, and unbiased in the mean. bfloat16 separates numbers that differ
by 1 in 128 at best. Most updates are smaller, so rounding to the nearest would lose them in every
step. The random bits depend only on the seed, the number of updates, the name of the array and the
index of the block in the whole model. Replicas therefore agree under any stage partition and on any
device.

In int8, each group of numbers has one scale, by which it is divided.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import (
    Array,
    BFloat16,
    Float,
    Float32,
    Int8,
    PRNGKeyArray,
    PyTree,
    ScalarLike,
    Shaped,
    UInt32,
)
from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE

LARGEST = 127
"""Largest number in int8; the smallest is its negative."""

RoundingSeed = UInt32[np.ndarray, "2"] | UInt32[Array, "2"]
"""Seed of the run, and number of a stage's first block."""


def rounds_stochastically(*trees: PyTree) -> bool:
    """Return whether some array in the trees is bfloat16, and thus rounded stochastically."""
    return any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(trees))


def widened(tree: PyTree) -> PyTree:
    """Convert the bfloat16 arrays of a tree to float32, for updates."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree
    )


def rounded_like(tree: PyTree, like: PyTree, draw: RoundingSeed, count: ScalarLike) -> PyTree:
    """Round the result of update number `count`: each array to its dtype in `like`."""
    seed, first_layer = draw[0], draw[1]
    key = jax.random.fold_in(jax.random.key(seed), count)

    def rounded(path: tuple[Any, ...], wide: Array, held: Array) -> Array:
        if wide.dtype == held.dtype:
            return wide
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        of_array = jax.random.fold_in(key, zlib.crc32(name.encode()))
        if "blocks" not in name.split("/"):
            return to_bfloat16(wide, of_array)
        layers = first_layer + jnp.arange(wide.shape[0], dtype=jnp.uint32)
        of_layers = jax.vmap(jax.random.fold_in, (None, 0))(of_array, layers)
        return jax.vmap(to_bfloat16)(wide, of_layers)

    return jax.tree_util.tree_map_with_path(rounded, tree, like)


def to_bfloat16(numbers: Float32[Array, "*shape"], key: PRNGKeyArray) -> BFloat16[Array, "*shape"]:
    """Round each number stochastically up or down to bfloat16, unbiased in the mean.

    bfloat16 is the upper half of a float32. Random bits are added to the lower half; a carry rounds
    up. Infinities and NaN are unchanged.
    """
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    carried = bits + jax.random.bits(key, numbers.shape, jnp.uint16)
    upper = jax.lax.bitcast_convert_type(carried >> 16 << 16, jnp.float32)
    return jnp.where(jnp.isfinite(numbers), upper, numbers).astype(jnp.bfloat16)


def grouped(numbers: Shaped[Array, "*batch numbers"]) -> Shaped[Array, "*batch groups 128"]:
    """Arrange the last axis in groups of one scale each, the last one padded with zeros."""
    beyond = -numbers.shape[-1] % NUMBERS_OF_A_SCALE
    numbers = jnp.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, beyond)])
    return numbers.reshape(*numbers.shape[:-1], -1, NUMBERS_OF_A_SCALE)


def to_int8(
    quotients: Float[Array, "*batch groups 128"], numbers: int
) -> Int8[Array, "*batch numbers"]:
    """Return whole quotients by scales, without the padding behind `numbers` of them."""
    # Rounding errors can carry the largest quotient past 127.
    whole = jnp.clip(quotients, -LARGEST, LARGEST).astype(jnp.int8)
    return whole.reshape(*quotients.shape[:-2], -1)[..., :numbers]


def from_int8(
    quotients: Int8[Array, "*batch numbers"], scales: Float[Array, "*batch groups"]
) -> Float[Array, "*batch numbers"]:
    """Multiply whole quotients by their scales."""
    numbers = grouped(quotients.astype(jnp.float32)) * scales[..., None]
    return numbers.reshape(*quotients.shape[:-1], -1)[..., : quotients.shape[-1]]
