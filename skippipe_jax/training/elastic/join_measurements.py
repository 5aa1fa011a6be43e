"""Measurements of an extra host before it joined: its links and its device.

The host saves them in its own folder and reports them to the others in each of its generations. So
all hosts make the same plan, and the measurements of a host leave and return with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from skippipe_sched.problem.links import Link
from skippipe_sched.problem.node_addition import NewNode
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import Config
from skippipe_jax.connections.link_probe import MeasuredLink
from skippipe_jax.profiling.stages import BACKWARD, FORWARD, measure_stage, shapes_of_stages
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.storage.files import atomic_write

MEASURED = "measured.json"

STAGE_S = 1.0
"""Seconds for which a stage is timed, compilation excluded."""


@dataclass(frozen=True)
class JoinMeasurements:
    """Measurements of one host.

    Attributes:
        ways: the measured links to other hosts, by host number.
        forward_s: seconds of a forward pass, as for the nodes of a case; None if not measured.
    """

    ways: Mapping[int, MeasuredLink] = field(default_factory=dict)
    forward_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that is sent and saved."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> JoinMeasurements:
        """Parse the JSON form that another host has sent or this one has saved."""
        return msgspec.convert(raw, cls, str_keys=True)

    def keep(self, folder: Path) -> None:
        """Save the measurements in the folder of this host."""
        atomic_write(folder / MEASURED, json.dumps(self.to_json()) + "\n")

    @staticmethod
    def kept(folder: Path) -> dict[str, Any] | None:
        """Read the saved JSON form; None if there is none."""
        path = folder / MEASURED
        return json.loads(path.read_text()) if path.exists() else None


def forward_seconds(
    config: Config, plan: Plan, stage: int, node_spread: NodeSharding
) -> float | None:
    """Measure the seconds of a forward on a node, in the unit of the plan's case.

    Returns None if that case was not measured: its seconds may not be those of real devices.
    """
    if not config.plan.measure:
        return None
    case, shape = plan.case, shapes_of_stages(config, len(plan.stages))[stage]
    measure_stage(config, shape, node_spread, 0.0)
    timed = measure_stage(config, shape, node_spread, STAGE_S)
    both_s = timed[FORWARD].median_s + timed[BACKWARD].median_s
    return both_s / (1.0 + case.backward_ratio) / case.stage_cost[stage]


def new_nodes(
    measured: Mapping[int, JoinMeasurements], host_of: Sequence[int], first: int
) -> dict[int, NewNode]:
    """Describe the extra nodes, numbered from `first`, of hosts with measurements.

    `host_of` is the host of each node.
    """
    return {
        node: NewNode(
            f"place {node}",
            measured[host].forward_s,
            links_to=_links(measured[host], host_of, back=False),
            links_from=_links(measured[host], host_of, back=True),
        )
        for node, host in enumerate(host_of)
        if node >= first and host in measured
    }


def _links(own: JoinMeasurements, host_of: Sequence[int], *, back: bool) -> dict[int, Link]:
    return {
        node: Link(way.latency_s, way.back if back else way.to)
        for node, host in enumerate(host_of)
        if (way := own.ways.get(host)) is not None
    }
