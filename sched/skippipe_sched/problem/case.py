"""Planning case: nodes, the links between them, the costs of the work, and the rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem import links
from skippipe_sched.problem.averaging import AveragingPolicy, parse_averaging

Number = TypeVar("Number", int, float)
Contention = Literal["none", "link", "node"]
CONTENTIONS: tuple[Contention, ...] = ("none", "link", "node")

REQUIRED = ("nodes", "links", "activation_bytes", "stage_bytes", "stages", "path_length")
# Keys of a case for nodes that do not give their own value.
OF_NODES = {"location": "locations", "forward_s": "forward_s", "memory": "memory"}
# Optional key of a case or a node. `memory: auto` is computed from it.
MEMORY_BYTES = "memory_bytes"
# Optional key of a node, for its own device mesh: the number of devices along each axis.
MESH, AXES = "mesh", ("fsdp", "tensor")
# Optional keys of a case or a node, for the node's own connection: the rate of each direction, in
# one of these units.
RATE_UNITS = {unit: links.BANDWIDTHS[f"bandwidth_{unit}"] for unit in ("GiB_per_s", "Mbit_per_s")}
DIRECTIONS = ("uplink", "downlink")
RATES = tuple(f"{direction}_{unit}" for direction in DIRECTIONS for unit in RATE_UNITS)
OPTIONAL = (
    *OF_NODES.values(),
    MEMORY_BYTES,
    "microbatches_per_data_node",
    "microbatches",
    "gradient_bytes",
    "same_location",
    "bandwidth_factor",
    "hop_overhead_s",
    "backward_ratio",
    "loss_ratio",
    "stage_cost",
    "contention",
    *RATES,
    "rules",
    "averaging",
    "left_out",
)
# Value that leaves a choice open; for bytes, a value that only a model determines.
AUTO = "auto"
# Larger values are mistakes, and would only fill the memory.
MOST_NODES, MOST_MICROBATCHES = 10_000, 100_000


@dataclass(frozen=True)
class Node:
    """Worker that serves one stage.

    `forward_s` is the time of one forward pass of one microbatch on it; `memory` is the number of
    microbatches that may be in flight on it. Each of its devices has `memory_bytes`, if given, and
    belongs to its `mesh`, which the planner ignores. Its connection to other locations sends
    `uplink` and receives `downlink` bytes per second, which are used if the case's contention is
    "node".
    """

    location: str
    forward_s: float
    memory: int
    memory_bytes: float | None = None
    mesh: tuple[int, int] | None = None
    uplink: float = math.inf
    downlink: float = math.inf


@dataclass(frozen=True)
class Rules:
    """CC2: how far a path may depart from the usual order (see `skippipe_sched.problem.rules`).

    A path has at most `max_swaps` visits to a stage below the highest one visited so far, each at
    most `max_swap_distance` stages back; a step forward passes over at most `max_jump` stages.
    """

    max_swaps: int
    max_swap_distance: int
    max_jump: int


@dataclass(frozen=True, eq=False)
class Case:
    """Checked planning problem. Times in seconds, sizes in bytes.

    A hop to a forward or to the loss carries `activation_bytes`, a hop to a backward
    `gradient_bytes`. `stage_cost` is, for each stage, the time of its forward as a multiple of a
    node's `forward_s` (the data stage has the embedding and the head), `stage_bytes` the bytes that
    its replicas average, and `averaging` the averaging policy. Stages that are `left_out` have no
    node, and no path visits them. `source` is the mapping that the case was read from, including
    the content of other files, so that a plan can store its whole case.
    """

    nodes: tuple[Node, ...]
    link_table: links.LinkTable
    activation_bytes: float
    gradient_bytes: float
    stage_bytes: tuple[float, ...]
    stage_cost: tuple[float, ...]
    stages: tuple[int, ...]
    path_length: int
    microbatches: tuple[int, ...]
    rules: Rules
    hop_overhead_s: float
    backward_ratio: float
    loss_ratio: float
    contention: Contention
    averaging: AveragingPolicy
    left_out: tuple[int, ...]
    source: Mapping[str, Any]

    @cached_property
    def link_matrices(self) -> tuple[links.Matrix, links.Matrix]:
        """Latency [s] and bandwidth [bytes/s] between nodes, source first, without contention.

        With contention "node", the bandwidth between locations is at most that of the two
        connections.
        """
        latency, bandwidth = self.pair_matrices
        if not self.shares_connections:
            return latency, bandwidth
        sending, receiving = self.connection_rates
        location = np.array([node.location for node in self.nodes])
        apart = location[:, None] != location
        return latency, np.where(
            apart, np.minimum(bandwidth, np.minimum(sending[:, None], receiving)), bandwidth
        )

    @cached_property
    def pair_matrices(self) -> tuple[links.Matrix, links.Matrix]:
        """Latency [s] and bandwidth [bytes/s] of the link of each pair of nodes, source first."""
        return self.link_table.matrices([node.location for node in self.nodes])

    @cached_property
    def location_matrices(self) -> tuple[Int[np.ndarray, " nodes"], links.Matrix, links.Matrix]:
        """Index of each node's location; latency [s] and bandwidth [bytes/s] between locations.

        The bandwidth is that of the fastest pair of their nodes (`link_matrices`).
        """
        names = sorted({node.location for node in self.nodes})
        location = np.array([names.index(node.location) for node in self.nodes])
        latency, bandwidth = self.link_table.matrices(names)
        if self.shares_connections:
            bandwidth = np.zeros_like(bandwidth)
            np.maximum.at(bandwidth, (location[:, None], location), self.link_matrices[1])
        return location, latency, bandwidth

    @property
    def shares_connections(self) -> bool:
        """True if all traffic of a node to other locations shares its connection."""
        return self.contention == "node"

    @cached_property
    def connection_rates(self) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
        """Rates at which each node sends to other locations, and receives [bytes/s].

        A node receives as much as it sends, so it sends at the smaller of its two rates.
        """
        downlink = np.array([node.downlink for node in self.nodes])
        return np.minimum([node.uplink for node in self.nodes], downlink), downlink

    @cached_property
    def visit_load_s(self) -> Float[np.ndarray, " nodes"]:
        """Seconds for which a visit occupies each node's connection, if it leaves the location.

        0 where connections are not shared.
        """
        if not self.shares_connections:
            return np.zeros(len(self.nodes))
        both = self.activation_bytes + self.gradient_bytes
        return both / self.connection_rates[0] + 2 * self.hop_overhead_s

    def leaves_location(self, nodes: Sequence[int]) -> bool:
        """Return whether a ring over these nodes uses their shared connections."""
        return self.shares_connections and len({self.nodes[node].location for node in nodes}) > 1

    def visit_s(self, stage: int) -> Float[np.ndarray, " nodes"]:
        """Compute the effective `forward_s` of each node in a visit to `stage` [s].

        It exceeds the node's own where its connection is busy for longer than the node.
        """
        of_stage = self.stage_cost[stage] * (1.0 + self.backward_ratio)
        forward_s = [node.forward_s for node in self.nodes]
        return np.maximum(forward_s, self.visit_load_s / of_stage)

    @cached_property
    def forward_hop_s(self) -> links.Matrix:
        """Seconds of the hop of one activation from node to node; 0 to itself."""
        return self._hop_s(self.activation_bytes)

    @cached_property
    def backward_hop_s(self) -> links.Matrix:
        """Seconds of the hop of one activation's gradient from node to node; 0 to itself."""
        return self._hop_s(self.gradient_bytes)

    @cached_property
    def round_trip_s(self) -> links.Matrix:
        """Seconds of the hop of an activation from node to node and of its gradient back.

        Not symmetric where the two directions of a link or the two sizes differ.
        """
        return self.forward_hop_s + self.backward_hop_s.T

    def _hop_s(self, size: float) -> links.Matrix:
        latency, bandwidth = self.link_matrices
        hop = latency + size / bandwidth + self.hop_overhead_s
        np.fill_diagonal(hop, 0.0)
        return hop

    def hop_bytes(self, kind: str) -> float:
        """Return the bytes of the hop to an operation (F, L or B)."""
        return self.gradient_bytes if kind == "B" else self.activation_bytes

    def hop_duration(self, kind: str, source: int, target: int) -> float:
        """Return the seconds of the hop from `source` to an operation (F, L or B) on `target`."""
        return float((self.backward_hop_s if kind == "B" else self.forward_hop_s)[source, target])

    def duration(self, kind: str, node: int, stage: int) -> float:
        """Compute the seconds of one operation (F, L or B) on `node` when it serves `stage`."""
        ratio = {"F": 1.0, "L": self.loss_ratio, "B": self.backward_ratio}[kind]
        return ratio * self.stage_cost[stage] * self.nodes[node].forward_s


def load_case(path: Path) -> Case:
    """Read and check a case file (YAML), including its link table."""
    return parse_case(fields.load_yaml(path, "case"), path.parent)


def parse_case(value: Any, folder: Path = Path()) -> Case:
    """Check a case given as a mapping; `folder` is the folder of a link table, if any.

    `locations`, `forward_s` and `memory` may be missing if every node gives its own.
    `bandwidth_factor` multiplies every bandwidth, including the one within a location.
    `microbatches`, in place of `microbatches_per_data_node`, is a total that the data nodes share
    evenly. A gradient has as many bytes as an activation unless `gradient_bytes` is given.

    Raises:
        InputError: naming the field, its value, and what to write instead.
    """
    raw = fields.checked_mapping(value, "case", (*REQUIRED, *OPTIONAL), REQUIRED)
    stages, left_out = sizes_and_left_out(raw)
    nodes = _nodes(raw, stages)
    table_source = links.rows_of(raw["links"], folder)
    path_length = fields.integer(raw["path_length"], "case.path_length", 1)
    visited = len(stages) - len(left_out)
    if path_length > visited:
        problem = f"there are only {visited} stages, and a path visits no stage twice"
        remedy = f"Write {visited} or less, or add {path_length - visited} to case.stages"
        raise InputError("case.path_length", path_length, problem, remedy)
    link_table = _all_times(
        links.table(table_source, links.same_location_of(raw)),
        fields.number(
            raw.get("bandwidth_factor", 1.0), "case.bandwidth_factor", links.LEAST_BANDWIDTH
        ),
    )
    _require_links(nodes, link_table)
    return Case(
        nodes=nodes,
        link_table=link_table,
        activation_bytes=_bytes_of_hop(raw, "activation_bytes"),
        gradient_bytes=_bytes_of_hop(
            raw, "gradient_bytes" if "gradient_bytes" in raw else "activation_bytes"
        ),
        stage_bytes=of_each_stage(_required(raw, "stage_bytes"), "case.stage_bytes", len(stages)),
        stage_cost=of_each_stage(
            raw.get("stage_cost", 1.0), "case.stage_cost", len(stages), above=True
        ),
        stages=stages,
        path_length=path_length,
        microbatches=_microbatches(raw, stages[0]),
        rules=_rules(raw.get("rules", {}), len(stages)),
        hop_overhead_s=fields.duration(raw.get("hop_overhead_s", 0.0), "case.hop_overhead_s"),
        backward_ratio=fields.number(
            raw.get("backward_ratio", 1.5), "case.backward_ratio", 0.0, above=True
        ),
        loss_ratio=fields.number(raw.get("loss_ratio", 0.25), "case.loss_ratio", 0.0),
        contention=fields.text(  # pyright: ignore[reportArgumentType]
            raw.get("contention", "link"), "case.contention", CONTENTIONS
        ),
        averaging=parse_averaging(raw.get("averaging", {}), "case.averaging"),
        left_out=left_out,
        source={**raw, "links": table_source},
    )


def node_count(nodes: Any) -> int:
    """Count the nodes of `case.nodes`, which is their number or a list of them."""
    if isinstance(nodes, list):
        return len(nodes)
    return fields.integer(nodes, "case.nodes", 1, MOST_NODES)


def _nodes(raw: Mapping[str, Any], stages: Sequence[int]) -> tuple[Node, ...]:
    count = node_count(raw["nodes"])
    if count != sum(stages):
        problem = f"the stages have {sum(stages)} nodes in total, but case.nodes has {count}"
        raise InputError("case.stages", raw["stages"], problem, sizes_remedy(count, stages))
    described = raw["nodes"] if isinstance(raw["nodes"], list) else [{}] * count
    for index, node in enumerate(described):
        fields.checked_mapping(
            node, f"case.nodes[{index}]", (*OF_NODES, MEMORY_BYTES, MESH, *RATES)
        )
    shared = _of_all_nodes(raw, described)
    nodes = []
    for index, node in enumerate(described):
        field = f"case.nodes[{index}]"
        merged = {key: values[index % len(values)] for key, values in shared.items()} | node
        nodes.append(
            Node(
                fields.text(merged["location"], f"{field}.location"),
                fields.duration(merged["forward_s"], f"{field}.forward_s", above=True),
                _memory(merged, field),
                _memory_bytes(merged, field),
                _mesh(merged, field),
                *(_rate(direction, raw, node, field) for direction in DIRECTIONS),
            )
        )
    return tuple(nodes)


def _of_all_nodes(
    raw: Mapping[str, Any], described: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Read the values that the case gives its nodes in turn; raise if a node has none."""
    shared = {}
    if "locations" in raw:
        names = enumerate(fields.sequence(raw["locations"], "case.locations"))
        shared["location"] = [fields.text(name, f"case.locations[{n}]") for n, name in names]
    if "forward_s" in raw:
        seconds = fields.duration(raw["forward_s"], "case.forward_s", above=True)
        shared["forward_s"] = [seconds]
    if "memory" in raw:
        shared["memory"] = [_memory(raw, "case")]
    if MEMORY_BYTES in raw:
        shared[MEMORY_BYTES] = [_memory_bytes(raw, "case")]
    for key, of_case in OF_NODES.items():
        unset = [index for index, node in enumerate(described) if key not in node]
        if not unset or key in shared:
            continue
        problem, remedy = "is missing", f"Add {of_case}: to case"
        if isinstance(raw["nodes"], list):
            problem += f", and {len(unset)} of {len(described)} nodes do not set it"
            remedy += f", or {key}: to case.nodes[{unset[0]}]"
            remedy += " and the others" if len(unset) > 1 else ""
        raise InputError(f"case.{of_case}", None, problem, remedy)
    return shared


def _memory(raw: Mapping[str, Any], of: str) -> int:
    return fields.integer(_required(raw, "memory", of, "number of microbatches"), f"{of}.memory", 1)


def _memory_bytes(raw: Mapping[str, Any], of: str) -> float | None:
    size = raw.get(MEMORY_BYTES)
    return None if size is None else fields.number(size, f"{of}.{MEMORY_BYTES}", 0.0, above=True)


def _mesh(node: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    if node.get(MESH) is None:
        return None
    axes = fields.checked_mapping(node[MESH], f"{field}.{MESH}", AXES)
    fsdp, tensor = (fields.integer(axes.get(axis, 1), f"{field}.{MESH}.{axis}", 1) for axis in AXES)
    return fsdp, tensor


def _rate(direction: str, raw: Mapping[str, Any], node: Mapping[str, Any], field: str) -> float:
    """Read the rate of one direction of a node's connection [bytes/s]; infinite by default."""
    rate = math.inf
    for of, values in (("case", raw), (field, node)):
        keys = [f"{direction}_{unit}" for unit in RATE_UNITS if f"{direction}_{unit}" in values]
        for key in keys[1:]:
            problem = f"duplicates {keys[0]}"
            raise InputError(f"{of}.{key}", values[key], problem, "Remove one of them")
        for key in keys:
            if raw.get("contention") != "node":
                raise InputError(
                    f"{of}.{key}",
                    values[key],
                    "requires contention: node, with which the links of a node share a connection",
                    "Write contention: node, or remove this key",
                )
            rate = fields.number(values[key], f"{of}.{key}", links.LEAST_BANDWIDTH)
            rate *= RATE_UNITS[key.removeprefix(f"{direction}_")] * links.GIBIBYTE
    return rate


def of_each_stage(value: Any, field: str, stages: int, *, above: bool = False) -> tuple[float, ...]:
    """Read a number for each stage, from one for all of them or a list."""
    read = partial(fields.number, minimum=0.0, above=above)
    return of_each(value, field, read, stages, ("stages", "stage"))


def of_each(
    value: Any, field: str, read: Callable[[Any, str], Number], count: int, of: tuple[str, str]
) -> tuple[Number, ...]:
    """Read a value for each of `count` things: one for all of them, or a list."""
    if not isinstance(value, list):
        return (read(value, field),) * count
    if len(value) != count:
        problem = f"has {len(value)} entries for {count} {of[0]}"
        raise InputError(field, value, problem, f"Write one number, or one number for each {of[1]}")
    return tuple(read(own, f"{field}[{place}]") for place, own in enumerate(value))


def _bytes_of_hop(raw: Mapping[str, Any], key: str) -> float:
    return fields.number(_required(raw, key), f"case.{key}", 0.0)


def _required(raw: Mapping[str, Any], key: str, of: str = "case", unit: str = "bytes") -> Any:
    """Return a value of a case that is required, in this unit, where no model is known."""
    if raw[key] == AUTO:
        raise InputError(
            f"{of}.{key}",
            AUTO,
            "requires a model, which a case file does not have",
            f"Write the {unit} that skippipe estimate-memory prints for a configuration with this "
            "case as plan.case",
        )
    return raw[key]


def _all_times(table: links.LinkTable, factor: float) -> links.LinkTable:
    """Multiply every bandwidth of the table by `factor`, including the one within a location."""

    def scaled(link: links.Link) -> links.Link:
        return links.Link(link.latency_s, link.bandwidth * factor)

    return links.LinkTable(
        {pair: scaled(link) for pair, link in table.links.items()}, scaled(table.same_location)
    )


def _require_links(nodes: Sequence[Node], table: links.LinkTable) -> None:
    """Require links between all locations that have nodes: a path may connect any two."""
    names = list(dict.fromkeys(node.location for node in nodes))
    missing = [
        (a, b)
        for a, b in combinations(names, 2)
        if (a, b) not in table.links and (b, a) not in table.links
    ]
    lacking = Counter(name for pair in missing for name in pair)
    unreachable = [name for name in names if len(names) > 2 and lacking[name] == len(names) - 1]
    if unreachable:
        missing = [pair for pair in missing if unreachable[0] in pair]
    if unreachable:
        isolated = [index for index, node in enumerate(nodes) if node.location == unreachable[0]]
        raise InputError(
            "case.links",
            unreachable[0],
            f"no node at another location can reach the nodes {isolated} at this location: "
            f"all of its {len(missing)} links are missing",
            f"{table.suggestion(missing[0])}Move these nodes to another location, or add "
            f"{len(missing)} rows, the first: {links.row_for(missing[0])}",
        )
    if missing:
        raise table.missing(missing[0], len(missing))


def _microbatches(raw: Mapping[str, Any], data_nodes: int) -> tuple[int, ...]:
    """Read the microbatches of each data node, from the number of each or from the total."""
    of_each_node = "microbatches_per_data_node"
    if "microbatches" not in raw:
        value = fields.checked_mapping(raw, "case", raw, (of_each_node,))[of_each_node]
        read = partial(fields.integer, minimum=1, maximum=MOST_MICROBATCHES)
        of = "data nodes", "node of the first stage"
        return of_each(value, f"case.{of_each_node}", read, data_nodes, of)
    field = "case.microbatches"
    total = fields.integer(raw["microbatches"], field, 1, MOST_MICROBATCHES)
    if of_each_node in raw:
        problem = f"cannot be combined with {of_each_node}"
        raise InputError(field, total, problem, "Remove one of these keys")
    if total < data_nodes:
        raise InputError(
            field,
            total,
            f"there are {data_nodes} data nodes, and each sends at least one",
            f"Write {data_nodes} or a greater number, or make the first stage {total} or smaller",
        )
    return tuple(-(-(total - position) // data_nodes) for position in range(data_nodes))


def _rules(value: Any, stages: int) -> Rules:
    defaults = {"max_swaps": 0, "max_swap_distance": 1, "max_jump": stages}
    raw = defaults | fields.checked_mapping(value, "case.rules", defaults)
    least = {"max_swaps": 0, "max_swap_distance": 1, "max_jump": 0}
    return Rules(**{k: fields.integer(raw[k], f"case.rules.{k}", least[k]) for k in least})


def sizes_and_left_out(raw: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read the numbers of nodes of a case's stages, and the stages that are left out.

    Raises:
        InputError: if another stage has no node, or one that is left out has some; the first stage
            cannot be left out.
    """
    sizes = fields.sequence(raw["stages"], "case.stages")
    left_out = []
    stages = fields.sequence(raw.get("left_out", []), "case.left_out", minimum_length=0)
    for position, stage in enumerate(stages):
        field = f"case.left_out[{position}]"
        left_out.append(fields.integer(stage, field, 1, len(sizes) - 1))
    if sorted(set(left_out)) != left_out:
        remedy = "Name each stage once, in order"
        raise InputError("case.left_out", left_out, "is not ascending", remedy)
    for stage, size in enumerate(sizes):
        field = f"case.stages[{stage}]"
        if stage in left_out:
            fields.integer(size, field, 0, 0)
        else:
            fields.integer(size, field, 1)
    return tuple(sizes), tuple(left_out)


def sizes_remedy(nodes: int, stages: Sequence[int]) -> str:
    """Write what to change where the sizes of the stages do not add up to the nodes."""
    excess = sum(stages) - nodes
    if excess < 0:
        return f"Add {-excess} to case.stages in total, or remove {-excess} from case.nodes"
    if nodes < len(stages):
        least = len(stages) - nodes
        return (
            f"Each stage needs a node: remove {least} of the stages or add {least} to case.nodes; "
            "then make the totals equal"
        )
    return f"Remove {excess} from case.stages in total, or add {excess} to case.nodes"
