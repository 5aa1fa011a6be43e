"""Bounds that no placement and no routes can beat.

For one sequence: a route takes its time on hosts and on links, and the stages that it visits on a
host must fit there. The search for the shortest route also returns a bound on the routes that it
dropped.

For all groups: routes are a flow of steps through hosts, where each visit is a run of stages that
fit on the host. On average over time, a host is busy for at most all of the time, and so is a link;
the number of groups on hosts, links and in transit is at most `groups`; and a host runs only stages
that it holds, within its memory. The bound is the largest number of steps per second under these
conditions, from a mixed integer program, or its proved bound after `MOST_NODES`. It ignores that
groups wait for one another, and that each keeps to one route.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from skippipe_sched.serving.case import FRONT, ServingCase
from skippipe_sched.serving.packing import hosts_of_stages
from skippipe_sched.serving.shortest import (
    StageSpan,
    alone,
    empty_room,
    remaining_s,
    runs_from,
    shortest,
)
from skippipe_sched.serving.simulate import Rates

# Limit on nodes of the program's search tree.
MOST_NODES = 200
# Relative tolerance of the solver's conditions.
TOLERANCE = 1e-6
Row = tuple[str, *tuple[int, ...]]
"""Key of a condition: its kind, and its host, stage or link."""


@dataclass(frozen=True)
class _Column:
    """Unknown of the program: a part of the flow, or whether a host holds a stage.

    A part of the flow is in steps per unit of time.

    Attributes:
        rows: its coefficients in the conditions.
        steps: number of steps that end with it.
        is_integer: whether it is 0 or 1.
    """

    rows: Mapping[Row, float]
    steps: float = 0.0
    is_integer: bool = False


def bounds(case: ServingCase) -> Rates:
    """Return the most tokens per second and the least seconds per token.

    They hold for all placements and routes with as few stages without a host as possible. It takes
    about a second for ten hosts, and more for many.
    """
    skips = case.stages - 1 - len(hosts_of_stages(case))
    _, least_s = shortest(case, empty_room(case), alone(case), remaining_s(case, skips))
    columns = [*_visits(case, skips, least_s), *_hops(case, skips, least_s)]
    limits = {"host": 1.0, "link": 1.0, "room": 1.0, "groups": float(case.groups)}
    if skips:
        # It is unknown which stages of a run are skipped.
        limits["runs"] = np.inf
    else:
        columns += _held_stages(case)
    most = (1.0 + TOLERANCE) * _most_steps(columns, limits)
    return Rates(case.slots * min(case.groups, most) / least_s, least_s)


def _visits(case: ServingCase, skips: int, unit_s: float) -> Iterator[_Column]:
    """List the visits to hosts. A step begins with the front's head and stage 0."""
    begin_s = np.where(np.arange(case.hosts) == FRONT, case.head_s + case.step_s[FRONT, 0], np.inf)
    for first in range(1, case.stages + 1):
        for run in runs_from(case, first, skips):
            yield from _visits_of_run(case, run, run.first, run.takes_s, unit_s)
            if first == 1:
                yield from _visits_of_run(case, run, 0, begin_s + run.takes_s, unit_s)
    yield from _visits_of_run(case, StageSpan(1, 1, 0, begin_s), 0, begin_s, unit_s)


def _visits_of_run(
    case: ServingCase,
    run: StageSpan,
    first: int,
    takes_s: Float[np.ndarray, " hosts"],
    unit_s: float,
) -> Iterator[_Column]:
    """List the visits of this run to all hosts with enough memory, for stages from `first` on."""
    for host in np.flatnonzero(np.isfinite(takes_s)).tolist():
        takes = float(takes_s[host]) / unit_s
        rows: dict[Row, float] = {("arrived", first, host): -1.0, ("done", run.end, host): 1.0}
        rows |= {("host", host): takes, ("groups",): takes, ("skips",): float(run.skipped)}
        for stage in range(run.first, run.end):
            rows["runs", stage, host] = float(case.step_s[host, stage]) / unit_s
        yield _Column(rows)


def _hops(case: ServingCase, skips: int, unit_s: float) -> Iterator[_Column]:
    """List the hops between hosts after each stage, and the hops back to the front."""
    pairs = [*itertools.product(range(case.hosts), repeat=2)]
    for (source, target), done in itertools.product(pairs, range(1, case.stages + 1)):
        last = done == case.stages
        if (target != FRONT) if last else (source == target):
            continue
        rows: dict[Row, float] = {("done", done, source): -1.0}
        rows["arrived", 0 if last else done, target] = 1.0
        rows["link", source, target] = float(case.sending_s[source, target]) / unit_s
        rows["groups",] = float(case.hop_s[source, target]) / unit_s
        if last:
            rows["skips",] = -float(skips)
        yield _Column(rows, steps=float(last))


def _held_stages(case: ServingCase) -> Iterator[_Column]:
    """List the stages that each host may hold, which limit the stages that it runs."""
    free_bytes = empty_room(case).free_bytes
    for host, stage in itertools.product(range(case.hosts), range(1, case.stages)):
        if case.stage_bytes[stage] <= free_bytes[host]:
            share = float(case.stage_bytes[stage] / free_bytes[host])
            yield _Column({("runs", stage, host): -1.0, ("room", host): share}, is_integer=True)


def _most_steps(columns: Sequence[_Column], limits: Mapping[str, float]) -> float:
    """Solve the program: return the most steps that end in a unit of time, or a bound on them.

    `limits` are by kind of condition; in the other conditions, inflow equals or exceeds outflow.
    """
    numbers = {
        row: n for n, row in enumerate(dict.fromkeys(row for c in columns for row in c.rows))
    }
    highest = np.array([limits.get(row[0], 0.0) for row in numbers])
    lowest = np.array([0.0 if row[0] in ("arrived", "done") else -np.inf for row in numbers])
    entries = [
        (n, numbers[row], factor) for n, c in enumerate(columns) for row, factor in c.rows.items()
    ]
    column, row, value = zip(*entries, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(numbers), len(columns))).tocsr()
    is_integer = np.array([column.is_integer for column in columns])
    solved = milp(
        -np.array([column.steps for column in columns]),
        integrality=is_integer,
        bounds=Bounds(0.0, np.where(is_integer, 1.0, np.inf)),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(matrix, lowest, highest),  # pyright: ignore[reportArgumentType]
        options={"node_limit": MOST_NODES},
    )
    return -float(solved.mip_dual_bound if is_integer.any() else solved.fun)
