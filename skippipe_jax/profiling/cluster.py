"""What the hosts of a cluster do together to measure it."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skippipe_jax.cluster.agreement import Host, gather, hear, tell
from skippipe_jax.config import Config
from skippipe_jax.models.footprint import hop_bytes
from skippipe_jax.profiling.case import (
    HostReport,
    Profile,
    check_template,
    left_aside,
    profile_of,
    stage_count,
)
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.profiling.links import measure_copy, measure_links
from skippipe_jax.profiling.stages import StageTimings, measure_stage, shapes_of_stages
from skippipe_jax.runtime.spread import Spread
from skippipe_jax.runtime.topology import spreads_of_nodes
from skippipe_jax.runtime.transport import HostLink

# For one shape of stage on one processor, and for all that the hosts of one machine have to time.
STAGE_S, ALL_STAGES_S = 2.0, 40.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostHardware:
    """The machine of a host, which its other hosts name alike, and the processor of each node."""

    machine: str
    processors: Sequence[str]


def name_and_devices(config: Config, host: Host) -> list[str]:
    """Return the name of this machine, and the kind of the first device of each of its nodes."""
    nodes = check_template(config, host.count).count(host.index)
    own = spreads_of_nodes(config.node, nodes, host.index)
    return [socket.gethostname(), *(here.devices[0].device_kind for here in own)]


def measure(
    config: Config, host: Host, links: Mapping[int, HostLink], say: Callable[[str], None]
) -> Profile | None:
    """Measure links, seconds and memory. All hosts call this together, host 0 gets the profile.

    `links[h]` leads to host h, and hosts stand for nodes there. `say` is told how far it has come.
    What `plan.case` may say is in `skippipe_jax.profiling.case`.

    Hosts of one machine take turns at timing. Those that have the same cores of a CPU for their
    device have it timed once; nodes that share a device are timed as if each had it alone.

    Raises:
        InputError: before anything is measured, if the template leads to no case.
        PeerTimeout: another host has not answered within `network.deadline_s`.
    """
    host_of = check_template(config, host.count)
    if aside := left_aside(config):
        say(aside)
    own = spreads_of_nodes(config.node, host_of.count(host.index), host.index)
    devices = [here.devices[0] for here in own]
    size, deadline_s = hop_bytes(config).activation, config.network.deadline_s
    hardware = _hardware_of(host.index, own)
    told = gather(host, "measure/place", lambda: msgspec.to_builtins(hardware), deadline_s)
    of_hosts = msgspec.convert([*told.values()], list[HostHardware])

    nodes_here = sum(
        len(other.processors) for other in of_hosts if other.machine == hardware.machine
    )
    nodes_of = Counter(device for here in own for device in here.devices)
    # Of each device of a node: a CPU's are all of one machine.
    on_machine = nodes_here * max(len(here.devices) for here in own)
    memory_bytes = [
        min(available_bytes(device, nodes_of[device], on_machine) for device in here.devices)
        for here in own
    ]
    measured_links = measure_links(host.index, links, devices[0], size, deadline_s, say)
    copy_s = measure_copy(devices, size) if len(own) > 1 else None
    # Who has measured its links already must not disturb the others.
    tell(host, "measure/links", lambda: "measured")
    _hear(host, "links", range(host.count), deadline_s)
    say("all links are measured; compiling the stages")

    report = HostReport(
        name=socket.gethostname(),
        links=measured_links,
        copy_s=copy_s,
        memory_bytes=memory_bytes,
        processors=hardware.processors,
        timings=_time_stages(config, own, of_hosts, host),
        devices=[device.device_kind for device in devices],
    )
    tell(host, "measure/report", lambda: msgspec.to_builtins(report))
    if host.index != 0:
        return None
    heard = _hear(host, "report", range(host.count), deadline_s)
    reports = msgspec.convert(heard, list[HostReport])
    say("all stages are timed")
    return profile_of(config, host_of, reports)


def _hear(host: Host, what: str, others: Iterable[int], deadline_s: float) -> list[Any]:
    """Return what others tell after one another; the deadline counts for each alone."""
    return [hear(host, f"measure/{what}", [other], deadline_s)[other] for other in others]


def _hardware_of(host: int, nodes: Sequence[Spread]) -> HostHardware:
    """Find out the hardware of this host.

    Its nodes have the same processor if they have the same devices. On a CPU, hosts
    with the same cores of one machine have the same processor too. Containers, which may not have
    the same share of it, differ in their names.
    """
    name = socket.gethostname()
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else name
    every_core = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every_core
    on_cpu = f"cores {','.join(map(str, sorted(cores)))} of {machine}, {name}"

    def processor(here: Spread) -> str:
        if here.devices[0].platform == "cpu":
            return on_cpu
        numbers = "+".join(f"{device.id}" for device in here.devices)
        return f"{numbers} of host {host}, {machine}"

    return HostHardware(machine, [processor(here) for here in nodes])


def _time_stages(
    config: Config, nodes: Sequence[Spread], of_hosts: Sequence[HostHardware], host: Host
) -> dict[str, list[StageTimings]]:
    """Time all stages on each processor that is this host's to time.

    The first host that has a processor times it. Everyone compiles at the same time, and then the
    hosts of one machine take turns, since they would disturb each other's figures.
    """
    own, hardware = host.index, of_hosts[host.index]
    first_host = {p: h for h in reversed(range(len(of_hosts))) for p in of_hosts[h].processors}
    mine = {
        processor: here
        for processor, here in zip(hardware.processors, nodes, strict=True)
        if first_host[processor] == own
    }
    in_all = sum(len(other.processors) for other in of_hosts)
    shapes = shapes_of_stages(config, stage_count(config, in_all))
    for here in mine.values():
        for shape in set(shapes):
            measure_stage(config, shape, here, 0.0)
    tell(host, "measure/stages", lambda: "compiled")
    neighbours = [h for h, other in enumerate(of_hosts) if other.machine == hardware.machine]
    deadline_s = config.network.deadline_s
    _hear(host, "stages", neighbours, deadline_s)
    _hear(host, "report", [other for other in neighbours if other < own], deadline_s)
    to_time = sum(timing in neighbours for timing in first_host.values()) * len(set(shapes))
    budget_s = min(STAGE_S, ALL_STAGES_S / to_time)
    timings = {}
    for processor, here in mine.items():
        of_shape = {shape: measure_stage(config, shape, here, budget_s) for shape in set(shapes)}
        timings[processor] = [of_shape[shape] for shape in shapes]
    return timings
