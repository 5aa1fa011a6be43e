"""Cases that leave the sizes of the stages or the length of the paths open.

Such a case has ``stages: auto`` with ``stage_count: N``, or ``path_length: auto`` with
``skip_ratio: [low, high]``, the share of the stages that a path may skip, or both. `candidates`
lists promising concrete cases; `methods.plan_best` chooses one by quick plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import AUTO, REQUIRED, Case, node_count, parse_case

DEFAULT_SKIP_RATIO = (0.0, 0.5)
# Ratios are written as rounded percentages: 0.33 allows a third.
RATIO_TOLERANCE = 0.005
# Share of a stage's replicas that a neighboring case moves, at least one: fewer have little effect.
MOVED_SHARE = 1 / 8
# Each candidate costs a quick plan.
MOST_CANDIDATES = 12

Sizes = tuple[int, ...]


def load_cases(path: Path) -> tuple[Case, ...]:
    """Load the candidates of a case file (YAML); one case if it leaves nothing open."""
    return candidates(fields.load_yaml(path, "case"), path.parent)


def candidates(value: Any, folder: Path = Path()) -> tuple[Case, ...]:
    """List the concrete cases that a case given as a mapping may become, most promising first.

    For each path length within the skip ratio the replicas are distributed in proportion to the
    work of the stages. After these cases follow their neighbors, with a few replicas moved to
    another stage, up to `MOST_CANDIDATES` in all; both are sorted by the work of the busiest stage
    for a microbatch.

    Raises:
        InputError: if there is nothing to choose from, or as `parse_case` does.
    """
    if not isinstance(value, dict) or AUTO not in (value.get("stages"), value.get("path_length")):
        return (parse_case(value, folder),)
    raw = dict(fields.checked_mapping(value, "case", value, REQUIRED))
    if "left_out" in raw:
        problem = "cannot be combined with stages: auto or path_length: auto"
        raise InputError("case.left_out", raw["left_out"], problem, "Remove this key")
    open_sizes = raw["stages"] == AUTO
    if open_sizes:
        raw["stages"] = _any_sizes(raw)
        del raw["stage_count"]
    if raw["path_length"] == AUTO:
        stage_count = len(fields.sequence(raw["stages"], "case.stages"))
        lengths = _path_lengths(raw.pop("skip_ratio", DEFAULT_SKIP_RATIO), stage_count)
    else:
        lengths = [fields.integer(raw["path_length"], "case.path_length", 1)]
    # The rest of the case does not depend on the choice, so it is checked with any choice.
    any_case = parse_case(raw | {"path_length": lengths[0]}, folder)

    balanced, neighbours = [], []
    for length in lengths:
        work = _work(any_case, length)
        sizes = _balanced(any_case, work) if open_sizes else any_case.stages
        balanced.append((_busiest(work, sizes), length, sizes))
        if open_sizes:
            others = _neighbours(any_case, sizes)
            neighbours += [(_busiest(work, other), length, other) for other in others]
    return tuple(
        parse_case({**any_case.source, "stages": list(sizes), "path_length": length})
        for _, length, sizes in (sorted(balanced) + sorted(neighbours))[:MOST_CANDIDATES]
    )


def _any_sizes(raw: Mapping[str, Any]) -> list[int]:
    """Return sizes that fit the nodes, with one data node."""
    fields.checked_mapping(raw, "case", raw, ("stage_count",))
    nodes = node_count(raw["nodes"])
    stages = fields.integer(raw["stage_count"], "case.stage_count", 1)
    if nodes < stages:
        problem = f"there are only {nodes} nodes, and each stage needs one"
        remedy = f"Write {nodes} or less, or add {stages - nodes} nodes"
        raise InputError("case.stage_count", stages, problem, remedy)
    if isinstance(raw.get("microbatches_per_data_node"), list):
        raise InputError(
            "case.microbatches_per_data_node",
            raw["microbatches_per_data_node"],
            "must be one number, as stages: auto leaves the number of data nodes open",
            "Write one number for all data nodes, or replace it by microbatches: (the total)",
        )
    return [*[1] * (stages - 1), nodes - stages + 1]


def _path_lengths(skip_ratio: Any, stages: int) -> list[int]:
    """List the path lengths that skip a share of the stages within the ratio."""
    field = "case.skip_ratio"
    shares = [
        fields.number(share, f"{field}[{index}]", 0.0)
        for index, share in enumerate(fields.sequence(skip_ratio, field))
    ]
    if len(shares) != 2 or max(shares) > 1:
        problem = "must be the minimum and maximum share of skipped stages"
        remedy = f"Write two numbers from 0 to 1, as in {list(DEFAULT_SKIP_RATIO)}"
        raise InputError(field, skip_ratio, problem, remedy)
    low, high = shares

    def excess(length: int) -> float:
        """Compute how far the share that a path of this length skips lies outside the ratio."""
        share = 1 - length / stages
        return max(low - share, share - high)

    lengths = [n for n in range(1, stages + 1) if excess(n) <= RATIO_TOLERANCE]
    if not lengths:
        nearest = min(range(1, stages + 1), key=excess)
        share = round(1 - nearest / stages, 2)
        raise InputError(
            field,
            skip_ratio,
            f"no path through {stages} stages skips a share within this range",
            f"Write [{min(low, share):g}, {max(high, share):g}], which allows paths of {nearest} "
            "stages",
        )
    return lengths


def _work(case: Case, path_length: int) -> Float[np.ndarray, " stages"]:
    """Compute the work of each stage per microbatch in forwards, inner ones on average (CC3).

    Every microbatch visits the data stage, which also computes the loss.
    """
    inner = len(case.stages) - 1
    work = (1.0 + case.backward_ratio) * np.array(case.stage_cost)
    work[1:] *= (path_length - 1) / max(1, inner)
    work[0] += case.loss_ratio * case.stage_cost[0]
    return work


def _busiest(work: Float[np.ndarray, " stages"], sizes: Sizes) -> float:
    return float((work / sizes).max())


def _most_data_nodes(case: Case) -> int:
    """Return the most data nodes possible: each sends a microbatch of the total, if it is given."""
    return min(len(case.nodes), case.source.get("microbatches", len(case.nodes)))


def _balanced(case: Case, work: Float[np.ndarray, " stages"]) -> Sizes:
    """Find the sizes with which the busiest stage has the least work per replica."""
    sizes = np.ones(len(work), dtype=int)
    for _ in range(len(case.nodes) - len(work)):
        load = work / sizes
        if sizes[0] == _most_data_nodes(case):
            load[0] = -1.0
        sizes[np.argmax(load)] += 1
    return tuple(sizes.tolist())


def _neighbours(case: Case, sizes: Sizes) -> list[Sizes]:
    """Move replicas of these sizes; keep one of those that differ in equal inner stages only."""
    found = {_kind(case, sizes): sizes}
    for source, target in permutations(range(len(sizes)), 2):
        moved = max(1, int(MOVED_SHARE * sizes[source]))
        other = np.array(sizes)
        other[[source, target]] += -moved, moved
        if other[source] > 0 and other[0] <= _most_data_nodes(case):
            found.setdefault(_kind(case, other.tolist()), tuple(other.tolist()))
    return [other for other in found.values() if other != sizes]


def _kind(case: Case, sizes: Sequence[int]) -> tuple:
    data, *inner = zip(sizes, case.stage_cost, case.stage_bytes, strict=True)
    return data, *sorted(inner)
