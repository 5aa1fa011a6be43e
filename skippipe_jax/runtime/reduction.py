"""Sums of trees of arrays over the replicas of a stage, or over one device of each host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skippipe_jax.models.sharding import AXES
from skippipe_jax.runtime.node_sharding import NodeSharding

Tree = TypeVar("Tree")
AXIS = "replica"


def sum_over_nodes(
    shardings: Sequence[NodeSharding], local: Mapping[NodeSharding, Tree]
) -> dict[NodeSharding, Tree]:
    """Sum one tree per node, on every node, by a jitted collective.

    `local` has the trees of this process's nodes, sharded over their meshes; they may be donated.
    The processes of all nodes call this with the same nodes in the same order. Every node gets the
    same bits. Nodes with equal meshes on distinct devices sum each shard in place. All other nodes
    must belong to one process, where one device sums whole trees. The tree of a single node is
    returned unchanged.
    """
    if len(shardings) == 1:
        return dict(local)
    devices = [device for sharding in shardings for device in sharding.devices]
    if len({own.shape for own in shardings}) == 1 and len(set(devices)) == len(devices):
        return _sum_over_meshes(tuple(shardings), local)
    first = shardings[0].first
    whole = sum_of_trees([jax.device_put(tree, first) for tree in local.values()])
    return {own: own.put(whole, may_alias=False) for own in local}


@jax.jit
def sum_of_trees(trees: Sequence[Tree]) -> Tree:
    """Sum trees of arrays on one node, in their order."""
    return jax.tree.map(lambda first, *others: sum(others, start=first), *trees)


def _sum_over_meshes(
    shardings: tuple[NodeSharding, ...], local: Mapping[NodeSharding, Tree]
) -> dict[NodeSharding, Tree]:
    mesh = _mesh_of_meshes(shardings)
    [like, *_] = local.values()
    leaves, structure = jax.tree.flatten(like)
    specs = tuple(map(_spec, leaves))
    trees = [
        structure.flatten_up_to(local[sharding]) for sharding in shardings if sharding in local
    ]

    def joined(spec: PartitionSpec, *parts: jax.Array) -> jax.Array:
        # The shards of all nodes, end to end, form one array without any copy.
        shape = (len(shardings) * parts[0].shape[0], *parts[0].shape[1:])
        split = NamedSharding(mesh, _of_all(spec))
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, split, shards)

    summed = _sum_of_rows(mesh, specs)(list(map(joined, specs, *trees)))

    def part_on(sharding: NodeSharding, leaf: jax.Array, array: jax.Array) -> jax.Array:
        own = [s.data for s in array.addressable_shards if s.device in sharding.devices]
        if sharding.mesh is None or not isinstance(leaf.sharding, NamedSharding):
            return own[0]
        here = NamedSharding(sharding.mesh, leaf.sharding.spec)
        return jax.make_array_from_single_device_arrays(array.shape, here, own)

    return {
        sharding: structure.unflatten(
            part_on(sharding, leaf, array) for leaf, array in zip(leaves, summed, strict=True)
        )
        for sharding in local
    }


def _spec(leaf: jax.Array) -> PartitionSpec:
    """Return the partition of an array, axis by axis: none on one device."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    return PartitionSpec(*spec, *[None] * (leaf.ndim - len(spec)))


def _of_all(spec: PartitionSpec) -> PartitionSpec:
    """Return the partition of the arrays of all nodes, end to end."""
    first, *others = spec
    within = () if first is None else first if isinstance(first, tuple) else (first,)
    return PartitionSpec((AXIS, *within), *others)


@functools.cache
def _mesh_of_meshes(shardings: tuple[NodeSharding, ...]) -> Mesh:
    grids = [np.array(sharding.devices).reshape(astuple(sharding.shape)) for sharding in shardings]
    return Mesh(np.stack(grids), (AXIS, *AXES))


@functools.cache
def _sum_of_rows(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[[Any], Any]:
    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(list(map(_of_all, specs)),),
        out_specs=list(specs),
        check_vma=False,
    )
    def summed(arrays: list[jax.Array]) -> list[jax.Array]:
        return jax.lax.psum(arrays, AXIS)

    return summed
