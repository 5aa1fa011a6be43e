"""Who serves what: the devices of nodes, the replicas of stages, and the rings between them.

All of it follows from the plan and the configuration, so every host makes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Sharding, SingleDeviceSharding
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.config import Config, NetworkConfig
from skippipe_jax.config.recipe import AVERAGED
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.runtime.ring import Ring

# `network.averaging: auto` takes the collective where no link between replicas is slower.
FAST_LINK = GIBIBYTE

NodeDevices = tuple[jax.Device, ...]
"""The devices of one host that a node consists of: one."""


def sharding_of(devices: NodeDevices) -> Sharding:
    """How an array of a node lies on its devices."""
    [device] = devices
    return SingleDeviceSharding(device)


def devices_of_nodes(nodes: int, host_of: Sequence[int]) -> tuple[NodeDevices, ...]:
    """The devices of each node: those of a host in turn over the devices of its process."""
    devices_of_host: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        devices_of_host.setdefault(device.process_index, []).append(device)
    served = dict.fromkeys(devices_of_host, 0)
    devices: list[NodeDevices] = []
    for host in host_of[:nodes]:
        own = devices_of_host[host]
        devices.append((own[served[host] % len(own)],))
        served[host] += 1
    return tuple(devices)


@dataclass(frozen=True, eq=False)
class Topology:
    """Nodes, replicas and rings of a run, and which of them are on this host.

    Attributes:
        plan: the run's own; all plans of a run have its placement.
        host: this one.
        host_of: the host of each node.
        devices: of each node.
        replica_of: the replica that each node holds, named after the first of its nodes: its own,
            or that of other nodes of the stage on the same devices.
        replicas: those of each stage.
        rings: of the stages that are averaged by one.
        totals: the numbers of the hops of totals, two for each host.
        first_free_hop: the numbers from here on mean nothing yet.
    """

    plan: Plan
    host: int
    host_of: tuple[int, ...]
    devices: tuple[NodeDevices, ...]
    replica_of: Mapping[int, int]
    replicas: tuple[tuple[int, ...], ...]
    rings: Mapping[int, Ring]
    totals: range
    first_free_hop: int

    @classmethod
    def of(
        cls,
        config: Config,
        plan: Plan,
        host: int,
        host_of: Sequence[int],
        devices: Sequence[NodeDevices],
        numbers: HopNumbers,
    ) -> Topology:
        """Lay out the run of `plan`; `numbers` are those that its plans have left free."""
        averages_parameters = config.recipe.average_parameters_every is not None
        replica_of = _replicas_of_nodes(plan, devices, alone=averages_parameters)
        replicas = tuple(
            tuple(dict.fromkeys(replica_of[node] for node in nodes)) for nodes in plan.stages
        )
        averaged = AVERAGED if averages_parameters else 1
        rings: dict[int, Ring] = {}
        for stage, shapes in enumerate(stage_shapes(config.model, len(plan.stages))):
            members = best_ring(plan.case, stage, sorted(replicas[stage]))
            if _averages_by_ring(config.network, plan, host_of, members):
                rings[stage] = Ring.of(stage, members, numbers, averaged * parameter_count(shapes))
        totals = numbers.take(2 * (max(host_of) + 1))
        return cls(
            plan,
            host,
            tuple(host_of),
            tuple(devices),
            replica_of,
            replicas,
            rings,
            totals,
            numbers.free,
        )

    @cached_property
    def stage_of(self) -> Sequence[int]:
        """The stage of each node."""
        return self.plan.stage_of

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that this host serves."""
        return tuple(node for node, host in enumerate(self.host_of) if host == self.host)

    @cached_property
    def own_replicas(self) -> tuple[int, ...]:
        """The replicas that this host holds, in the order of its nodes."""
        return tuple(dict.fromkeys(self.replica_of[node] for node in self.nodes))

    @cached_property
    def hosts(self) -> range:
        """All hosts."""
        return range(max(self.host_of) + 1)

    @cached_property
    def first_nodes(self) -> tuple[int, ...]:
        """The first node of each host: its devices sum what all hosts need to know."""
        return tuple(self.host_of.index(host) for host in self.hosts)

    @property
    def host_devices(self) -> tuple[jax.Device, ...]:
        """The device of each host that sums for it."""
        return tuple(self.devices[node][0] for node in self.first_nodes)

    @property
    def host_device(self) -> jax.Device:
        """That of this host."""
        return self.host_devices[self.host]

    def is_here(self, node: int) -> bool:
        """Whether this host serves a node."""
        return self.host_of[node] == self.host

    def sharding(self, node: int) -> Sharding:
        """How arrays lie on a node's devices."""
        return sharding_of(self.devices[node])

    def devices_of_stage(self, stage: int) -> tuple[jax.Device, ...]:
        """The devices that hold replicas of a stage, each once."""
        return tuple(dict.fromkeys(d for node in self.replicas[stage] for d in self.devices[node]))

    @property
    def sums_totals_by_links(self) -> bool:
        """Whether hosts send their totals to host 0: slow links suit no collective."""
        return len(self.hosts) > 1 and bool(self.rings)


def _replicas_of_nodes(
    plan: Plan, devices: Sequence[NodeDevices], *, alone: bool
) -> dict[int, int]:
    """The replica that each node holds; with `alone` its own, whoever is on its devices too."""
    if alone:
        return {node: node for node in range(len(devices))}
    first: dict[tuple[int, NodeDevices], int] = {}
    return {
        node: first.setdefault((stage, devices[node]), node)
        for stage, nodes in enumerate(plan.stages)
        for node in nodes
    }


def _averages_by_ring(
    network: NetworkConfig, plan: Plan, host_of: Sequence[int], members: Sequence[int]
) -> bool:
    if len(members) == 1 or network.averaging == "collective":
        return False
    if network.averaging == "ring" or network.averaging_dtype is not None:
        return True
    _, bandwidth = plan.case.link_matrices
    return any(
        bandwidth[a, b] < FAST_LINK for a in members for b in members if host_of[a] != host_of[b]
    )
