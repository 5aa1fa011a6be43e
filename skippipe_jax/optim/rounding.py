"""Parameters and moments in bfloat16, rounded up or down by chance so that the mean is exact.

bfloat16 tells numbers apart that differ by 1 in 128 at best, and most updates are smaller than
that: rounded to the nearest, they would be lost, again and again. What is drawn depends on the
seed, on how many updates were made, on the array's name and on the block's place in the whole
model, and on nothing else: so replicas agree, under any cut and on any device.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float32, PRNGKeyArray, PyTree, ScalarLike, UInt32

Draw = UInt32[np.ndarray, "2"] | UInt32[Array, "2"]
"""The seed of the run, and the number of a stage's first block."""


def rounds(*trees: PyTree) -> bool:
    """Tell whether some numbers in trees are held so coarsely that they are rounded by chance."""
    return any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(trees))


def widened(tree: PyTree) -> PyTree:
    """Convert to float32 what is held in bfloat16, for updates."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree
    )


def rounded_like(tree: PyTree, like: PyTree, draw: Draw, count: ScalarLike) -> PyTree:
    """Round an update, number `count`, to what is held: each array in its dtype of `like`."""
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
    """Round each number up or down to bfloat16, by chance in proportion to how near they are.

    bfloat16 is the upper half of a float32. What is drawn is added to the lower half, and carries
    over as often as that says. Infinities and NaN stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    carried = bits + jax.random.bits(key, numbers.shape, jnp.uint16)
    upper = jax.lax.bitcast_convert_type(carried >> 16 << 16, jnp.float32)
    return jnp.where(jnp.isfinite(numbers), upper, numbers).astype(jnp.bfloat16)
