"""Balanced partial paths, chosen greedily by the simulator.

Placement is the case's own order of nodes. First the sets of inner stages that the microbatches
visit are chosen so that every inner stage is visited equally often (CC3). Then each microbatch in
turn gets the set, the swaps (CC2) and the replicas (TC1) with which the microbatches so far end
soonest in the simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from skippipe_sched.case import Case
from skippipe_sched.errors import InputError
from skippipe_sched.methods.routes import (
    Routes,
    data_node_of_microbatches,
    place_in_order,
    visits_of_replicas,
)
from skippipe_sched.plan import NodePath
from skippipe_sched.rules import sequence_problem
from skippipe_sched.simulate import simulate

MOST_CANDIDATES = 24
# Candidates are simulated with all microbatches before them, which costs about their number
# squared; large cases try fewer, so that the whole stays within about a minute.
OPERATIONS_SIMULATED = 4_000_000

StageSet = tuple[int, ...]


def routes(case: Case, seed: int) -> Routes:
    """Balanced partial paths for `case`.

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    random = np.random.default_rng(seed)
    stages = place_in_order(case)
    data_nodes = data_node_of_microbatches(case, stages)
    sets_left = Counter(_balanced_stage_sets(case, len(data_nodes), random))
    visits_left: dict[int, int] = {}
    for stage, nodes in enumerate(stages[1:], start=1):
        visits = sum(count for chosen, count in sets_left.items() if stage in chosen)
        visits_left |= visits_of_replicas(case, nodes, visits)
    paths: list[NodePath] = []
    candidates = _candidates_affordable(len(data_nodes), case.path_length)
    for data_node in data_nodes:
        drawn = dict.fromkeys(
            _draw_path(case, stages, data_node, sets_left, visits_left, random)
            for _ in range(candidates)
        )
        path, chosen = min(drawn, key=lambda option: _cost(case, stages, [*paths, option[0]]))
        paths.append(path)
        sets_left[chosen] -= 1
        for node in path[1:]:
            visits_left[node] -= 1
    return Routes(stages, tuple(paths))


def _candidates_affordable(microbatches: int, path_length: int) -> int:
    one_candidate_each = microbatches**2 * path_length
    return int(np.clip(OPERATIONS_SIMULATED // one_candidate_each, 1, MOST_CANDIDATES))


def _cost(case: Case, stages: Sequence[Sequence[int]], paths: list[NodePath]) -> tuple[float, ...]:
    """When the pipeline ends, and among equals how long the last path is on the network."""
    *_, last = paths
    hops = sum(case.hop_s[a, b] for a, b in zip(last, [*last[1:], last[0]], strict=True))
    return simulate(case, stages, paths).pipeline_s, float(hops)


def _draw_path(
    case: Case,
    stages: Sequence[Sequence[int]],
    data_node: int,
    sets_left: Counter[StageSet],
    visits_left: dict[int, int],
    random: np.random.Generator,
) -> tuple[NodePath, StageSet]:
    """A path within what is left: a set of stages, perhaps swaps, and replicas near each other."""
    available = [chosen for chosen, count in sets_left.items() if count > 0]
    chosen = available[random.integers(len(available))]
    path = [data_node]
    for stage in _swapped(case, chosen, random):
        replicas = [node for node in stages[stage] if visits_left[node] > 0]
        # Exponential noise with the scale of the hop: near replicas are likely, far ones possible.
        hop_s = case.hop_s[path[-1], replicas] * random.exponential(size=len(replicas))
        path.append(replicas[int(np.argmin(hop_s))])
    return tuple(path), chosen


def _swapped(case: Case, chosen: StageSet, random: np.random.Generator) -> StageSet:
    """The stages of a set in ascending order with some neighbours swapped, as the rules allow."""
    sequence = list(chosen)
    for _ in range(int(random.integers(case.rules.max_swaps + 1))):
        if len(sequence) < 2:
            break
        position = int(random.integers(len(sequence) - 1))
        attempt = list(sequence)
        attempt[position : position + 2] = reversed(attempt[position : position + 2])
        if sequence_problem([0, *attempt], case.rules) is None:
            sequence = attempt
    return tuple(sequence)


def _balanced_stage_sets(
    case: Case, microbatches: int, random: np.random.Generator
) -> list[StageSet]:
    """Sets of `path_length` - 1 inner stages, one a microbatch, that meet CC2 in ascending order
    and together visit every inner stage equally often (difference at most one).

    Each set is the one whose stages were visited least so far; what imbalance the jump limit
    leaves is then repaired by exchanging stages in single sets.
    """
    visits = np.zeros(len(case.stages))
    sets = []
    for _ in range(microbatches):
        tie_breaker = random.random(len(visits)) * 0.5
        chosen = _lightest_set(visits + tie_breaker, case)
        sets.append(chosen)
        visits[list(chosen)] += 1
    for _ in range(microbatches * len(case.stages)):
        inner = visits[1:]
        if len(inner) == 0 or inner.max() - inner.min() <= 1:
            return sets
        exchange = next(_exchanges(case, sets, visits), None)
        if exchange is None:
            break
        microbatch, replacement = exchange
        visits[list(sets[microbatch])] -= 1
        visits[list(replacement)] += 1
        sets[microbatch] = replacement
    raise InputError(
        "case.rules.max_jump",
        case.rules.max_jump,
        "no paths were found that visit every inner stage equally often (CC3) under this limit",
        f"Raise max_jump (at most {len(case.stages) - 2} matters) or case.path_length",
    )


def _exchanges(
    case: Case, sets: Sequence[StageSet], visits: np.ndarray
) -> Iterator[tuple[int, StageSet]]:
    """Exchanges of a stage in one set for one that is visited at least two times less often."""
    stages = range(1, len(visits))
    for much in sorted(stages, key=lambda stage: -visits[stage]):
        for little in sorted(stages, key=lambda stage: visits[stage]):
            if visits[much] - visits[little] < 2:
                break
            for microbatch, chosen in enumerate(sets):
                if much in chosen and little not in chosen:
                    replacement = tuple(sorted({*chosen, little} - {much}))
                    if sequence_problem([0, *replacement], case.rules) is None:
                        yield microbatch, replacement


def _lightest_set(weights: np.ndarray, case: Case) -> StageSet:
    """The ascending stages, `path_length` - 1 of them, with least total weight within max_jump."""
    last_stage = len(weights) - 1
    # best[s]: the least weight of a sequence of the current length that ends at stage s.
    best: dict[int, tuple[float, StageSet]] = {0: (0.0, ())}
    for _ in range(case.path_length - 1):
        longer: dict[int, tuple[float, StageSet]] = {}
        for end, (weight, sequence) in best.items():
            for stage in range(end + 1, min(end + 1 + case.rules.max_jump, last_stage) + 1):
                candidate = (weight + weights[stage], (*sequence, stage))
                if stage not in longer or candidate < longer[stage]:
                    longer[stage] = candidate
        best = longer
    return min(best.values())[1]
