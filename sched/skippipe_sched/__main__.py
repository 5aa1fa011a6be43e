"""Commands of the planner: plan a case, simulate a plan, draw it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from skippipe_sched.bound import lower_bound_s
from skippipe_sched.case import load_case
from skippipe_sched.draw import gantt
from skippipe_sched.errors import InputError, run_command
from skippipe_sched.methods import METHODS, make_plan
from skippipe_sched.plan import Plan, load_plan
from skippipe_sched.rules import violations
from skippipe_sched.search import Search
from skippipe_sched.simulate import Timeline, simulate_plan


def main() -> int:
    """Parse the command line and run one command; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_sched",
        description="Plans which node serves which stage and which way every microbatch goes.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="make a plan for a case")
    plan.add_argument("case", type=Path, help="the case, a YAML file")
    plan.add_argument("-o", "--output", type=Path, required=True, help="where to write the plan")
    plan.add_argument("--method", choices=METHODS, default="balanced", help="default: %(default)s")
    plan.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same plan (default: 0)"
    )
    plan.set_defaults(command=_plan)

    simulate = commands.add_parser("simulate", help="simulate one iteration of a plan")
    simulate.add_argument("plan", type=Path, help="the plan, a JSON file")
    simulate.add_argument(
        "--contention",
        choices=("none", "link"),
        help="whether transfers on one link follow one another (default: as the plan's case says)",
    )
    simulate.add_argument("--json", action="store_true", help="print one JSON object")
    simulate.set_defaults(command=_simulate)

    draw = commands.add_parser("draw", help="draw one iteration of a plan as a Gantt chart")
    draw.add_argument("plan", type=Path, help="the plan, a JSON file")
    draw.add_argument("-o", "--output", type=Path, required=True, help="the SVG file to write")
    draw.set_defaults(command=_draw)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    plan = make_plan(load_case(arguments.case), arguments.method, Search(arguments.seed))
    _write(arguments.output, lambda path: plan.save(path))
    print(_summary(plan, simulate_plan(plan)))
    print(f"wrote {arguments.output}")
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    plan = load_plan(arguments.plan)
    if arguments.contention:
        plan = replace(plan, case=replace(plan.case, contention=arguments.contention))
    timeline = simulate_plan(plan)
    broken = violations(plan.case, plan.stages, plan.microbatches)
    if arguments.json:
        print(json.dumps(_figures(plan, timeline) | {"violations": [v.problem for v in broken]}))
    else:
        print(_summary(plan, timeline))
        for violation in broken:
            print(f"breaks a rule: {violation.problem}")
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    plan = load_plan(arguments.plan)
    picture = gantt(plan, simulate_plan(plan))
    _write(arguments.output, lambda path: path.write_text(picture, encoding="utf-8"))
    print(f"wrote {arguments.output}")
    return 0


def _write(path: Path, write) -> None:
    if path.is_dir():
        raise InputError("--output", str(path), "this is a folder", "Give the path of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise InputError(
            "--output", str(path), f"cannot write there: {error.strerror}", "Give another path"
        ) from error


def _figures(plan: Plan, timeline: Timeline) -> dict[str, float | str]:
    bound_s = lower_bound_s(plan.case, min(len(path) for path in plan.microbatches))
    idle = 1.0 - sum(timeline.busy_s) / (timeline.nodes * timeline.pipeline_s)
    return {
        "method": plan.method,
        "iteration_s": timeline.iteration_s,
        "pipeline_s": timeline.pipeline_s,
        "averaging_s": timeline.averaging_s,
        "lower_bound_s": bound_s,
        "gap_to_bound": timeline.iteration_s / bound_s - 1.0,
        "idle_share": idle,
        "predicted_iteration_s": plan.predicted.iteration_s,
    }


def _summary(plan: Plan, timeline: Timeline) -> str:
    figures = _figures(plan, timeline)
    return (
        f"{plan.method}: iteration {figures['iteration_s']:.2f} s "
        f"(pipeline {figures['pipeline_s']:.2f} s, longest averaging "
        f"{figures['averaging_s']:.2f} s), lower bound {figures['lower_bound_s']:.2f} s "
        f"(gap {figures['gap_to_bound']:z.0%}), nodes idle {figures['idle_share']:z.0%} "
        f"of the pipeline"
    )


if __name__ == "__main__":
    sys.exit(main())
