"""What the hosts of a cluster do together to measure it."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skippipe_jax.cluster.agreement import Host, gather, hear, tell
from skippipe_jax.config import Config
from skippipe_jax.models.footprint import hop_bytes
from skippipe_jax.profiling.case import (
    HostReport,
    Profile,
    check_template,
    profile_of,
    stage_count,
)
from skippipe_jax.profiling.links import MeasuredLink, MeasuredTransfer, measure_copy, measure_links
from skippipe_jax.profiling.stages import (
    StageTimings,
    Timing,
    free_bytes,
    measure_stage,
    shapes_of_stages,
)
from skippipe_jax.runtime.spread import Spread
from skippipe_jax.runtime.topology import spreads_of_nodes
from skippipe_jax.runtime.transport import HostLink

# For one shape of stage on one processor, and for all that the hosts of one machine have to time.
STAGE_S, ALL_STAGES_S = 2.0, 40.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Place:
    """Where a host is: the same `machine` for all its hosts, and the processor of each node."""

    machine: str
    processors: Sequence[str]


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
        DeadlinePassed: another host has not answered within `network.deadline_s`.
    """
    host_of = check_template(config, host.count)
    own = spreads_of_nodes(config.node, host_of.count(host.index), host.index)
    devices = [here.devices[0] for here in own]
    size, deadline_s = hop_bytes(config).activation, config.network.deadline_s
    place = _place_of(host.index, own)
    told = gather(host, "measure/place", lambda: asdict(place), deadline_s)
    places = [Place(**place) for place in told.values()]

    machine = places[host.index].machine
    nodes_here = sum(len(place.processors) for place in places if place.machine == machine)
    places_of = Counter(device for here in own for device in here.devices)
    # Of each device of a node: a CPU's are all of one machine.
    on_machine = nodes_here * max(len(here.devices) for here in own)
    memory_bytes = [
        min(free_bytes(device, places_of[device], on_machine) for device in here.devices)
        for here in own
    ]
    measured_links = measure_links(host.index, links, devices[0], size, deadline_s, say)
    copy_s = measure_copy(devices, size) if len(own) > 1 else None
    # Who has measured its links already must not disturb the others.
    tell(host, "measure/links", lambda: "measured")
    _hear(host, "links", range(host.count), deadline_s)
    say("all links are measured; compiling the stages")

    timings = _time_stages(config, own, places, host)
    report = HostReport(
        name=socket.gethostname(),
        links=measured_links,
        copy_s=copy_s,
        memory_bytes=memory_bytes,
        processors=places[host.index].processors,
        timings=timings,
    )
    tell(host, "measure/report", lambda: asdict(report))
    if host.index != 0:
        return None
    reports = list(map(_report_from, _hear(host, "report", range(host.count), deadline_s)))
    say("all stages are timed")
    return profile_of(config, host_of, reports)


def _hear(host: Host, what: str, others: Iterable[int], deadline_s: float) -> list[Any]:
    """What others tell of what they have done in turn: each has the whole deadline for itself."""
    return [hear(host, f"measure/{what}", [other], deadline_s)[other] for other in others]


def _place_of(host: int, nodes: Sequence[Spread]) -> Place:
    """Where this host is. Its nodes have the same processor if they have the same devices.

    On a CPU, hosts with the same cores of one machine have the same processor too. Containers,
    which may not have the same share of it, differ in their names.
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

    return Place(machine, [processor(here) for here in nodes])


def _time_stages(
    config: Config, nodes: Sequence[Spread], places: Sequence[Place], host: Host
) -> dict[str, list[StageTimings]]:
    """The timings of all stages on each processor that is this host's to time.

    The first host that has a processor times it. Everyone compiles at the same time, and then the
    hosts of one machine take turns, since they would disturb each other's figures.
    """
    own, place = host.index, places[host.index]
    first_host = {p: h for h in reversed(range(len(places))) for p in places[h].processors}
    mine = {
        processor: here
        for processor, here in zip(place.processors, nodes, strict=True)
        if first_host[processor] == own
    }
    shapes = shapes_of_stages(config, stage_count(config, sum(len(p.processors) for p in places)))
    for here in mine.values():
        for shape in set(shapes):
            measure_stage(config, shape, here, 0.0)
    tell(host, "measure/stages", lambda: "compiled")
    neighbours = [h for h, other in enumerate(places) if other.machine == place.machine]
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


def _report_from(told: dict[str, Any]) -> HostReport:
    links = [
        MeasuredLink(**link | {"transfers": [MeasuredTransfer(**t) for t in link["transfers"]]})
        for link in told["links"]
    ]
    timings = {
        processor: [{name: Timing(**t) for name, t in stage.items()} for stage in stages]
        for processor, stages in told["timings"].items()
    }
    return HostReport(**told | {"links": links, "timings": timings})
