"""Simulation of every policy at every fault rate, and tables of the results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from skippipe_sched.churn.iteration_times import IterationTimes
from skippipe_sched.churn.policies import POLICIES, RESTART, REWIND
from skippipe_sched.churn.simulation import (
    ACTIVITIES,
    ChurnCosts,
    Record,
    StepSchedule,
    draw_changes,
    simulate_run,
)
from skippipe_sched.errors import InputError
from skippipe_sched.figures.amounts import duration_text
from skippipe_sched.figures.tables import aligned
from skippipe_sched.problem.plan import Plan


@dataclass(frozen=True)
class Churn:
    """Parameters of churn other than the fault rate. Times in seconds.

    `repair_s` is how long a lost host stays away, `end_s` the length of the simulated run; each
    policy is simulated with the faults of each of the `seeds`.
    """

    repair_s: float
    end_s: float
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """Result of one policy at one fault rate: means over the seeds.

    `goodput` is the number of useful microbatches as a share of those of a run without faults that
    saves as often; `least` and `most` are its extremes over the seeds. `faults` counts the faults
    of all nodes; the other fields are those of `Record`.
    """

    policy: str
    mtbf_s: float
    goodput: float
    least: float
    most: float
    faults: float
    losses: float
    undone: float
    recoveries: dict[str, float]
    spent_s: dict[str, float]


def doublings(mtbf_s: float, steps: int) -> list[float]:
    """List `mtbf_s` times 2**steps to 2**-steps, each half of the one before."""
    return [mtbf_s * 2.0**power for power in range(steps, -steps - 1, -1)]


def sweep(
    plan: Plan,
    mtbfs_s: Sequence[float],
    churn: Churn,
    costs: ChurnCosts,
    times: IterationTimes,
    watch: Callable[[], object] = lambda: None,
) -> list[Point]:
    """Compute a point for each policy at each of the rates, all under the same faults.

    `times` are those of the plan; each rate may use an equal share of the placements that they may
    plan. `watch` is called after every run.

    Raises:
        InputError: if a run without faults would not complete a single step.
    """
    fault_free = fault_free_steps(times(plan.stages), costs, churn.end_s)
    most, points = times.most, []
    for done, mtbf_s in enumerate(mtbfs_s, start=1):
        times.most = most * done // len(mtbfs_s)
        records: dict[str, list[Record]] = {policy: [] for policy in POLICIES}
        faults = []
        for seed in churn.seeds:
            nodes = len(plan.case.nodes)
            changes = draw_changes(nodes, mtbf_s, churn.repair_s, churn.end_s, seed)
            faults.append(sum(not change.is_return for change in changes))
            for policy, policy_records in records.items():
                record = simulate_run(plan, policy, costs, changes, churn.end_s, times)
                policy_records.append(record)
                watch()
        points += [
            _point(policy, mtbf_s, fault_free, faults, own) for policy, own in records.items()
        ]
    return points


def fault_free_steps(iteration_s: float, costs: ChurnCosts, end_s: float) -> int:
    """Count the steps of a run without faults.

    Raises:
        InputError: if there is none.
    """
    steps = StepSchedule(0.0, 0, iteration_s, costs.save_every, costs.save_s).steps_by(end_s)
    if steps == 0:
        problem = f"is too short for a step, which takes {iteration_s:.4g} s"
        raise InputError("--days", end_s / 86400, problem, "Give more days")
    return steps


def _point(
    policy: str, mtbf_s: float, fault_free: int, faults: Sequence[int], records: Sequence[Record]
) -> Point:
    goodputs = [record.steps / fault_free for record in records]

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    kinds = sorted({kind for record in records for kind in record.recoveries})
    return Point(
        policy=policy,
        mtbf_s=mtbf_s,
        goodput=mean(goodputs),
        least=min(goodputs),
        most=max(goodputs),
        faults=mean(faults),
        losses=mean(record.losses for record in records),
        undone=mean(record.undone for record in records),
        recoveries={kind: mean(record.recoveries[kind] for record in records) for kind in kinds},
        spent_s={kind: mean(record.spent_s[kind] for record in records) for kind in ACTIVITIES},
    )


# Smaller differences in goodput are treated as noise.
MARGIN = 0.01

Cells = Sequence[str]


def goodputs(points: Sequence[Point]) -> str:
    """Format the goodput by policy (a line each) and by mean time between faults of a node."""
    mtbfs_s = list(dict.fromkeys(point.mtbf_s for point in points))
    lines: list[Cells] = [("goodput", *map(duration_text, mtbfs_s))]
    for policy in POLICIES:
        own = {point.mtbf_s: point.goodput for point in points if point.policy == policy}
        lines.append((policy, *(f"{own[mtbf_s]:.3f}" for mtbf_s in mtbfs_s)))
    return aligned(lines)


def causes(points: Sequence[Point], mtbf_s: float, end_s: float) -> str:
    """Format the use of time at one rate, by policy: shares of it, steps undone, recoveries."""
    lines: list[Cells] = [("share of time", *ACTIVITIES, "lost", "steps undone", "recoveries")]
    for point in points:
        if point.mtbf_s == mtbf_s:
            shares = [point.spent_s[kind] / end_s for kind in ACTIVITIES]
            counts = [f"{count:.1f} {kind}" for kind, count in point.recoveries.items()]
            cells = [f"{point.losses:.1f}", f"{point.undone:.1f}", ", ".join(counts) or "-"]
            lines.append([point.policy, *(f"{share:.1%}" for share in shares), *cells])
    return aligned(lines, left=(0, 6))


def verdict(points: Sequence[Point]) -> str:
    """Write in one line the rates from which others beat exact recovery by over `MARGIN`."""
    inexact = [name for name, policy in POLICIES.items() if not policy.is_exact]
    mtbfs_s = sorted({point.mtbf_s for point in points}, reverse=True)
    ends = " to ".join(map(duration_text, dict.fromkeys((mtbfs_s[0], mtbfs_s[-1]))))
    return (
        f"exact recovery ({REWIND}) {_comparison(points, inexact, 'the inexact policies')}, and "
        f"{_comparison(points, [RESTART], 'restarting')} "
        f"(mean time between faults of a node: {ends})"
    )


def _comparison(points: Sequence[Point], others: Collection[str], label: str) -> str:
    for exact in sorted(points, key=lambda point: -point.mtbf_s):
        if exact.policy != REWIND:
            continue
        rivals = [p for p in points if p.mtbf_s == exact.mtbf_s and p.policy in others]
        best = max(rivals, key=lambda rival: rival.goodput)
        if best.goodput > exact.goodput + MARGIN:
            name = "" if len(others) == 1 else f" ({best.policy})"
            return (
                f"falls behind {label}{name} at {duration_text(exact.mtbf_s)}, with a goodput of "
                f"{exact.goodput:.3f} against {best.goodput:.3f}"
            )
    return f"never falls behind {label}"
