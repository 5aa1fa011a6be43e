"""Balanced partial paths, chosen greedily by the simulator.

The placement is the given one, or the case's own order of nodes. First the sets of inner stages
that the microbatches visit are chosen so that every inner stage is visited equally often (CC3).
Then each microbatch in turn gets the set, the swaps (CC2) and the replicas (TC1) for which the
microbatches so far end soonest in the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from skippipe_sched.errors import InputError
from skippipe_sched.methods.routes import (
    Routes,
    data_node_of_microbatches,
    place_in_order,
    visits_of_replicas,
)
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath
from skippipe_sched.problem.rules import sequence_problem
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate

MOST_CANDIDATES = 24
# Candidates are simulated with all microbatches before them, at a cost of about the square of their
# number; large cases simulate only those with the shortest hops, as many as the budget pays for at
# this nominal speed.
OPERATIONS_PER_SECOND = 30_000

VisitedStages = tuple[int, ...]


def routes(case: Case, search: Search) -> Routes:
    """Choose balanced partial paths for `case`.

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    random = search.random
    stages = search.placement or place_in_order(case)
    data_nodes = data_node_of_microbatches(case, stages)
    sets_left = Counter(balanced_stage_sets(case, len(data_nodes), random))
    visits_left: dict[int, int] = {}
    for stage, nodes in enumerate(stages[1:], start=1):
        visits = sum(count for chosen, count in sets_left.items() if stage in chosen)
        visits_left |= visits_of_replicas(case, stage, nodes, visits)
    paths: list[NodePath] = []
    one_candidate_each = len(data_nodes) ** 2 * case.path_length
    candidates = min(search.steps(OPERATIONS_PER_SECOND / one_candidate_each), MOST_CANDIDATES)
    for data_node in data_nodes:
        drawn = dict.fromkeys(
            _draw_path(case, stages, data_node, sets_left, visits_left, random)
            for _ in range(MOST_CANDIDATES)
        )
        simulated = 1 if search.end.interrupted else candidates
        nearest = sorted(drawn, key=lambda option: _hops_s(case, option[0]))[:simulated]
        path, chosen = nearest[0]
        if len(nearest) > 1:
            path, chosen = min(nearest, key=lambda option: _cost(case, stages, [*paths, option[0]]))
        paths.append(path)
        sets_left[chosen] -= 1
        for node in path[1:]:
            visits_left[node] -= 1
    return Routes(stages, tuple(paths))


def _cost(case: Case, stages: Sequence[Sequence[int]], paths: list[NodePath]) -> tuple[float, ...]:
    """Compute the end of the pipeline, and as a tie-breaker the hops of the last path [s]."""
    return simulate(case, stages, paths).pipeline_s, _hops_s(case, paths[-1])


def _hops_s(case: Case, path: NodePath) -> float:
    """Compute the sum of the hops of a path from its data node and back [s]."""
    return float(sum(case.forward_hop_s[a, b] for a, b in pairwise([*path, path[0]])))


def _draw_path(
    case: Case,
    stages: Sequence[Sequence[int]],
    data_node: int,
    sets_left: Counter[VisitedStages],
    visits_left: dict[int, int],
    random: np.random.Generator,
) -> tuple[NodePath, VisitedStages]:
    """Draw a path from the remaining visits: a set of stages, perhaps swaps, and near replicas."""
    available = [chosen for chosen, count in sets_left.items() if count > 0]
    chosen = available[random.integers(len(available))]
    path = [data_node]
    for stage in swapped_at_random(case, chosen, random):
        replicas = [node for node in stages[stage] if visits_left[node] > 0]
        # Exponential noise on the scale of the hop: near replicas are likely, far ones possible.
        hop_s = case.forward_hop_s[path[-1], replicas] * random.exponential(size=len(replicas))
        path.append(replicas[int(np.argmin(hop_s))])
    return tuple(path), chosen


def swapped_at_random(
    case: Case, chosen: VisitedStages, random: np.random.Generator
) -> VisitedStages:
    """Sort the stages of a set in ascending order and swap some neighbors, as the rules allow.

    The number of attempted swaps is random, from none to `case.rules.max_swaps`.
    """
    sequence = list(chosen)
    if len(sequence) < 2:
        return chosen
    most = min(case.rules.max_swaps, len(sequence))
    for _ in range(int(random.integers(most + 1))):
        position = int(random.integers(len(sequence) - 1))
        attempt = list(sequence)
        attempt[position : position + 2] = reversed(attempt[position : position + 2])
        if sequence_problem([0, *attempt], case.rules) is None:
            sequence = attempt
    return tuple(sequence)


def balanced_stage_sets(
    case: Case, microbatches: int, random: np.random.Generator
) -> list[VisitedStages]:
    """Draw a set of `path_length` - 1 inner stages per microbatch; all are visited equally often.

    The visits of two inner stages differ by one at most, and each set meets CC2 in ascending order.
    Each set has the stages with the fewest visits so far; imbalance due to the jump limit is then
    repaired.
    """
    visits = np.zeros(len(case.stages))
    sets = []
    for _ in range(microbatches):
        tie_breaker = random.random(len(visits)) * 0.5
        chosen = _lightest_set(visits + tie_breaker, case)
        sets.append(chosen)
        visits[list(chosen)] += 1
    inner = visits[1:]
    if len(inner) == 0 or inner.max() - inner.min() <= 1:
        return sets
    return _nearest_balanced_sets(case, sets)


def _nearest_balanced_sets(case: Case, sets: Sequence[VisitedStages]) -> list[VisitedStages]:
    """Find balanced sets that share as many steps with `sets` as possible.

    Ascending sets are walks from stage 0, with a step into a stage at each position, and together
    they are a flow of whole microbatches over these steps: an integer program finds it.
    """
    from scipy.optimize import Bounds, milp  # Slow to load, and most cases do not need it.

    last_stage = len(case.stages) - 1
    steps = [
        (position, start, end)
        for position in range(case.path_length - 1)
        for start in (range(1, last_stage) if position else (0,))
        for end in range(start + 1, min(start + 1 + case.rules.max_jump, last_stage) + 1)
    ]
    shared = Counter(
        (position, *step) for chosen in sets for position, step in enumerate(pairwise((0, *chosen)))
    )
    position, start, end = np.array(steps).T
    # Rows: visits of each inner stage; all walks start at stage 0; each stage that is entered is
    # left.
    rows = [end == stage for stage in range(1, last_stage + 1)] + [position == 0]
    rows += [
        ((position == later - 1) & (end == stage)) * 1.0 - ((position == later) & (start == stage))
        for later in range(1, case.path_length - 1)
        for stage in range(1, last_stage + 1)
    ]
    visits = len(sets) * (case.path_length - 1)
    low = np.zeros(len(rows))
    low[: last_stage + 1] = [visits // last_stage] * last_stage + [len(sets)]
    high = low.copy()
    high[:last_stage] = -(-visits // last_stage)
    # Each step occurs twice: free up to its number in `sets`, at a price beyond it.
    matrix = np.array(rows, dtype=float)
    most = [shared[step] for step in steps] + [len(sets)] * len(steps)
    solution = milp(
        np.repeat([0.0, 1.0], len(steps)),
        constraints=(np.hstack([matrix, matrix]), low, high),
        bounds=Bounds(0, most),  # pyright: ignore[reportArgumentType]
        integrality=np.ones(2 * len(steps)),
    )
    if solution.x is None:
        problem = "no paths visit every inner stage equally often (CC3) under this limit"
        remedy = f"Raise max_jump (up to {last_stage - 1}) or case.path_length"
        raise InputError("case.rules.max_jump", case.rules.max_jump, problem, remedy)
    counts = np.rint(solution.x).astype(int).reshape(2, -1).sum(axis=0)
    left = Counter(dict(zip(steps, counts.tolist(), strict=True)))
    return [_walk(left, case.path_length - 1) for _ in sets]


def _walk(left: Counter[tuple[int, int, int]], length: int) -> VisitedStages:
    """Remove one walk of `length` steps from the remaining ones, and return its stages."""
    stages = [0]
    for position in range(length):
        step = next(s for s in left if s[:2] == (position, stages[-1]) and left[s] > 0)
        left[step] -= 1
        stages.append(step[2])
    return tuple(stages[1:])


def _lightest_set(weights: np.ndarray, case: Case) -> VisitedStages:
    """Find the `path_length` - 1 ascending stages with least total weight within max_jump."""
    last_stage = len(weights) - 1
    # best[s]: the least weight of a sequence of the current length that ends at stage s.
    best: dict[int, tuple[float, VisitedStages]] = {0: (0.0, ())}
    for _ in range(case.path_length - 1):
        longer: dict[int, tuple[float, VisitedStages]] = {}
        for end, (weight, sequence) in best.items():
            for stage in range(end + 1, min(end + 1 + case.rules.max_jump, last_stage) + 1):
                candidate = (weight + weights[stage], (*sequence, stage))
                if stage not in longer or candidate < longer[stage]:
                    longer[stage] = candidate
        best = longer
    return min(best.values())[1]
