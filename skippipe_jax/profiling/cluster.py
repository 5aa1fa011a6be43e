"""Collective measurement of a cluster by its hosts."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from skippipe_jax.cluster.agreement import Host, gather, hear, tell
from skippipe_jax.config import Config
from skippipe_jax.models.footprint import hop_bytes
from skippipe_jax.profiling.case import (
    HostReport,
    Profile,
    check_template,
    ignored_keys_text,
    profile_of,
    stage_count,
)
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.profiling.links import LinkMeasurement, measure_copy
from skippipe_jax.profiling.stages import StageTimings, measure_stage, shapes_of_stages
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.topology import local_shardings
from skippipe_jax.runtime.transport import HostLink

# Seconds for one shape of stage on one processor, and for all timings of the hosts of one machine.
STAGE_S, ALL_STAGES_S = 2.0, 40.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class HostHardware:
    """Hardware of a host.

    Attributes:
        machine: name of its machine, equal on all hosts of the machine.
        network: name of its network, equal on hosts that reach each other within their machine.
        processors: name of each node's processor.
    """

    machine: str
    network: str
    processors: Sequence[str]


def name_and_devices(config: Config, host: Host) -> list[str]:
    """Return the name of this machine, and the kind of the first device of each node."""
    nodes = check_template(config, host.count).count(host.index)
    local = local_shardings(config.node, [config.node.mesh] * nodes, host.index)
    return [socket.gethostname(), *(here.devices[0].device_kind for here in local)]


def measure(
    config: Config, host: Host, links: Mapping[int, HostLink], say: Callable[[str], None]
) -> Profile | None:
    """Measure links, connections, stages and memory; all hosts call this together.

    Returns the profile on host 0, and None on the others. `links[h]` leads to host h, where hosts
    take the place of nodes. `say` receives messages about the progress.
    `skippipe_jax.profiling.case` describes the keys of `plan.case`.

    Hosts of one machine take turns at timing. The cores of a CPU that several hosts share are timed
    once; nodes that share a device are timed as if each had it alone.

    Raises:
        InputError: before the measurement, if `plan.case` does not lead to a case.
        PeerTimeout: if another host has not answered within `network.deadline_s`.
    """
    host_of = check_template(config, host.count)
    if ignored := ignored_keys_text(config):
        say(ignored)
    meshes = [config.node.mesh] * host_of.count(host.index)
    local = local_shardings(config.node, meshes, host.index)
    devices = [here.devices[0] for here in local]
    size, deadline_s = hop_bytes(config).activation, config.network.deadline_s
    hardware = _hardware_of(host.index, local)
    by_host = gather(host, "measure/place", lambda: msgspec.to_builtins(hardware), deadline_s)
    of_hosts = msgspec.convert([*by_host.values()], list[HostHardware])

    nodes_on_machine = sum(
        len(other.processors) for other in of_hosts if other.machine == hardware.machine
    )
    nodes_of = Counter(device for here in local for device in here.devices)
    # Count every device of a node, as all devices of a CPU share the memory of the machine.
    devices_on_machine = nodes_on_machine * max(len(here.devices) for here in local)
    memory_bytes = [
        min(
            available_bytes(device, nodes_of[device], devices_on_machine) for device in here.devices
        )
        for here in local
    ]
    measurement = LinkMeasurement(host.index, links, devices[0], deadline_s, say)
    measured_links = measurement.measure_links(size)
    copy_s = measure_copy(devices, size) if len(local) > 1 else None
    rates = {link.source: link.bandwidth for link in measured_links}
    tell(host, "measure/links", lambda: [rates.get(source, 0.0) for source in range(host.count)])
    bandwidth = np.array(_receive(host, "links", range(host.count), deadline_s)).T
    simultaneous = measurement.test_connections(bandwidth, [other.network for other in of_hosts])
    # A host that has measured its links must not disturb the others by compiling.
    tell(host, "measure/connections", lambda: "tested")
    _receive(host, "connections", range(host.count), deadline_s)
    say("measured all links; compiling the stages")

    report = HostReport(
        name=socket.gethostname(),
        links=measured_links,
        simultaneous=simultaneous,
        copy_s=copy_s,
        memory_bytes=memory_bytes,
        processors=hardware.processors,
        timings=_time_stages(config, local, of_hosts, host),
        devices=[device.device_kind for device in devices],
    )
    tell(host, "measure/report", lambda: msgspec.to_builtins(report))
    if host.index != 0:
        return None
    received = _receive(host, "report", range(host.count), deadline_s)
    reports = msgspec.convert(received, list[HostReport])
    say("timed all stages")
    return profile_of(config, host_of, reports)


def _receive(host: Host, what: str, others: Iterable[int], deadline_s: float) -> list[Any]:
    """Receive a message of each of the others in turn, with a separate deadline for each."""
    return [hear(host, f"measure/{what}", [other], deadline_s)[other] for other in others]


def _hardware_of(host: int, nodes: Sequence[NodeSharding]) -> HostHardware:
    """Return the hardware of this host.

    Nodes with the same devices have the same processor. On a CPU, so have hosts with the same cores
    of one machine. Containers may have different shares of a machine, so their host names are part
    of the processor's name.
    """
    name = socket.gethostname()
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else name
    # Containers of one machine have networks of their own.
    namespace = f"{NETWORK_NAMESPACE.readlink()} of " if NETWORK_NAMESPACE.is_symlink() else ""
    every_core = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every_core
    on_cpu = f"cores {','.join(map(str, sorted(cores)))} of {machine}, {name}"

    def processor(here: NodeSharding) -> str:
        if here.devices[0].platform == "cpu":
            return on_cpu
        numbers = "+".join(f"{device.id}" for device in here.devices)
        return f"{numbers} of host {host}, {machine}"

    return HostHardware(machine, namespace + machine, [processor(here) for here in nodes])


def _time_stages(
    config: Config, nodes: Sequence[NodeSharding], of_hosts: Sequence[HostHardware], host: Host
) -> dict[str, list[StageTimings]]:
    """Time all stages on each processor that no earlier host has.

    All hosts compile at the same time. Then the hosts of one machine take turns, as parallel
    timings would disturb each other.
    """
    own, hardware = host.index, of_hosts[host.index]
    first_host = {p: h for h in reversed(range(len(of_hosts))) for p in of_hosts[h].processors}
    untimed = {
        processor: here
        for processor, here in zip(hardware.processors, nodes, strict=True)
        if first_host[processor] == own
    }
    in_all = sum(len(other.processors) for other in of_hosts)
    shapes = shapes_of_stages(config, stage_count(config, in_all))
    for here in untimed.values():
        for shape in set(shapes):
            measure_stage(config, shape, here, 0.0)
    tell(host, "measure/stages", lambda: "compiled")
    same_machine = [h for h, other in enumerate(of_hosts) if other.machine == hardware.machine]
    deadline_s = config.network.deadline_s
    _receive(host, "stages", same_machine, deadline_s)
    _receive(host, "report", [other for other in same_machine if other < own], deadline_s)
    to_time = sum(timing in same_machine for timing in first_host.values()) * len(set(shapes))
    budget_s = min(STAGE_S, ALL_STAGES_S / to_time)
    timings = {}
    for processor, here in untimed.items():
        of_shape = {shape: measure_stage(config, shape, here, budget_s) for shape in set(shapes)}
        timings[processor] = [of_shape[shape] for shape in shapes]
    return timings
