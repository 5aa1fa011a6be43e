"""Sharding of a node's arrays: on its only device, or over a mesh of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import PyTree

from skippipe_jax.config import NodeMesh
from skippipe_jax.models.sharding import AXES, FSDP, activation_spec, specs


@dataclass(frozen=True)
class NodeSharding:
    """Devices of a node of this host, in the order of its mesh.

    Attributes:
        devices: devices of the node.
        mesh: mesh of the devices; None if there is only one, whose arrays are not sharded.
    """

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None = None

    @classmethod
    def over(cls, devices: Sequence[jax.Device], mesh: NodeMesh) -> NodeSharding:
        """Make the spread over the devices of a mesh."""
        if len(devices) == 1:
            return cls(tuple(devices))
        grid = np.array(devices).reshape(mesh.fsdp, mesh.tensor)
        return cls(tuple(devices), Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)))

    @property
    def shape(self) -> NodeMesh:
        """Number of devices along each axis."""
        return NodeMesh() if self.mesh is None else NodeMesh(*np.shape(self.mesh.devices))

    @property
    def first(self) -> SingleDeviceSharding:
        """Sharding of whole arrays on the first device: hops between different meshes, and sums."""
        return SingleDeviceSharding(self.devices[0])

    @property
    def whole(self) -> Sharding:
        """Sharding of arrays replicated on every device: tokens, counters and totals."""
        return self.first if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def of_tree(self, tree: PyTree, memory_kind: str | None = None) -> PyTree:
        """Return shardings of parameters, gradients or optimizer state, in a kind of memory."""
        if self.mesh is None:
            here = self.whole if memory_kind is None else self.whole.with_memory_kind(memory_kind)
            return jax.tree.map(lambda _: here, tree)
        return named(self.mesh, specs(tree), memory_kind)

    def of_hop(self, shape: Sequence[int]) -> Sharding:
        """Return the sharding of an array that arrives from a node with an equal mesh.

        Activations, which have three axes, are sharded as between blocks. All others are on the
        first device.
        """
        if self.mesh is None or len(shape) != 3:
            return self.first
        return activations(self.mesh, shape[0])

    def put(self, tree: PyTree, *, may_alias: bool | None = None) -> PyTree:
        """Put parameters, gradients or an optimizer's state on the devices of the node."""
        return jax.device_put(tree, self.of_tree(tree), may_alias=may_alias)


def activations(mesh: Mesh, batch: int) -> NamedSharding:
    """Return the sharding of [batch, time, channels] between blocks."""
    return NamedSharding(mesh, activation_spec(batch, mesh.shape[FSDP]))


def named(mesh: Mesh, tree_of_specs: PyTree, memory_kind: str | None = None) -> PyTree:
    """Return the shardings over a mesh for a tree of partition specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=memory_kind),
        tree_of_specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def devices_of(sharding: Sharding) -> Sequence[jax.Device]:
    """Return the devices of an array of this host, in the order of its shards."""
    if isinstance(sharding, NamedSharding):
        devices = sharding.mesh.devices
        assert devices is not None, "the mesh is abstract"
        return devices.flatten().tolist()
    return list(sharding.device_set)


def shards_of(array: jax.Array) -> list[jax.Array]:
    """Return the shards of an array in the order of devices; only one if it is replicated."""
    if len(array.sharding.device_set) == 1:
        return [array]
    parts = [shard.data for shard in array.addressable_shards]
    return parts[:1] if array.is_fully_replicated else parts


def whole(array: jax.Array) -> jax.Array:
    """Copy an array to one device: the first of those that it is sharded over."""
    if len(array.sharding.device_set) == 1:
        return array
    return jax.device_put(array, SingleDeviceSharding(devices_of(array.sharding)[0]))
