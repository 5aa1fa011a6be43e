"""A case of some of its nodes: what is planned for when the others are lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import OF_NODES, Case, parse_case


def with_nodes(
    case: Case, nodes: Collection[int], stages: Sequence[int], microbatches: Sequence[int]
) -> Case:
    """The case of these `nodes` of it only; everything else stays as it is.

    `stages` are the sizes of the stages now, `microbatches` what each data node sends. The nodes
    keep their order: node k of the new case is the k-th smallest of `nodes`. In the new case's
    `source` every node says its own location, speed and memory, as what a case gives its nodes in
    turn would fall on others. The links stay whole.

    Raises:
        InputError: if one of the nodes is none of the case, or for what `parse_case` refuses.
    """
    kept = sorted_nodes(case, nodes)
    counts = list(microbatches)
    source = {
        key: value
        for key, value in case.source.items()
        if key not in (*OF_NODES.values(), "microbatches", "microbatches_per_data_node")
    }
    source |= {
        "nodes": [{key: getattr(case.nodes[node], key) for key in OF_NODES} for node in kept],
        "stages": list(stages),
        "microbatches_per_data_node": counts[0] if len(set(counts)) == 1 else counts,
    }
    return parse_case(source)


def sorted_nodes(case: Case, nodes: Collection[int]) -> tuple[int, ...]:
    """These nodes in order, each once.

    Raises:
        InputError: if one of them is none of the case.
    """
    strange = set(nodes) - set(range(len(case.nodes)))
    if strange:
        raise InputError(
            "nodes",
            sorted(nodes),
            f"the case has no node {min(strange)}: its nodes are 0 to {len(case.nodes) - 1}",
            "Name some of these",
        )
    return tuple(sorted(set(nodes)))
