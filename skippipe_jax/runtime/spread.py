"""How the arrays of a node lie on its devices: on the only one, or cut over a mesh of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
class Spread:
    """The devices of a node of this host, in the order of its mesh.

    Attributes:
        devices: of the node.
        mesh: None where there is one device: its arrays are not cut, and nothing knows of a mesh.
    """

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None = None

    @classmethod
    def over(cls, devices: Sequence[jax.Device], mesh: NodeMesh) -> Spread:
        """Spread over as many devices as the mesh has."""
        if len(devices) == 1:
            return cls(tuple(devices))
        grid = np.array(devices).reshape(mesh.fsdp, mesh.tensor)
        return cls(tuple(devices), Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)))

    @property
    def shape(self) -> NodeMesh:
        """How many devices there are along each axis."""
        return NodeMesh() if self.mesh is None else NodeMesh(*np.shape(self.mesh.devices))

    @property
    def first(self) -> SingleDeviceSharding:
        """On the first device alone: what goes to nodes of other meshes, and what hosts sum up."""
        return SingleDeviceSharding(self.devices[0])

    @property
    def whole(self) -> Sharding:
        """On every device: tokens, counters and totals."""
        return self.first if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def of_tree(self, tree: PyTree, memory_kind: str | None = None) -> PyTree:
        """Return how parameters, gradients or an optimizer's state lie, in memory of some kind."""
        if self.mesh is None:
            here = self.whole if memory_kind is None else self.whole.with_memory_kind(memory_kind)
            return jax.tree.map(lambda _: here, tree)
        return named(self.mesh, specs(tree), memory_kind)

    def of_hop(self, shape: Sequence[int]) -> Sharding:
        """Return how something lies that comes to this node from one that has an equal mesh.

        Activations, which have three axes, are cut as they are between blocks. What has two is of
        a ring, and has a row for each device. All else is on the first device.
        """
        if self.mesh is None or len(shape) not in (2, 3):
            return self.first
        if len(shape) == 2:
            return NamedSharding(self.mesh, ROWS)
        return activations(self.mesh, shape[0])

    def put(self, tree: PyTree, *, may_alias: bool | None = None) -> PyTree:
        """Parameters, gradients or an optimizer's state, where they belong."""
        return jax.device_put(tree, self.of_tree(tree), may_alias=may_alias)


ROWS = PartitionSpec(AXES)
"""How [devices, numbers] is cut: each device has the row that is its own."""


def activations(mesh: Mesh, batch: int) -> NamedSharding:
    """Return how [batch, time, channels] lies between blocks."""
    return NamedSharding(mesh, activation_spec(batch, mesh.shape[FSDP]))


def named(mesh: Mesh, tree_of_specs: PyTree, memory_kind: str | None = None) -> PyTree:
    """Make the shardings over a mesh that specs describe."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=memory_kind),
        tree_of_specs,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def numbers_of_device(tree: PyTree, mesh: NodeMesh) -> int:
    """Count the numbers of a tree of parameters, or of their shapes, on each device."""
    sizes = {FSDP: mesh.fsdp, AXES[1]: mesh.tensor}

    def of_array(leaf: Any, spec: PartitionSpec) -> int:
        return leaf.size // math.prod(sizes[axis] for axis in spec if axis is not None)

    leaves = jax.tree.leaves(tree)
    own = jax.tree.leaves(specs(tree), is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return sum(map(of_array, leaves, own))


def devices_of(sharding: Sharding) -> Sequence[jax.Device]:
    """List the devices on which an array of this host lies, in the order of its parts."""
    if isinstance(sharding, NamedSharding):
        devices = sharding.mesh.devices
        assert devices is not None, "is no abstract mesh"
        return devices.flatten().tolist()
    return list(sharding.device_set)


def parts_of(array: jax.Array) -> list[jax.Array]:
    """Return what each device has of an array, in their order; one of them if all have the same."""
    if len(array.sharding.device_set) == 1:
        return [array]
    parts = [shard.data for shard in array.addressable_shards]
    return parts[:1] if array.is_fully_replicated else parts


def whole(array: jax.Array) -> jax.Array:
    """Copy an array to one device: the first of those that it is cut over."""
    if len(array.sharding.device_set) == 1:
        return array
    return jax.device_put(array, SingleDeviceSharding(devices_of(array.sharding)[0]))


@functools.cache
def single(device: jax.Device) -> Spread:
    """Spread over the one device of a node."""
    return Spread((device,))
