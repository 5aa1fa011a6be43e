"""A time that no plan of a case can beat."""

from __future__ import annotations

import numpy as np

from skippipe_sched.case import Case


def lower_bound_s(case: Case, path_length: int) -> float:
    """A bound below `iteration_s` of every plan whose paths visit `path_length` stages.

    Two things must come to pass before the data stage, which every path ends in, can average:
    one microbatch goes there and back, and the busiest data node runs all of its operations.
    """
    return max(_round_trip_s(case, path_length), _data_node_load_s(case)) + _averaging_s(case)


def _round_trip_s(case: Case, path_length: int) -> float:
    """The quickest that one microbatch can be: on the fastest nodes, over the quickest links."""
    forward_s = min(node.forward_s for node in case.nodes)
    operations = path_length * (1.0 + case.backward_ratio) + case.loss_ratio
    hops = 2 * path_length if path_length > 1 else 0
    return forward_s * operations + hops * _least_hop_s(case)


def _least_hop_s(case: Case) -> float:
    others = ~np.eye(len(case.nodes), dtype=bool)
    return float(case.hop_s[others].min()) if len(case.nodes) > 1 else 0.0


def _data_node_load_s(case: Case) -> float:
    """The load of the busiest data node if the fastest nodes were the data nodes."""
    per_microbatch = 1.0 + case.loss_ratio + case.backward_ratio
    fastest = sorted(node.forward_s for node in case.nodes)[: case.stages[0]]
    # The largest number of microbatches on the fastest node: any other pairing is slower.
    counts = sorted(case.microbatches, reverse=True)
    return per_microbatch * max(n * s for n, s in zip(counts, fastest, strict=True))


def _averaging_s(case: Case) -> float:
    """The quickest averaging of the data stage: over the best links that the case has."""
    replicas = case.stages[0]
    if replicas < 2:
        return 0.0
    latency, bandwidth = case.link_matrices
    others = ~np.eye(len(case.nodes), dtype=bool)
    steps = 2 * (replicas - 1)
    return float(
        steps / replicas * case.stage_bytes[0] / bandwidth[others].max()
        + steps * latency[others].min()
    )
