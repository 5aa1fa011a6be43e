"""Topology of a run: the devices of nodes, the replicas of stages, and the rings between them.

It follows from the plan and the configuration, so all hosts compute the same topology.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.config import Config, NetworkConfig, NodeConfig, NodeMesh
from skippipe_jax.config.hardware import ONE_DEVICE
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.models.node_memory import parameters_per_device
from skippipe_jax.optim.outer import longest_message
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.ring import Ring
from skippipe_jax.runtime.state_copy import CopyRoute, copy_routes

# `network.averaging: auto` uses the collective if no link between replicas is slower.
FAST_LINK = GIBIBYTE


@dataclass(frozen=True)
class Device:
    """Description of a device of any host, which need not be visible to the local JAX.

    Attributes:
        host: host of the device.
        number: number among the devices of the host, from 0.
        kind: JAX's name for this kind of device.
    """

    host: int
    number: int
    kind: str


NodeDevices = tuple[Device, ...]
"""Devices of a node, all of one host, in the order of its mesh."""


def devices_of_nodes(
    host_of: Sequence[int],
    kinds: Sequence[Sequence[str]],
    meshes: Sequence[NodeMesh | None],
) -> tuple[NodeDevices, ...]:
    """Map nodes to devices: the nodes of host h take its devices, of `kinds[h]`, in turn.

    A node has the devices of its mesh in `meshes`. If that is None, the devices of the host are
    divided evenly among its nodes.

    Raises:
        InputError: if a host has too few devices, or a mesh would wrap around from its last to its
            first ones.
    """
    taken = [0] * len(kinds)
    devices: list[NodeDevices] = []
    for node, (host, mesh) in enumerate(zip(host_of, meshes, strict=True)):
        own = len(kinds[host])
        count = max(1, own // host_of.count(host)) if mesh is None else mesh.devices
        first = taken[host] % own
        if first + count > own:
            raise InputError(
                "node",
                str(mesh),
                f"node {node} needs devices {first} to {first + count - 1} of host {host},"
                f" which has {own}",
                f"Set a mesh whose size divides {own}, or give host {host} fewer nodes "
                "(cluster.host_of_node)",
            )
        places = range(first, first + count)
        devices.append(tuple(Device(host, number, kinds[host][number]) for number in places))
        taken[host] += count
    return tuple(devices)


def unused_devices_warnings(
    host_of: Sequence[int],
    kinds: Sequence[Sequence[str]],
    meshes: Sequence[NodeMesh | None],
) -> list[str]:
    """Return a warning for each host whose nodes leave some of its devices unused.

    The arguments are those of `devices_of_nodes`.
    """
    nodes = devices_of_nodes(host_of, kinds, meshes)
    used = Counter(device.host for device in {device for own in nodes for device in own})
    return [
        f"host {host} uses {used[host]} of its {len(kinds[host])} devices. Set node: auto to use "
        "all, or give it more nodes"
        for host in sorted(used)
        # Those of a processor are virtual.
        if used[host] < len(kinds[host]) and kinds[host][0] != "cpu"
    ]


def require_meshes(config: Config, case: Case) -> None:
    """Check that meshes of the case and of `config` divide the model and a microbatch evenly.

    A mesh that depends on the devices of hosts is not checked yet.

    Raises:
        InputError: naming the mesh; or `averaging.mode`, if a mesh has several devices in `outer`
            mode.
    """
    for node, mesh in enumerate(config.node.meshes(case)):
        if mesh is not None:
            _require_mesh(config, case, node, mesh)


def _require_mesh(config: Config, case: Case, node: int, mesh: NodeMesh) -> None:
    field = "node" if case.nodes[node].mesh is None else f"case.nodes[{node}].mesh"
    mesh.require_divides(config.model, config.data, field)
    if mesh != ONE_DEVICE and config.averaging.is_outer:
        raise InputError(
            "averaging.mode",
            "outer",
            f"requires nodes of one device, and node {node} has {mesh.devices}",
            f"Set node: {ONE_DEVICE}, or averaging.mode: exact",
        )


def shardings_of_host(
    config: Config, case: Case, host_of: Sequence[int], host: int
) -> tuple[NodeSharding, ...]:
    """Return the distinct shardings of this host's nodes, before hosts exchange their devices.

    If it serves no node yet, return the sharding that its first node would have.

    Raises:
        InputError: as `devices_of_nodes` and `require_meshes` do.
    """
    nodes = [node for node, at in enumerate(host_of) if at == host]
    meshes = [config.node.mesh_of(case, node) for node in nodes] or [config.node.mesh]
    shardings = local_shardings(config.node, meshes, host)
    for node, sharding in zip(nodes, shardings, strict=False):
        _require_mesh(config, case, node, sharding.shape)
    return tuple(dict.fromkeys(shardings))


def local_shardings(
    node: NodeConfig, meshes: Sequence[NodeMesh | None], host: int
) -> list[NodeSharding]:
    """Return the shardings of nodes of this host with these meshes; None divides devices evenly.

    Raises:
        InputError: as `devices_of_nodes` does.
    """
    local = jax.local_devices()
    kinds = [[device.device_kind for device in local]] * (host + 1)
    devices = devices_of_nodes([host] * len(meshes), kinds, meshes)
    return [
        NodeSharding.over([local[device.number] for device in own], mesh or node.over(len(own)))
        for own, mesh in zip(devices, meshes, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class Topology:
    """Nodes, replicas and rings of a run, as seen from one host.

    Attributes:
        plan: the run's own plan; all plans of a run have its placement.
        host: rank of this host.
        host_of: rank of the host of each node.
        in_one_jax: whether one JAX has the devices of all hosts, so that collectives reach them.
        devices: devices of each node.
        meshes: mesh of each node over its devices.
        replica_of: replica of each node, named after the first node that holds it; nodes of a stage
            on the same devices share a replica.
        replicas: replicas of each stage.
        rings: ring all-reduce of each stage that is averaged by one.
        gatherings: ring all-gather of each stage in `outer` mode.
        copy_routes: routes of buddy checkpoints.
        host_ids: ids of the hosts in the run, by rank, for messages; empty if they are the ranks.
    """

    plan: Plan
    host: int
    host_of: tuple[int, ...]
    in_one_jax: bool
    devices: tuple[NodeDevices, ...]
    meshes: tuple[NodeMesh, ...]
    replica_of: Mapping[int, int]
    replicas: tuple[tuple[int, ...], ...]
    rings: Mapping[int, Ring]
    gatherings: Mapping[int, Ring]
    copy_routes: tuple[CopyRoute, ...] = ()
    host_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        plan: Plan,
        host: int,
        host_of: Sequence[int],
        kinds: Sequence[Sequence[str]],
        *,
        in_one_jax: bool = False,
        host_ids: Sequence[int] = (),
    ) -> Topology:
        """Lay out the run of `plan`, where `kinds[h]` are the kinds of host h's devices.

        Raises:
            InputError: as `devices_of_nodes` and `require_meshes` do.
        """
        devices = devices_of_nodes(host_of, kinds, config.node.meshes(plan.case))
        meshes = tuple(
            config.node.mesh_of(plan.case, node) or config.node.over(len(own))
            for node, own in enumerate(devices)
        )
        for node, mesh in enumerate(meshes):
            _require_mesh(config, plan.case, node, mesh)
        # In `outer` mode nodes have separate replicas from the start, even in exact iterations.
        places = [*zip(devices, meshes, strict=True)]
        replica_of = _replicas_of_nodes(plan, places, alone=config.averaging.is_outer)
        replicas = tuple(
            tuple(dict.fromkeys(replica_of[node] for node in nodes)) for nodes in plan.stages
        )
        layers = config.model.stage_partition(len(plan.stages))
        rings: dict[int, Ring] = {}
        for stage, own in enumerate(replicas):
            members = best_ring(plan.case, stage, sorted(own))
            # With equal meshes the ring carries shards, otherwise whole gradients.
            alike = {meshes[member] for member in members}
            if members and _averages_by_ring(
                config.network, plan, host_of, members, len(alike) == 1, in_one_jax=in_one_jax
            ):
                cut = alike.pop() if len(alike) == 1 else ONE_DEVICE
                length = parameters_per_device(
                    config.model, layers[stage], cut, is_data_stage=stage == 0
                )
                rings[stage] = Ring.of(
                    plan.case,
                    stage,
                    members,
                    length,
                    shards=cut.devices,
                    width=jnp.dtype(config.network.averaging_dtype or "float32").itemsize,
                    hop_bytes=_hop_bytes(plan, host_of, members),
                )
        shapes = stage_shapes(config.model, len(layers)) if config.averaging.is_outer else ()
        gatherings = {
            stage: Ring.of_messages(
                plan.case,
                stage,
                own,
                longest_message(config.averaging, layers[stage], shapes[stage]),
                hop_bytes=_hop_bytes(plan, host_of, own),
            )
            for stage, own in enumerate(replicas)
            if config.averaging.is_outer and len(own) > 1
        }
        routes = tuple(copy_routes(config, plan, host_of, replicas))
        of_hosts = plan, host, tuple(host_of), in_one_jax, devices, meshes
        layout = replica_of, replicas, rings, gatherings, routes
        return cls(*of_hosts, *layout, host_ids=tuple(host_ids))

    def host_text(self, *ranks: int) -> str:
        """Name hosts by their ids, for messages."""
        ids = self.host_ids or range(len(self.hosts))
        return f"host {', '.join(str(ids[rank]) for rank in ranks)}"

    def node_text(self, node: int) -> str:
        """Name a node and its host, for messages."""
        return f"node {node} on {self.host_text(self.host_of[node])}"

    def others_text(self) -> str:
        """Name all other hosts, for messages."""
        return self.host_text(*(rank for rank in self.hosts if rank != self.host))

    @cached_property
    def stage_of(self) -> Sequence[int]:
        """Stage of each node."""
        return self.plan.stage_of

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that this host serves."""
        return tuple(node for node, host in enumerate(self.host_of) if host == self.host)

    @cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """Replicas that this host holds, in the order of its nodes."""
        return tuple(dict.fromkeys(self.replica_of[node] for node in self.nodes))

    @cached_property
    def hosts(self) -> range:
        """Indices of all hosts."""
        return range(max(self.host_of) + 1)

    @cached_property
    def first_nodes(self) -> tuple[int, ...]:
        """First node of each host, whose first device sums the totals of the host."""
        return tuple(self.host_of.index(host) for host in self.hosts)

    @property
    def host_device(self) -> jax.Device:
        """Device that sums the totals of this host."""
        return self.device(self.first_nodes[self.host])

    def is_local_node(self, node: int) -> bool:
        """Return whether this host serves a node."""
        return self.host_of[node] == self.host

    def device(self, node: int) -> jax.Device:
        """Return the first device of a node: local, or any if one JAX has all devices."""
        return self.sharding(node).devices[0]

    def sharding(self, node: int) -> NodeSharding:
        """Return the sharding of a node: local, or any if one JAX has all devices."""
        return self._spreads[node]

    @cached_property
    def _spreads(self) -> Mapping[int, NodeSharding]:
        # A host's index is that of its process only within one JAX.
        own = jax.local_devices()
        others = {host: jax.local_devices(host) for host in self.hosts if self.in_one_jax}
        of_hosts = {**others, self.host: own}
        return {
            node: NodeSharding.over([of_hosts[of.host][of.number] for of in devices], mesh)
            for node, (devices, mesh) in enumerate(zip(self.devices, self.meshes, strict=True))
            if devices[0].host in of_hosts
        }

    @property
    def hops(self) -> Iterator[Hop]:
        """Hops of all rings and buddy checkpoints."""
        for own in (*self.rings.values(), *self.gatherings.values(), *self.copy_routes):
            yield from own.hops


def _replicas_of_nodes(
    plan: Plan, places: Sequence[tuple[NodeDevices, NodeMesh]], *, alone: bool
) -> dict[int, int]:
    """Map each node to its replica; with `alone`, each has a separate one."""
    if alone:
        return {node: node for node in range(len(places))}
    first: dict[tuple[int, Any], int] = {}
    return {
        node: first.setdefault((stage, places[node]), node)
        for stage, nodes in enumerate(plan.stages)
        for node in nodes
    }


def _hop_bytes(plan: Plan, host_of: Sequence[int], ring: Sequence[int]) -> float:
    """Return the bytes of hops that share the links of a ring; infinite if none do.

    They do if a host of the ring has nodes of several stages.
    """
    stages: dict[int, set[int]] = defaultdict(set)
    for node, host in enumerate(host_of):
        stages[host].add(plan.stage_of[node])
    if any(len(stages[host_of[node]]) > 1 for node in ring):
        return min(plan.case.activation_bytes, plan.case.gradient_bytes)
    return math.inf


def _averages_by_ring(
    network: NetworkConfig,
    plan: Plan,
    host_of: Sequence[int],
    members: Sequence[int],
    are_alike: bool,
    *,
    in_one_jax: bool,
) -> bool:
    if len({host_of[member] for member in members}) > 1 and not (in_one_jax and are_alike):
        return True
    if len(members) == 1 or network.averaging == "collective":
        return False
    if network.averaging == "ring" or network.averaging_dtype is not None:
        return True
    _, bandwidth = plan.case.link_matrices
    return any(
        bandwidth[a, b] < FAST_LINK for a in members for b in members if host_of[a] != host_of[b]
    )
