"""Decisions of a method: placement, paths, and possibly the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation
from skippipe_sched.problem.rules import fair_shares
from skippipe_sched.search.budget import Placement


@dataclass(frozen=True)
class Routes:
    """A placement (the nodes of each stage) and a path for every microbatch.

    `order` is the order of operations of each node, or None for the simulator's dispatch.
    """

    stages: Placement
    paths: tuple[NodePath, ...]
    order: tuple[tuple[Operation, ...], ...] | None = None


def place_in_order(case: Case, nodes: Sequence[int] | None = None) -> Placement:
    """Put `nodes` on the stages in this order; by default all nodes as the case lists them."""
    left = iter(range(len(case.nodes)) if nodes is None else nodes)
    return tuple(tuple(islice(left, size)) for size in case.stages)


def data_node_of_microbatches(case: Case, stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the data node of each microbatch: round robin, each node until it has sent its own."""
    rounds = range(max(case.microbatches))
    return tuple(
        node
        for sent in rounds
        for node, count in zip(stages[0], case.microbatches, strict=True)
        if sent < count
    )


def visits_of_replicas(case: Case, stage: int, nodes: Sequence[int], visits: int) -> dict[int, int]:
    """Distribute a stage's `visits` over its replicas by TC1, with shares rounded to integers."""
    shares = np.array(fair_shares(case, stage, nodes, visits))
    counts = np.floor(shares + 1e-9).astype(int)
    largest_remainders = np.argsort(counts - shares, kind="stable")[: visits - counts.sum()]
    counts[largest_remainders] += 1
    return dict(zip(nodes, counts.tolist(), strict=True))
