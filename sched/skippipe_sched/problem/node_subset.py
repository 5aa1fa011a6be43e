"""Cases of some of the nodes or stages of a case, as after a loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import (
    AXES,
    MEMORY_BYTES,
    MESH,
    OF_NODES,
    RATES,
    Case,
    Node,
    parse_case,
)
from skippipe_sched.problem.links import GIBIBYTE

REPLACED = (MEMORY_BYTES, *RATES, "microbatches", "microbatches_per_data_node", "left_out")


def with_nodes(
    case: Case, nodes: Collection[int], stages: Sequence[int], microbatches: Sequence[int]
) -> Case:
    """Make the case of these `nodes` only; everything else stays as it is.

    `stages` are the new sizes of the stages, `microbatches` the numbers that each data node sends.
    Stages without nodes are left out: the path length is at most the number of remaining stages,
    and `max_jump` grows so that one step may replace several former ones. The nodes keep their
    order: node k of the new case is the k-th smallest of `nodes`. In the new case's `source` every
    node has its own location, speed, memory and rates, because values that a case gives its nodes
    in turn would be assigned to other nodes. The link table stays complete.

    Raises:
        InputError: if one of the nodes is not in the case, or as `parse_case` does.
    """
    kept = sorted_nodes(case, nodes)
    counts = list(microbatches)
    source = {
        key: value
        for key, value in case.source.items()
        if key not in (*OF_NODES.values(), *REPLACED)
    }
    left_out = [stage for stage, size in enumerate(stages) if size == 0]
    if left_out:
        rules = dict(case.source.get("rules", {}))
        rules["max_jump"] = case.rules.max_jump * (1 + len(left_out))
        path_length = min(case.path_length, len(stages) - len(left_out))
        source |= {"left_out": left_out, "path_length": path_length, "rules": rules}
    source |= {
        "nodes": [_node_entry(case.nodes[node]) for node in kept],
        "stages": list(stages),
        "microbatches_per_data_node": counts[0] if len(set(counts)) == 1 else counts,
    }
    return parse_case(source)


def without_skipped_stages(case: Case) -> Case:
    """Make a case that has only the stages that are not left out, renumbered.

    Its `source` stays that of the whole case.
    """
    remaining = [stage for stage in range(len(case.stages)) if stage not in case.left_out]
    return replace(
        case,
        stages=tuple(case.stages[stage] for stage in remaining),
        stage_bytes=tuple(case.stage_bytes[stage] for stage in remaining),
        stage_cost=tuple(case.stage_cost[stage] for stage in remaining),
        left_out=(),
    )


def _node_entry(node: Node) -> dict[str, Any]:
    """Write a node as the entry of a case, with all its values."""
    entry = {key: getattr(node, key) for key in (*OF_NODES, MEMORY_BYTES)}
    if node.mesh is not None:
        entry[MESH] = dict(zip(AXES, node.mesh, strict=True))
    entry |= rates_as_keys(node.uplink, node.downlink)
    return {key: value for key, value in entry.items() if value is not None}


def rates_as_keys(uplink: float, downlink: float) -> dict[str, float]:
    """Write the limited rates of a connection [bytes/s] as keys of a case."""
    rates = {"uplink_GiB_per_s": uplink, "downlink_GiB_per_s": downlink}
    return {key: rate / GIBIBYTE for key, rate in rates.items() if isfinite(rate)}


def sorted_nodes(case: Case, nodes: Collection[int]) -> tuple[int, ...]:
    """Sort these nodes, each once.

    Raises:
        InputError: if one of them is not in the case.
    """
    unknown = set(nodes) - set(range(len(case.nodes)))
    if unknown:
        problem = f"the case has no node {min(unknown)}: its nodes are 0 to {len(case.nodes) - 1}"
        raise InputError("nodes", sorted(nodes), problem, "Use only these nodes")
    return tuple(sorted(set(nodes)))
