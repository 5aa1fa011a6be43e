"""What a sweep says: tables, and the rate of faults from which on another policy pays more."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skippipe_sched.churn.life import DOWN, NOTICING, REGROUPING
from skippipe_sched.churn.policies import POLICIES, RESTART, REWIND
from skippipe_sched.churn.sweep import Point
from skippipe_sched.figures.amounts import duration_text
from skippipe_sched.figures.tables import aligned

# What is less counts as luck of the draw.
MARGIN = 0.01

Cells = Sequence[str]


def goodputs(points: Sequence[Point]) -> str:
    """Goodput by policy (a line each) and by mean time between faults of a node."""
    mtbfs_s = list(dict.fromkeys(point.mtbf_s for point in points))
    lines: list[Cells] = [("goodput", *map(duration_text, mtbfs_s))]
    for policy in POLICIES:
        own = {point.mtbf_s: point.goodput for point in points if point.policy == policy}
        lines.append((policy, *(f"{own[mtbf_s]:.3f}" for mtbf_s in mtbfs_s)))
    return aligned(lines)


def causes(points: Sequence[Point], mtbf_s: float, end_s: float) -> str:
    """Where the time goes at one rate, by policy: shares of the run, steps undone, recoveries."""
    lines: list[Cells] = [
        ("of the time", NOTICING, REGROUPING, DOWN, "lost", "steps undone", "recoveries")
    ]
    for point in points:
        if point.mtbf_s == mtbf_s:
            shares = [point.spent_s[kind] / end_s for kind in (NOTICING, REGROUPING, DOWN)]
            recoveries = ", ".join(
                f"{count:.1f} {kind}" for kind, count in point.recoveries.items()
            )
            lines.append(
                (
                    point.policy,
                    *(f"{share:.1%}" for share in shares),
                    f"{point.losses:.1f}",
                    f"{point.undone:.1f}",
                    recoveries or "-",
                )
            )
    return aligned(lines, left=(0, 6))


def verdict(points: Sequence[Point]) -> str:
    """One line: from which rate on exact survival has less than others, by more than `MARGIN`."""
    inexact = [name for name, policy in POLICIES.items() if not policy.is_exact]
    mtbfs_s = sorted({point.mtbf_s for point in points}, reverse=True)
    ends = " to ".join(map(duration_text, dict.fromkeys((mtbfs_s[0], mtbfs_s[-1]))))
    return (
        f"exact survival ({REWIND}) {_stops(points, inexact, 'the inexact policies')}, and "
        f"{_stops(points, [RESTART], 'restarting')} (with {ends} between the faults of a node)"
    )


def _stops(points: Sequence[Point], others: Collection[str], called: str) -> str:
    for own in sorted(points, key=lambda point: -point.mtbf_s):
        if own.policy != REWIND:
            continue
        rivals = [p for p in points if p.mtbf_s == own.mtbf_s and p.policy in others]
        best = max(rivals, key=lambda rival: rival.goodput)
        if best.goodput > own.goodput + MARGIN:
            name = "" if len(others) == 1 else f" ({best.policy})"
            return (
                f"stops paying against {called}{name} at {duration_text(own.mtbf_s)}, with "
                f"{own.goodput:.3f} against {best.goodput:.3f}"
            )
    return f"never stops paying against {called}"
