"""What the hosts of a cluster do together to measure it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.profiling.case import (
    HostReport,
    Profile,
    activation_bytes,
    check_template,
    profile_of,
    stage_count,
)
from skippipe_jax.profiling.links import MeasuredLink, Transfer, measure_copy, measure_links
from skippipe_jax.profiling.stages import (
    StageTimings,
    Timing,
    free_bytes,
    measure_stage,
    microbatches_in_memory,
    shapes_of_stages,
)
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
    config: Config, host: Membership, links: Mapping[int, HostLink], say: Callable[[str], None]
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
    local, own_nodes = jax.local_devices(), host_of.count(host.index)
    devices = [local[position % len(local)] for position in range(own_nodes)]
    board = Board(host, config.network.deadline_s)
    places = [Place(**place) for place in board.exchange("place", asdict(_place_of(devices)))]

    machine = places[host.index].machine
    nodes_here = sum(len(place.processors) for place in places if place.machine == machine)
    shapes = shapes_of_stages(config, stage_count(config, len(host_of)))
    memory = [
        min(microbatches_in_memory(config, shape, free) for shape in set(shapes))
        for free in (free_bytes(d, devices.count(d), nodes_here) for d in devices)
    ]
    size, deadline_s = activation_bytes(config), config.network.deadline_s
    measured_links = measure_links(host.index, links, devices[0], size, deadline_s, say)
    copy_s = measure_copy(devices, size) if own_nodes > 1 else None
    # Who has measured its links already must not disturb the others.
    board.exchange("links", "measured")
    say("all links are measured; compiling the stages")

    timings = _time_stages(config, devices, places, board)
    report = HostReport(
        name=socket.gethostname(),
        links=measured_links,
        copy_s=copy_s,
        memory=memory,
        processors=places[host.index].processors,
        timings=timings,
    )
    board.tell("report", asdict(report))
    if host.index != 0:
        return None
    reports = [_report_from(board.hear("report", other)) for other in range(host.count)]
    say("all stages are timed")
    return profile_of(config, host_of, reports)


class Board:
    """What hosts tell each other while they measure: values that JSON can hold."""

    def __init__(self, host: Membership, deadline_s: float):
        """Nothing is waited for longer than `deadline_s` seconds."""
        self.host = host
        self.deadline_s = deadline_s

    def tell(self, key: str, value: Any) -> None:
        """Tell all hosts a value, once for each key."""
        self.host.put(f"measure/{key}/{self.host.index}", json.dumps(value))

    def hear(self, key: str, source: int) -> Any:
        """What a host has told under a key, as soon as it has.

        Raises:
            DeadlinePassed: it has told nothing in time.
        """
        return json.loads(self.host.get(f"measure/{key}/{source}", self.deadline_s, source=source))

    def wait_for(self, key: str, sources: Sequence[int]) -> None:
        """Return when some hosts have told something under a key."""
        for source in sources:
            self.hear(key, source)

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Tell all hosts a value, and hear theirs."""
        self.tell(key, value)
        return [self.hear(key, source) for source in range(self.host.count)]


def _place_of(devices: Sequence[jax.Device]) -> Place:
    """Where this host is. Its nodes have the same processor if they have the same device.

    On a CPU, hosts with the same cores of one machine have the same processor too. Containers,
    which may not have the same share of it, differ in their names.
    """
    name = socket.gethostname()
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else name
    every_core = range(os.cpu_count() or 1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else every_core
    on_cpu = f"cores {','.join(map(str, sorted(cores)))} of {machine}, {name}"
    return Place(
        machine, [on_cpu if d.platform == "cpu" else f"{d.id} of {machine}" for d in devices]
    )


def _time_stages(
    config: Config, devices: Sequence[jax.Device], places: Sequence[Place], board: Board
) -> dict[str, list[StageTimings]]:
    """The timings of all stages on each processor that is this host's to time.

    The first host that has a processor times it. Everyone compiles at the same time, and then the
    hosts of one machine take turns, since they would disturb each other's figures.
    """
    own, place = board.host.index, places[board.host.index]
    first_host = {p: h for h in reversed(range(len(places))) for p in places[h].processors}
    mine = {
        processor: device
        for processor, device in zip(place.processors, devices, strict=True)
        if first_host[processor] == own
    }
    shapes = shapes_of_stages(config, stage_count(config, sum(len(p.processors) for p in places)))
    for device in mine.values():
        for shape in set(shapes):
            measure_stage(config, shape, device, 0.0)
    board.tell("compiled", True)
    neighbours = [h for h, other in enumerate(places) if other.machine == place.machine]
    board.wait_for("compiled", neighbours)
    board.wait_for("report", [other for other in neighbours if other < own])
    to_time = sum(host in neighbours for host in first_host.values()) * len(set(shapes))
    budget_s = min(STAGE_S, ALL_STAGES_S / to_time)
    timings = {}
    for processor, device in mine.items():
        of_shape = {shape: measure_stage(config, shape, device, budget_s) for shape in set(shapes)}
        timings[processor] = [of_shape[shape] for shape in shapes]
    return timings


def _report_from(told: dict[str, Any]) -> HostReport:
    links = [
        MeasuredLink(**link | {"transfers": [Transfer(**t) for t in link["transfers"]]})
        for link in told["links"]
    ]
    timings = {
        processor: [{name: Timing(**t) for name, t in stage.items()} for stage in stages]
        for processor, stages in told["timings"].items()
    }
    return HostReport(**told | {"links": links, "timings": timings})
