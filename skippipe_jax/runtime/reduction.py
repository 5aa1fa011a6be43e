"""Summing trees of arrays over devices: the replicas of a stage, or one device of each host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skippipe_jax.models.sharding import AXES
from skippipe_jax.runtime.spread import Spread

Tree = TypeVar("Tree")
AXIS = "replica"


def sum_over_nodes(spreads: Sequence[Spread], local: Mapping[Spread, Tree]) -> dict[Spread, Tree]:
    """Sum one tree per node, on every node; by `sum_over_devices` where each has one.

    `local` holds the trees of those that belong to this process, cut over their meshes. Nodes of
    equal meshes on devices of their own add up each device's part where it is; all others must be
    of one process, where one device adds up the whole.
    """
    if len(spreads) == 1:
        return dict(local)
    if all(spread.mesh is None for spread in spreads):
        devices = [spread.devices[0] for spread in spreads]
        summed = sum_over_devices(devices, {own.devices[0]: tree for own, tree in local.items()})
        return {own: summed[own.devices[0]] for own in local}
    devices = [device for spread in spreads for device in spread.devices]
    shapes = {None if own.mesh is None else own.mesh.devices.shape for own in spreads}
    if len(shapes) == 1 and len(set(devices)) == len(devices):
        return _sum_over_meshes(tuple(spreads), local)
    first = spreads[0].first
    whole = _sum_of_whole([jax.device_put(tree, first) for tree in local.values()])
    return {own: own.put(whole, may_alias=False) for own in local}


@jax.jit
def _sum_of_whole(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda first, *others: sum(others, start=first), *trees)


def _sum_over_meshes(
    spreads: tuple[Spread, ...], local: Mapping[Spread, Tree]
) -> dict[Spread, Tree]:
    mesh = _mesh_of_meshes(spreads)
    [like, *_] = local.values()
    leaves, structure = jax.tree.flatten(like)
    specs = tuple(_padded(leaf.sharding.spec, leaf.ndim) for leaf in leaves)
    trees = [structure.flatten_up_to(local[spread]) for spread in spreads if spread in local]

    def joined(spec: PartitionSpec, *parts: jax.Array) -> jax.Array:
        # The parts of all nodes, end to end, are one array; no data moves to make it.
        shape = (len(spreads) * parts[0].shape[0], *parts[0].shape[1:])
        split = NamedSharding(mesh, _of_all(spec))
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, split, shards)

    summed = _sum_of_rows(mesh, specs)(list(map(joined, specs, *trees)))

    def part_on(spread: Spread, spec: PartitionSpec, array: jax.Array) -> jax.Array:
        assert spread.mesh is not None, "all have one"
        own = [s.data for s in array.addressable_shards if s.device in spread.devices]
        here = NamedSharding(spread.mesh, spec)
        return jax.make_array_from_single_device_arrays(array.shape, here, own)

    return {
        spread: structure.unflatten(
            part_on(spread, leaf.sharding.spec, array)
            for leaf, array in zip(leaves, summed, strict=True)
        )
        for spread in local
    }


def _padded(spec: PartitionSpec, dimensions: int) -> PartitionSpec:
    return PartitionSpec(*spec, *[None] * (dimensions - len(spec)))


def _of_all(spec: PartitionSpec) -> PartitionSpec:
    """Return how the arrays of all nodes are cut, end to end."""
    first, *others = spec
    within = () if first is None else first if isinstance(first, tuple) else (first,)
    return PartitionSpec((AXIS, *within), *others)


@functools.cache
def _mesh_of_meshes(spreads: tuple[Spread, ...]) -> Mesh:
    grids = [spread.mesh.devices for spread in spreads if spread.mesh is not None]
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


def sum_over_devices(
    devices: Sequence[jax.Device], local: Mapping[jax.Device, Tree]
) -> dict[jax.Device, Tree]:
    """Sum one tree per device, on every device: a jitted collective.

    `local` holds the trees of those `devices` that belong to this process; the processes of all
    `devices` call this with the same `devices` in the same order. The trees are given up. Every
    device gets the same bits. With one device its tree is returned as it is.
    """
    if len(devices) == 1:
        return dict(local)
    mesh = _mesh(tuple(devices))
    split, same = NamedSharding(mesh, PartitionSpec(AXIS)), NamedSharding(mesh, PartitionSpec())

    def joined(*parts: jax.Array) -> jax.Array:
        # The parts of all devices, end to end, are one array; no data moves to make it.
        shape = (len(devices) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, split, list(parts))

    summed = _sum(same)(
        jax.tree.map(joined, *(local[device] for device in devices if device in local))
    )

    def part_on(device: jax.Device) -> Callable[[jax.Array], jax.Array]:
        return lambda array: next(s.data for s in array.addressable_shards if s.device == device)

    return {device: jax.tree.map(part_on(device), summed) for device in local}


@functools.cache
def _mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


@functools.cache
def _sum(replicated: NamedSharding) -> Callable[[Any], Any]:
    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map,
        mesh=replicated.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
    )
    def summed(tree: Any) -> Any:
        return jax.lax.psum(tree, AXIS)

    return summed
