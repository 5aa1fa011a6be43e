"""DT-FM-skip, the paper's simplest baseline: DT-FM's placement and balanced random paths.

Random means not optimized: stage sets that visit all inner stages equally often (CC3) are assigned
to the microbatches at random, in ascending order, and so are the replicas, each by its share (TC1).
With swaps, which the paper does not have, neighbors on a path are also reversed at random, as CC2
allows.
"""

from __future__ import annotations

import numpy as np

from skippipe_sched.methods import dtfm
from skippipe_sched.methods.balanced import balanced_stage_sets, swapped_at_random
from skippipe_sched.methods.routes import Routes, data_node_of_microbatches, visits_of_replicas
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, stage_of_nodes
from skippipe_sched.search.budget import Placement, Search


def routes(case: Case, search: Search, *, swaps: bool = False) -> Routes:
    """Draw balanced paths for `case` at random, with at most as many `swaps` as it allows or none.

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    stages = dtfm.place(case, search)
    paths = random_paths(case, stages, search.random)
    if swaps:
        stage_of = stage_of_nodes(stages)

        def swapped(path: NodePath) -> NodePath:
            node_of = {stage_of[node]: node for node in path[1:]}
            sequence = swapped_at_random(case, tuple(node_of), search.random)
            return path[0], *(node_of[stage] for stage in sequence)

        paths = tuple(map(swapped, paths))
    return Routes(stages, paths)


def random_paths(
    case: Case, stages: Placement, random: np.random.Generator
) -> tuple[NodePath, ...]:
    """Draw random paths on a placement that keep every rule (CC1-CC3, TC1).

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    paths = [[node] for node in data_node_of_microbatches(case, stages)]
    sets = balanced_stage_sets(case, len(paths), random)
    random.shuffle(sets)
    for stage, nodes in enumerate(stages[1:], start=1):
        visitors = [path for path, chosen in zip(paths, sets, strict=True) if stage in chosen]
        visits = visits_of_replicas(case, stage, nodes, len(visitors))
        places = random.permutation([n for n, count in visits.items() for _ in range(count)])
        for path, node in zip(visitors, places.tolist(), strict=True):
            path.append(node)
    return tuple(tuple(path) for path in paths)
