"""The full pipeline: every microbatch visits every stage, in order, on the replicas of its column.

Placement is the case's own order of nodes. Stage by stage, the microbatches are matched with the
replicas so that the hops into the stage are quickest in total and every replica has its share. The
order on the nodes is the simulator's: backward first, within the memory limit, as in 1F1B.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from skippipe_sched.case import Case
from skippipe_sched.methods.routes import (
    Routes,
    data_node_of_microbatches,
    place_in_order,
    visits_of_replicas,
)
from skippipe_sched.search import Search


def routes(case: Case, search: Search) -> Routes:
    """Full paths for `case`. Nothing is drawn, so every seed gives the same."""
    stages = search.placement or place_in_order(case)
    paths = [[node] for node in data_node_of_microbatches(case, stages)]
    for nodes in stages[1:]:
        replicas = visits_of_replicas(case, nodes, len(paths))
        places = [node for node, count in replicas.items() for _ in range(count)]
        came_from = [path[-1] for path in paths]
        _, match = linear_sum_assignment(case.hop_s[np.ix_(came_from, places)])
        for path, place in zip(paths, match, strict=True):
            path.append(places[place])
    return Routes(stages, tuple(tuple(path) for path in paths))
