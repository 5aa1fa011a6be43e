"""Gradients sharded over a mesh, as rows of numbers: each device has a row with its shards.

An array that is replicated along an axis of the mesh is in the rows of all devices along it. No
data moves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, PyTree

from skippipe_jax.models.sharding import specs
from skippipe_jax.runtime.spread import ROWS, NodeSharding, named

Rows = Float[Array, "devices numbers"]


def cut_rows(tree: PyTree, here: NodeSharding, blocks: int, length: int) -> list[Rows]:
    """Cut a tree sharded over `here` into blocks of `length` columns and a row for each device."""
    assert here.mesh is not None, "the node has no mesh"
    leaves, structure = jax.tree.flatten(_described(tree))
    return _cutting(here.mesh, structure, tuple(leaves), blocks, length)(tree)


def joined_rows(blocks: Sequence[Rows], here: NodeSharding, like: PyTree) -> PyTree:
    """Join the blocks of rows to a tree with the shapes of `like`, in float32."""
    assert here.mesh is not None, "the node has no mesh"
    leaves, structure = jax.tree.flatten(_described(like))
    return _joining(here.mesh, structure, tuple(leaves), len(blocks))(list(blocks))


def blocks_of(tree: PyTree, blocks: int, length: int) -> list[Float[Array, " length"]]:
    """Cut the numbers of a tree into blocks of one `length`, the last padded with zeros."""
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])
    flat = jnp.pad(flat, (0, blocks * length - flat.size))
    return [flat[block * length : (block + 1) * length] for block in range(blocks)]


def joined_blocks(
    blocks: Sequence[Float[Array, " length"]], shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Join the blocks to arrays of these shapes, in float32."""
    flat = jnp.concatenate(blocks).astype(jnp.float32)
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    return [
        flat[start : start + math.prod(shape)].reshape(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]


def _described(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@functools.cache
def _cutting(
    mesh: Mesh,
    structure: jax.tree_util.PyTreeDef,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    blocks: int,
    length: int,
) -> Callable[[PyTree], list[Rows]]:
    def of_device(tree: PyTree) -> list[Rows]:
        return [block[None] for block in blocks_of(tree, blocks, length)]

    lies = specs(jax.tree.unflatten(structure, leaves))
    cut = jax.shard_map(
        of_device, mesh=mesh, in_specs=(lies,), out_specs=[ROWS] * blocks, check_vma=False
    )
    return jax.jit(cut, out_shardings=[NamedSharding(mesh, ROWS)] * blocks)


@functools.cache
def _joining(
    mesh: Mesh,
    structure: jax.tree_util.PyTreeDef,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    blocks: int,
) -> Callable[[list[Rows]], PyTree]:
    lies = specs(jax.tree.unflatten(structure, leaves))
    shards = [
        NamedSharding(mesh, spec).shard_shape(leaf.shape)
        for leaf, spec in zip(leaves, structure.flatten_up_to(lies), strict=True)
    ]

    def of_device(own: list[Rows]) -> PyTree:
        parts = joined_blocks([block[0] for block in own], shards)
        return jax.tree.unflatten(structure, parts)

    joined = jax.shard_map(
        of_device, mesh=mesh, in_specs=([ROWS] * blocks,), out_specs=lies, check_vma=False
    )
    return jax.jit(joined, out_shardings=named(mesh, lies))
