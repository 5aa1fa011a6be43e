"""Case for the planner from measurements of a cluster and from the configuration.

`plan.case`, or the case of the plan in `plan.file`, may have the keys below, which cannot be
measured. Its other keys are ignored, except for the number of `nodes`, by default one per host.

- `locations`, names of the hosts in turn; by default "host 0", "host 1", ...
- `stages` or `stage_count`; by default sizes are auto, and there are as many stages as
  `model.stage_layers` has, or the most that divide the layers and have two replicas each.
- `path_length` or `skip_ratio`; by default paths may skip up to a third of the stages.
- `microbatches` or `microbatches_per_data_node`; by default two for each node.
- `rules`; by default one swap of neighbors, and jumps over any number of stages.
- `memory`, the most microbatches in flight on any node; by default as many as an iteration has.
  The case has fewer if the measured `memory_bytes` hold fewer. With `auto`, the number is left to
  the planner, whose configuration may have another `model.recompute`.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from skippipe_sched import fields
from skippipe_sched.figures.amounts import size_text
from skippipe_sched.problem.case import (
    MEMORY_BYTES,
    MOST_MICROBATCHES,
    OPTIONAL,
    REQUIRED,
    node_count,
)
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.problem.node_subset import rates_as_keys
from skippipe_sched.problem.open_case import AUTO, candidates
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.config import Config, to_tree
from skippipe_jax.models.footprint import averaged_bytes, sizes_of_hops
from skippipe_jax.models.in_flight import USABLE_SHARE, memory_warnings, most_in_flight
from skippipe_jax.profiling.links import MeasuredLink, SimultaneousTransfer, connection_rates
from skippipe_jax.profiling.stages import (
    BACKWARD,
    FORWARD,
    LOSS,
    StageCosts,
    StageTimings,
    Timing,
    fit_costs,
    shapes_of_stages,
)
from skippipe_jax.program.compiler import hosts_of_nodes

SIZES_OF_HOPS = ("activation_bytes", "gradient_bytes")
NOT_MEASURED = (
    *("locations", "stages", "stage_count", "path_length", "skip_ratio"),
    *("microbatches", "microbatches_per_data_node", "rules", "memory"),
)
SHARED_RATES = {"sends": "uplink_GiB_per_s", "receives": "downlink_GiB_per_s"}
DEFAULT_SKIP_RATIO = [0.0, 0.34]
MICROBATCHES_PER_NODE = 2
LEAST_REPLICAS = 2
LEAST_COPY_S = 1e-6

Value = TypeVar("Value")


@dataclass(frozen=True)
class HostReport:
    """Measurements of one host.

    `links` lead to this host, as do the transfers that were `simultaneous`. `copy_s` has the
    seconds for a byte and for an activation from node to node within the host, if it has several
    nodes. `memory_bytes`, which a node may use, `processors` and `devices`, the kind of the first
    device, have an entry for each node; files of earlier versions have no `devices` and no
    `simultaneous`. `timings` are those of the stages on each processor that this host has timed.
    """

    name: str
    links: Sequence[MeasuredLink]
    copy_s: tuple[float, float] | None
    memory_bytes: Sequence[float]
    processors: Sequence[str]
    timings: Mapping[str, Sequence[StageTimings]]
    devices: Sequence[str] = ()
    simultaneous: Sequence[SimultaneousTransfer] = ()


@dataclass(frozen=True)
class Profile:
    """A `case` for the planner; `measured` has all measurements that it was made of.

    `warnings` name the nodes with too little memory.
    """

    case: dict[str, Any]
    measured: dict[str, Any]
    warnings: Sequence[str]

    def save(self, path: Path) -> None:
        """Write the case to `path`, and all measurements beside it, as NAME.measured.json."""
        measurements_path = _measurements_path(path)
        measurements_path.write_text(json.dumps(self.measured, indent=1) + "\n", encoding="utf-8")
        names = dict.fromkeys(report["name"] for report in self.measured["hosts"])
        head = [
            f"Measured by skippipe measure at {self.measured['at']}, "
            f"{len(self.measured['hosts'])} hosts on {', '.join(names)}.",
            f"All measurements: {measurements_path.name}",
            f"Model: {json.dumps(self.measured['model'])}",
            f"Memory: {self.measured['memory']}",
        ]
        text = yaml.safe_dump(
            self.case, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
        )
        path.write_text("".join(f"# {line}\n" for line in head) + text, encoding="utf-8")

    def summary(self) -> str:
        """Return a text about times, memory, bytes, and the slowest and fastest links."""
        forward_s = [node["forward_s"] for node in self.case["nodes"]]
        memory = [node["memory"] for node in self.case["nodes"] if "memory" in node]
        in_flight = f"{min(memory)} to {max(memory)}" if memory else AUTO
        sizes = [node[MEMORY_BYTES] for node in self.case["nodes"]]
        hops = [
            f"{size.removesuffix('_bytes')} {self.case[size] / 1e6:.3f} MB"
            for size in SIZES_OF_HOPS
            if size in self.case
        ]
        stages = ", ".join(f"{size / 1e6:.3f}" for size in self.case["stage_bytes"])
        lines = [
            f"forward {min(forward_s):.4g} to {max(forward_s):.4g} s, backward "
            f"{self.case['backward_ratio']:.2f} times and loss {self.case['loss_ratio']:.2f} times "
            f"as long; {in_flight} microbatches in flight, memory {size_text(min(sizes))} to "
            f"{size_text(max(sizes))}",
            f"{', '.join(hops)}, stages {stages} MB",
        ]
        links = sorted(self.case["links"], key=lambda row: row[3])
        width = max((len(f"{source} -> {target}") for source, target, _, _ in links), default=0)
        for title, rows in (("slowest", links[:3]), ("fastest", links[3:][-3:])):
            lines += [f"{title} links:"] if rows else []
            lines += [
                f"  {f'{source} -> {target}':{width}}  {latency_ms:8.2f} ms"
                f"  {gibibytes * GIBIBYTE / 1e6:10.3f} MB/s"
                for source, target, latency_ms, gibibytes in rows
            ]
        for name in dict.fromkeys(node["location"] for node in self.case["nodes"]):
            own = [node for node in self.case["nodes"] if node["location"] == name]
            shared = [
                f"{verb} at most {rate * GIBIBYTE / 1e6:.3f} MB/s"
                for verb, key in SHARED_RATES.items()
                if (rate := sum(node.get(key, 0.0) for node in own))
            ]
            if shared:
                lines.append(f"shared connection: {name} {' and '.join(shared)}")
        return "\n".join([*lines, *(f"warning: {sentence}" for sentence in self.warnings)])


def _measurements_path(path: Path) -> Path:
    """Return the path of the measurements of the case at `path`."""
    return path.with_suffix(".measured.json")


def read_measured(path: Path) -> dict[str, Any] | None:
    """Read the measurements that `Profile.save` has written for the case at `path`; None if absent.

    Raises:
        InputError: if the file cannot be read.
    """
    measurements_path = _measurements_path(path)
    return (
        fields.load_json(measurements_path, str(measurements_path))
        if measurements_path.exists()
        else None
    )


def profile_from_measured(
    config: Config, measured: Mapping[str, Any], hosts: int
) -> Profile | None:
    """Make a profile from earlier measurements, as `read_measured` returns them.

    Returns None if they are for other hosts, nodes, models or stages. Other keys of `plan.case`,
    and the bytes of hops, may have changed since the measurement.

    Raises:
        InputError: if `plan.case` does not lead to a case, or hosts and nodes do not match.
    """
    if len(measured["hosts"]) != hosts:
        return None
    host_of = check_template(config, hosts)
    measured_for = measured["host_of_node"], measured["model"], measured.get("node")
    if measured_for != ([*host_of], to_tree(config.model), to_tree(config.node)):
        return None
    reports = msgspec.convert(measured["hosts"], list[HostReport])
    stages = stage_count(config, len(host_of))
    if any(len(timed) != stages for report in reports for timed in report.timings.values()):
        return None
    return profile_of(config, host_of, reports, at=measured["at"])


def profile_of(
    config: Config, host_of: Sequence[int], reports: Sequence[HostReport], at: str | None = None
) -> Profile:
    """Make the case for the planner, and include all measurements.

    `at` is the time of the measurement in ISO 8601, by default now.
    """
    case = case_of(config, host_of, reports)
    with_any_memory, *_ = candidates(case | {"memory": 1})
    measured = {
        "at": at or datetime.now(UTC).isoformat(timespec="seconds"),
        "model": to_tree(config.model),
        "node": to_tree(config.node),
        **{size: case[size] for size in SIZES_OF_HOPS if size in case},
        "memory": _memory_note(config),
        "host_of_node": host_of,
        "largest_error_of_costs": _costs(reports, host_of).largest_error,
        "hosts": [asdict(report) for report in reports],
    }
    return Profile(case, measured, memory_warnings(config, with_any_memory))


def check_template(config: Config, hosts: int) -> tuple[int, ...]:
    """Check that `plan.case` leads to a case; return the host of each node.

    Raises:
        InputError: if it does not, or hosts and nodes do not match.
    """
    of_nodes, given = config.cluster.host_of_node, _configured_case(config)
    nodes = node_count(given["nodes"]) if "nodes" in given else hosts
    host_of = hosts_of_nodes(nodes if of_nodes is None else len(of_nodes), hosts, of_nodes)
    shapes = shapes_of_stages(config, stage_count(config, len(host_of)))
    second = Timing(1.0, 1.0, 1.0, 1)
    timings = [{FORWARD: second, LOSS: second, BACKWARD: second} for _ in shapes]
    invented = [
        HostReport(
            name="",
            links=[MeasuredLink(o, host, 0.0, 1.0, None, [], []) for o in range(hosts)],
            copy_s=None,
            memory_bytes=[fields.MAX_NUMBER] * host_of.count(host),
            processors=[""] * host_of.count(host),
            timings={"": timings},
        )
        for host in range(hosts)
    ]
    candidates(case_of(config, host_of, invented) | {"memory": 1})
    return host_of


def case_of(
    config: Config, host_of: Sequence[int], reports: Sequence[HostReport]
) -> dict[str, Any]:
    """Make the case from the reports of all hosts and the template of the configuration."""
    template = _template(config)
    memory = template.pop("memory", MOST_MICROBATCHES)
    most = AUTO if memory == AUTO else fields.integer(memory, "plan.case.memory", 1)
    names = _names(template.pop("locations", None), len(reports))
    costs = _costs(reports, host_of)
    links = [link for report in reports for link in report.links if link.source != link.target]
    overheads_s = [link.overhead_s for link in links if link.overhead_s is not None]
    stages = len(costs.stage_cost)
    case: dict[str, Any] = {
        "nodes": _nodes(reports, host_of, names, costs, links),
        "locations": names,
        "stages": AUTO,
        "path_length": AUTO,
        "rules": {"max_swaps": 1, "max_swap_distance": 1, "max_jump": stages},
        **sizes_of_hops(config),
        "stage_bytes": averaged_bytes(config, stages),
        **config.averaging.of_case,
        "forward_s": _rounded(statistics.median(costs.forward_s)),
        "stage_cost": [_rounded(cost) for cost in costs.stage_cost],
        "backward_ratio": _rounded(costs.backward_ratio),
        "loss_ratio": _rounded(costs.loss_ratio),
        "memory": AUTO,
        "hop_overhead_s": _rounded(max(0.0, statistics.median(overheads_s or [0.0]))),
        "contention": "link",
        **template,
    }
    if any(key in node for node in case["nodes"] for key in SHARED_RATES.values()):
        case["contention"] = "node"
    if case["stages"] == AUTO:
        case["stage_count"] = stages
    if case["path_length"] == AUTO:
        case.setdefault("skip_ratio", DEFAULT_SKIP_RATIO)
    if not {"microbatches", "microbatches_per_data_node"} & template.keys():
        case["microbatches"] = MICROBATCHES_PER_NODE * len(host_of)
    copies_s = [report.copy_s for report in reports if report.copy_s is not None]
    if copies_s:
        case["same_location"] = _same_location(copies_s, case["activation_bytes"])
    case["links"] = [
        [
            names[link.source],
            names[link.target],
            _rounded(1e3 * link.latency_s),
            _rounded(link.bandwidth / GIBIBYTE),
        ]
        for link in sorted(links, key=lambda link: (link.source, link.target))
    ]
    if most != AUTO:
        for node, fits in zip(case["nodes"], _fitting(config, case), strict=True):
            node["memory"] = min(most, fits)
        case["memory"] = min(node["memory"] for node in case["nodes"])
    return case


def _nodes(
    reports: Sequence[HostReport],
    host_of: Sequence[int],
    names: Sequence[str],
    costs: StageCosts,
    links: Sequence[MeasuredLink],
) -> list[dict[str, Any]]:
    """Make the nodes of the case; those of one host get equal parts of a shared connection."""
    transfers = [transfer for report in reports for transfer in report.simultaneous]
    connections = connection_rates(links, transfers, len(reports))
    memory_bytes = _by_node(host_of, [report.memory_bytes for report in reports])
    nodes = []
    for host, forward_s, size in zip(host_of, costs.forward_s, memory_bytes, strict=True):
        rates = rates_as_keys(*connections[host] / host_of.count(host))
        node = {
            "location": names[host],
            "forward_s": _rounded(forward_s),
            # Rounded, as the free memory of a machine changes all the time.
            MEMORY_BYTES: int(float(f"{size:.3g}")),
        }
        nodes.append(node | {key: _rounded(rate) for key, rate in rates.items()})
    return nodes


def _same_location(copies_s: Sequence[tuple[float, float]], size: int) -> dict[str, float]:
    """Fit a link to the slowest copies within a host; `copies_s` are of a byte and `size` bytes."""
    latency_s = max(latency_s for latency_s, _ in copies_s)
    beyond_s = max(LEAST_COPY_S, *(whole_s - latency_s for latency_s, whole_s in copies_s))
    return {
        "latency_ms": _rounded(1e3 * latency_s),
        "bandwidth_GiB_per_s": _rounded(size / beyond_s / GIBIBYTE),
    }


def _fitting(config: Config, case: Mapping[str, Any]) -> list[int]:
    """Return how many microbatches each node holds in every candidate of the case.

    It is 1 if none fits, so that a measurement of minutes is not lost.
    """
    nodes = range(len(case["nodes"]))
    candidates_in_flight = [
        most_in_flight(config, candidate, nodes) for candidate in candidates({**case, "memory": 1})
    ]
    return [max(1, min(of_nodes[node] for of_nodes in candidates_in_flight)) for node in nodes]


def _memory_note(config: Config) -> str:
    """Return an explanation of the number of microbatches in flight."""
    given = _template(config).get("memory")
    if given == AUTO:
        return f"{AUTO}: as many microbatches in flight as {MEMORY_BYTES} holds"
    return (
        f"as many microbatches in flight as {USABLE_SHARE:g} of {MEMORY_BYTES} holds with "
        f"model.recompute: {config.model.recompute}"
        + ("" if given is None else f", but no more than {given} (plan.case.memory)")
    )


def _template(config: Config) -> dict[str, Any]:
    """Return the keys of the configured case that are not measured."""
    return {key: value for key, value in _configured_case(config).items() if key in NOT_MEASURED}


def ignored_keys_text(config: Config) -> str:
    """Return a sentence about ignored keys of the configured case; "" if there are none."""
    keys = [key for key in _configured_case(config) if key not in (*NOT_MEASURED, "nodes")]
    if not keys:
        return ""
    plan = config.plan
    origin = plan.file or (plan.case if isinstance(plan.case, str) else "plan.case")
    return f"measured, so these keys of {origin} are ignored: {', '.join(keys)}"


def _configured_case(config: Config) -> Mapping[str, Any]:
    """Return the configured case; an empty one if there is none."""
    plan = config.plan
    if plan.file is not None:
        return load_plan(Path(plan.file)).case.source
    case = fields.load_yaml(Path(plan.case), "case") if isinstance(plan.case, str) else plan.case
    return fields.checked_mapping(case or {}, "plan.case", (*NOT_MEASURED, *REQUIRED, *OPTIONAL))


def stage_count(config: Config, nodes: int) -> int:
    """Return the number of stages: as configured, or the most with enough replicas."""
    template = _template(config)
    stages = template.get("stages", AUTO)
    if stages != AUTO:
        return len(fields.sequence(stages, "plan.case.stages"))
    if "stage_count" in template:
        return fields.integer(template["stage_count"], "plan.case.stage_count", 1)
    if config.model.stage_layers is not None:
        return len(config.model.stage_layers)
    most = max(nodes // LEAST_REPLICAS, min(nodes, 2))
    return max(n for n in range(1, most + 1) if config.model.layers % n == 0)


def _names(given: Any, hosts: int) -> list[str]:
    """Make a unique name for each host."""
    if given is None:
        return [f"host {host}" for host in range(hosts)]
    names: dict[str, None] = {}
    given = fields.sequence(given, "plan.case.locations")
    for name in itertools.islice(itertools.cycle(given), hosts):
        fields.text(name, "plan.case.locations")
        others = (f"{name} {number}" for number in itertools.count(2))
        names[next(n for n in itertools.chain([name], others) if n not in names)] = None
    return list(names)


def _costs(reports: Sequence[HostReport], host_of: Sequence[int]) -> StageCosts:
    timings = {of: stages for report in reports for of, stages in report.timings.items()}
    processors = _by_node(host_of, [report.processors for report in reports])
    return fit_costs([timings[of] for of in processors])


def _by_node(host_of: Sequence[int], of_hosts: Sequence[Sequence[Value]]) -> list[Value]:
    """Reorder the values of each host's nodes, in their order, by node."""
    unused = [iter(values) for values in of_hosts]
    return [next(unused[host]) for host in host_of]


def _rounded(value: float) -> float:
    """Round to six significant digits."""
    return float(f"{value:.6g}")
