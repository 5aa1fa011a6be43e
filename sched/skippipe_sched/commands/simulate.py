"""Simulate one iteration of a plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import InputError, loading

if TYPE_CHECKING:
    from skippipe_sched.problem.plan import Plan
    from skippipe_sched.timing.timeline import Timeline

DRAWS = 200
DESCRIPTION = """\
Simulate one iteration of a plan. Print its duration, longest averaging, lower bound, idle time of
nodes, and the rules that it breaks.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("plan", type=Path, help="JSON file")
    add(
        "--contention", choices=("none", "link", "node"),
        help="transfers that are sequential: none; link: those on one link; node: also those of a "
        "node to other locations (default: as in the case)",
    )  # fmt: skip
    add(
        "--jitter", type=float, metavar="FRACTION",
        help="also replay, hops and operations taking longer by exponentially distributed "
        "fractions with this mean; print median and 95th percentile",
    )  # fmt: skip
    add("--draws", type=int, help=f"number of replays with --jitter (default: {DRAWS})")
    add("--seed", type=int, help="seed of the jitter (default: 0)")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of the plan, and the rules that it breaks."""
    with loading():
        import numpy as np

        from skippipe_sched.problem.plan import load_plan
        from skippipe_sched.problem.rules import violations
        from skippipe_sched.timing.jitter import replay_with_jitter
        from skippipe_sched.timing.simulate import simulate_plan
    for option in ("draws", "seed"):
        given = getattr(arguments, option)
        if given is not None and arguments.jitter is None:
            raise InputError(f"--{option}", given, "has no effect without --jitter", "Add --jitter")
    plan = load_plan(arguments.plan)
    if arguments.contention:
        plan = replace(plan, case=replace(plan.case, contention=arguments.contention))
    timeline = simulate_plan(plan)
    broken = violations(plan.case, plan.stages, plan.microbatches)
    stats: dict[str, float] = {}
    if arguments.jitter is not None:
        draws = DRAWS if arguments.draws is None else arguments.draws
        draws_s = replay_with_jitter(plan, arguments.jitter, draws, arguments.seed or 0)
        stats = {
            "jitter": arguments.jitter,
            "draws": draws,
            "median_s": float(np.median(draws_s)),
            "percentile_95_s": float(np.percentile(draws_s, 95)),
        }
    if arguments.json:
        problems = {"violations": [violation.problem for violation in broken]}
        print(json.dumps(figures(plan, timeline) | stats | problems))
        return 0
    print(summary(plan, timeline))
    if stats:
        print(
            f"with jitter {stats['jitter']:g}, {stats['draws']} draws: median "
            f"{stats['median_s']:.2f} s, 95th percentile {stats['percentile_95_s']:.2f} s"
        )
    for violation in broken:
        print(f"breaks a rule: {violation.problem}")
    return 0


def figures(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Collect the figures of one simulated iteration, as a JSON object; times in seconds.

    In outer mode they are those of the steady state, and `late_s` is added; `placement_bound_s` is
    added for a plan that has one.
    """
    from skippipe_sched.timing.bound import lower_bound_s

    bound_s = lower_bound_s(plan.case, min(len(path) for path in plan.microbatches))
    values = {
        "method": plan.method,
        "iteration_s": timeline.iteration_s,
        "pipeline_s": timeline.pipeline_s,
        "averaging_s": timeline.averaging_s,
        "lower_bound_s": bound_s,
        "gap_to_bound": timeline.iteration_s / bound_s - 1.0,
        "idle_share": timeline.idle_share,
        "predicted_iteration_s": plan.predicted.iteration_s,
    }
    if plan.predicted.placement_bound_s is not None:
        values["placement_bound_s"] = plan.predicted.placement_bound_s
    if plan.case.averaging.is_outer:
        values["late_s"] = timeline.late_s
    return values


def summary(plan: Plan, timeline: Timeline) -> str:
    """Format the figures as a line of text."""
    values = figures(plan, timeline)
    averaging = f"longest averaging {values['averaging_s']:.2f} s"
    if plan.case.averaging.is_outer:
        in_time = f"{timeline.late_s:.2f} s late" if timeline.late_s else "in time"
        averaging = f"longest ring {values['averaging_s']:.2f} s in the background, {in_time}"
    better = ""
    if "placement_bound_s" in values:
        gap = values["iteration_s"] / values["placement_bound_s"] - 1.0
        better = f", placement bound {values['placement_bound_s']:.2f} s (gap {gap:z.0%})"
    return (
        f"{plan.method}: iteration {values['iteration_s']:.2f} s "
        f"(pipeline {values['pipeline_s']:.2f} s, {averaging}), "
        f"lower bound {values['lower_bound_s']:.2f} s "
        f"(gap {values['gap_to_bound']:z.0%}){better}, nodes idle {values['idle_share']:z.0%} "
        f"of the pipeline"
    )
