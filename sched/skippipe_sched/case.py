"""A case: what is planned for. Nodes, the links between them, what the work costs, the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from skippipe_sched import fields, links
from skippipe_sched.errors import InputError

Contention = Literal["none", "link"]

REQUIRED = (
    "nodes",
    "locations",
    "links",
    "activation_bytes",
    "stage_bytes",
    "forward_s",
    "stages",
    "path_length",
    "microbatches_per_data_node",
    "memory",
)
OPTIONAL = (
    "same_location",
    "hop_overhead_s",
    "backward_ratio",
    "loss_ratio",
    "stage_cost",
    "contention",
    "rules",
)
DEFAULT_SAME_LOCATION = {"latency_ms": 1.0, "bandwidth_GiB_per_s": 2.0}


@dataclass(frozen=True)
class Node:
    """A place that serves one stage.

    `forward_s` is the time of one forward pass of one microbatch there; `memory` is how many
    microbatches may be in flight on it.
    """

    location: str
    forward_s: float
    memory: int


@dataclass(frozen=True)
class Rules:
    """CC2: how far a path may leave the usual order (DESIGN, "Rules a path keeps").

    At most `max_swaps` visits to a stage below the highest one visited so far, each at most
    `max_swap_distance` stages back; a step forward passes over at most `max_jump` stages.
    """

    max_swaps: int
    max_swap_distance: int
    max_jump: int


@dataclass(frozen=True, eq=False)
class Case:
    """What a plan is made for, checked. Times in seconds, sizes in bytes.

    `stage_cost` says for each stage how many times a node's `forward_s` its forward takes (the data
    stage has the embedding and the head), `stage_bytes` what its replicas average. `source` is the
    mapping it was read from, with everything in it that lay in other files, so that a plan can
    carry its case whole.
    """

    nodes: tuple[Node, ...]
    link_table: links.LinkTable
    activation_bytes: float
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
    source: Mapping[str, Any]

    @cached_property
    def link_matrices(
        self,
    ) -> tuple[Float[np.ndarray, "nodes nodes"], Float[np.ndarray, "nodes nodes"]]:
        """Latency [s] and bandwidth [bytes/s] between nodes, source first."""
        return self.link_table.matrices([node.location for node in self.nodes])

    @cached_property
    def hop_s(self) -> Float[np.ndarray, "nodes nodes"]:
        """Seconds that one activation (or its gradient) takes from node to node; 0 to itself."""
        latency, bandwidth = self.link_matrices
        hop = latency + self.activation_bytes / bandwidth + self.hop_overhead_s
        np.fill_diagonal(hop, 0.0)
        return hop

    def duration(self, kind: str, node: int, stage: int) -> float:
        """Seconds of one operation (F, L or B) on `node` when it serves `stage`."""
        ratio = {"F": 1.0, "L": self.loss_ratio, "B": self.backward_ratio}[kind]
        return ratio * self.stage_cost[stage] * self.nodes[node].forward_s


def load_case(path: Path) -> Case:
    """Read and check a case file (YAML); a link table beside it is read into the case."""
    return parse_case(fields.load_yaml(path, "case"), path.parent)


def parse_case(value: Any, folder: Path = Path()) -> Case:
    """Check a case given as a mapping; `folder` is where a link table would lie.

    Raises:
        InputError: naming the field, its value, and what to write instead.
    """
    given = fields.mapping(value, "case", (*REQUIRED, *OPTIONAL), REQUIRED)
    stages = tuple(
        fields.integer(size, f"case.stages[{stage}]", 1)
        for stage, size in enumerate(fields.sequence(given["stages"], "case.stages"))
    )
    nodes = _nodes(given, sum(stages))
    table_source = links.rows_of(given["links"], folder)
    same = fields.mapping(
        given.get("same_location", DEFAULT_SAME_LOCATION),
        "case.same_location",
        DEFAULT_SAME_LOCATION,
        DEFAULT_SAME_LOCATION,
    )
    same_location = links.link(**_link_arguments(same), field="case.same_location")
    path_length = fields.integer(given["path_length"], "case.path_length", 1)
    if path_length > len(stages):
        raise InputError(
            "case.path_length",
            path_length,
            f"there are only {len(stages)} stages, and a path visits no stage twice",
            f"Write {len(stages)} or less, or add stages to case.stages",
        )
    case = Case(
        nodes=nodes,
        link_table=links.table(table_source, same_location),
        activation_bytes=fields.number(given["activation_bytes"], "case.activation_bytes", 0.0),
        stage_bytes=_of_each_stage(given["stage_bytes"], "case.stage_bytes", len(stages)),
        stage_cost=_of_each_stage(
            given.get("stage_cost", 1.0), "case.stage_cost", len(stages), above=True
        ),
        stages=stages,
        path_length=path_length,
        microbatches=_microbatches(given["microbatches_per_data_node"], stages[0]),
        rules=_rules(given.get("rules", {}), len(stages)),
        hop_overhead_s=fields.number(given.get("hop_overhead_s", 0.0), "case.hop_overhead_s", 0.0),
        backward_ratio=fields.number(
            given.get("backward_ratio", 1.5), "case.backward_ratio", 0.0, above=True
        ),
        loss_ratio=fields.number(given.get("loss_ratio", 0.25), "case.loss_ratio", 0.0),
        contention=fields.text(  # pyright: ignore[reportArgumentType]
            given.get("contention", "link"), "case.contention", ("none", "link")
        ),
        source={**given, "links": table_source},
    )
    _ = case.link_matrices  # Every link that the nodes need must be in the table.
    return case


def _nodes(given: Mapping[str, Any], places: int) -> tuple[Node, ...]:
    locations = [
        fields.text(name, f"case.locations[{index}]")
        for index, name in enumerate(fields.sequence(given["locations"], "case.locations"))
    ]
    forward_s = fields.number(given["forward_s"], "case.forward_s", 0.0, above=True)
    memory = fields.integer(given["memory"], "case.memory", 1)
    described = given["nodes"]
    listed = isinstance(described, list)
    count = len(described) if listed else fields.integer(described, "case.nodes", 1)
    if count != places:
        raise InputError(
            "case.stages",
            given["stages"],
            f"the stages have {places} places, but case.nodes gives {count} nodes",
            "Make the sizes of the stages add up to the number of nodes",
        )
    nodes = []
    for index, node in enumerate(described if listed else [{}] * count):
        field = f"case.nodes[{index}]"
        fields.mapping(node, field, ("location", "forward_s", "memory"))
        nodes.append(
            Node(
                fields.text(
                    node.get("location", locations[index % len(locations)]), f"{field}.location"
                ),
                fields.number(
                    node.get("forward_s", forward_s), f"{field}.forward_s", 0.0, above=True
                ),
                fields.integer(node.get("memory", memory), f"{field}.memory", 1),
            )
        )
    return tuple(nodes)


def _of_each_stage(
    value: Any, field: str, stages: int, *, above: bool = False
) -> tuple[float, ...]:
    if not isinstance(value, list):
        return (fields.number(value, field, 0.0, above=above),) * stages
    if len(value) != stages:
        raise InputError(
            field, value, f"has {len(value)} entries for {stages} stages",
            "Write one number, or one number for each stage",
        )  # fmt: skip
    return tuple(fields.number(v, f"{field}[{s}]", 0.0, above=above) for s, v in enumerate(value))


def _link_arguments(same: Mapping[str, Any]) -> dict[str, Any]:
    return {"latency_ms": same["latency_ms"], "bandwidth_gib": same["bandwidth_GiB_per_s"]}


def _microbatches(value: Any, data_nodes: int) -> tuple[int, ...]:
    field = "case.microbatches_per_data_node"
    if not isinstance(value, list):
        return (fields.integer(value, field, 1),) * data_nodes
    if len(value) != data_nodes:
        raise InputError(
            field, value, f"has {len(value)} entries for {data_nodes} data nodes",
            "Write one number, or one number for each node of the first stage",
        )  # fmt: skip
    return tuple(fields.integer(count, f"{field}[{i}]", 1) for i, count in enumerate(value))


def _rules(value: Any, stages: int) -> Rules:
    names = ("max_swaps", "max_swap_distance", "max_jump")
    given = fields.mapping(value, "case.rules", names)
    return Rules(
        max_swaps=fields.integer(given.get("max_swaps", 0), "case.rules.max_swaps", 0),
        max_swap_distance=fields.integer(
            given.get("max_swap_distance", 1), "case.rules.max_swap_distance", 1
        ),
        max_jump=fields.integer(given.get("max_jump", stages), "case.rules.max_jump", 0),
    )
