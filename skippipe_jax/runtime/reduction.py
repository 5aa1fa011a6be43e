"""Summing trees of arrays over devices: the replicas of a stage, or one device of each host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
AXIS = "replica"


def sum_over_devices(
    devices: Sequence[jax.Device], local: Mapping[jax.Device, Tree]
) -> dict[jax.Device, Tree]:
    """The sum of one tree per device, on every device: a jitted collective.

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
