"""Full pipeline: every microbatch visits every stage, in order.

The placement is DT-FM's. The microbatches are matched with the replicas stage by stage, given the
replicas of the stages before and after, until no matching improves; then the pipeline is simulated,
and microbatches trade replicas as long as that shortens the iteration. The order on the nodes is
the simulator's: backward first, within the memory limit, as in 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skippipe_sched.methods import dtfm
from skippipe_sched.methods.routes import Routes, data_node_of_microbatches, visits_of_replicas
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, stage_of_nodes
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.timing.simulate import simulate

PLACEMENT_SHARE = 0.4
PATHS_SHARE = 0.6
# Operations simulated per second, which sets the number of trades that a budget pays for.
OPERATIONS_PER_SECOND = 120_000
# Additional cost of a trade, in the same unit.
OPERATIONS_PER_TRADE = 30
# A matching takes time with the cube of its size, so microbatches are matched in blocks.
MATCHED_AT_ONCE = 256
# Stages are matched repeatedly until nothing changes; the limit is for alternating equal costs.
MOST_SWEEPS = 20

# A mutable path, and a position in it.
_Visit = tuple[list[int], int]


def routes(case: Case, search: Search) -> Routes:
    """Search for full paths for `case`."""
    stages = dtfm.place(case, search, PLACEMENT_SHARE)
    paths = matched(case, stages, _first_paths(case, stages))
    return Routes(stages, _trade(case, stages, np.array(paths), search))


def _first_paths(case: Case, stages: Placement) -> tuple[NodePath, ...]:
    """Make paths through all stages, on the replicas in turn, each in proportion to its share."""
    columns = [data_node_of_microbatches(case, stages)]
    for stage, nodes in enumerate(stages[1:], start=1):
        visits = visits_of_replicas(case, stage, nodes, len(columns[0]))
        turns = sorted(((i + 0.5) / n, node) for node, n in visits.items() for i in range(n))
        columns.append(tuple(node for _, node in turns))
    return tuple(zip(*columns, strict=True))


def matched(case: Case, stages: Placement, paths: Sequence[NodePath]) -> tuple[NodePath, ...]:
    """Reassign the visits of every stage of these paths, so that trips are short.

    Stage by stage, the microbatches are matched with the replicas, given the previous and next node
    of each. Every microbatch keeps its stages, and every replica its number of visits.
    """
    from scipy.optimize import linear_sum_assignment  # Slow to load.

    stage_of = stage_of_nodes(stages)
    dealt = [list(path) for path in paths]
    visitors: list[list[_Visit]] = [[] for _ in stages]
    for path in dealt:
        for position, node in enumerate(path):
            visitors[stage_of[node]].append((path, position))
    blocks = [
        visits[start : start + MATCHED_AT_ONCE]
        for visits in visitors[1:]
        for start in range(0, len(visits), MATCHED_AT_ONCE)
    ]
    for sweep in range(MOST_SWEEPS):
        changed = False
        for block in blocks:
            places = [path[position] for path, position in block]
            before = [path[position - 1] for path, position in block]
            cost = case.round_trip_s[np.ix_(before, places)]
            # In the first sweep the next stage is not matched yet and gives no information.
            if sweep > 0:
                following = [path[(position + 1) % len(path)] for path, position in block]
                cost = cost + case.round_trip_s.T[np.ix_(following, places)]
            _, match = linear_sum_assignment(cost)
            for (path, position), place in zip(block, match.tolist(), strict=True):
                changed |= path[position] != places[place]
                path[position] = places[place]
        if not changed and sweep > 0:
            break
    return tuple(tuple(path) for path in dealt)


def _trade(
    case: Case, stages: Placement, nodes: np.ndarray, search: Search
) -> tuple[NodePath, ...]:
    """Let two microbatches trade their replicas of one or more stages, if that is no slower."""
    random = search.random
    best = _judge(case, stages, nodes)
    search.found(best[0])
    if nodes.shape[1] == 1:
        return _paths(nodes)
    operations = len(nodes) * (2 * len(stages) + 1) + OPERATIONS_PER_TRADE
    for _ in range(search.steps(PATHS_SHARE * OPERATIONS_PER_SECOND / operations)):
        if search.stopped():
            break
        first, second = random.integers(len(nodes), size=2)
        start, end = sorted(random.integers(1, nodes.shape[1] + 1, size=2))
        traded = nodes.copy()
        traded[first, start:end] = nodes[second, start:end]
        traded[second, start:end] = nodes[first, start:end]
        if np.array_equal(traded, nodes):
            continue
        judged = _judge(case, stages, traded)
        if judged <= best:
            nodes, best = traded, judged
            search.found(best[0])
    return _paths(nodes)


def _judge(case: Case, stages: Placement, nodes: np.ndarray) -> tuple[float, float]:
    timeline = simulate(case, stages, _paths(nodes))
    return timeline.iteration_s, timeline.pipeline_s


def _paths(nodes: np.ndarray) -> tuple[NodePath, ...]:
    return tuple(tuple(path) for path in nodes.tolist())
