"""Commands of the planner: plan a case, compare the methods, simulate a plan, draw it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from skippipe_sched import compare
from skippipe_sched.errors import InputError, run_command
from skippipe_sched.figures.flows import flows_map
from skippipe_sched.figures.gantt import gantt
from skippipe_sched.figures.paths import paths_picture
from skippipe_sched.figures.trace import chrome_trace
from skippipe_sched.methods import DEFAULT_METHOD, METHODS, plan_best
from skippipe_sched.problem.auto import load_cases
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.problem.rules import violations
from skippipe_sched.search.budget import DEFAULT_BUDGET_S, Search
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.jitter import replay
from skippipe_sched.timing.simulate import Timeline, simulate_plan

# What `plan --robust` plans for unless told otherwise, and `simulate` replays.
DEFAULT_JITTER = 0.3
DEFAULT_DRAWS = 200


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

    plan = commands.add_parser(
        "plan", help="make a plan for a case", description=METHODS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    plan.add_argument("case", type=Path, help="the case, a YAML file")
    plan.add_argument("-o", "--output", type=Path, required=True, help="where to write the plan")
    plan.add_argument(
        "--method", choices=METHODS, default=DEFAULT_METHOD, help="default: %(default)s"
    )
    _add_search_arguments(plan)
    plan.add_argument(
        "--placement", type=Path, metavar="PLAN", help="keep the placement of this plan"
    )
    plan.add_argument(
        "--robust",
        type=float,
        nargs="?",
        const=DEFAULT_JITTER,
        default=0.0,
        metavar="JITTER",
        help="plan for everything taking random times longer, by this mean share "
        "(%(const)s if not given); method joint and full-joint only",
    )
    plan.set_defaults(command=_plan)

    comparison = commands.add_parser("compare", help="plan a case by all methods, side by side")
    comparison.add_argument("case", type=Path, help="the case, a YAML file")
    comparison.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all"
    )
    _add_search_arguments(comparison)
    comparison.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    comparison.add_argument("-o", "--output", type=Path, help="write a picture (SVG) here")
    comparison.set_defaults(command=_compare)

    simulate = commands.add_parser("simulate", help="simulate one iteration of a plan")
    simulate.add_argument("plan", type=Path, help="the plan, a JSON file")
    simulate.add_argument(
        "--contention",
        choices=("none", "link"),
        help="whether transfers on one link follow one another (default: as the plan's case says)",
    )
    simulate.add_argument(
        "--jitter",
        type=float,
        metavar="SHARE",
        help="replay it with every hop and operation taking random times longer, by this mean "
        "share (exponential), and print median and 95th percentile",
    )
    simulate.add_argument(
        "--draws",
        type=int,
        default=DEFAULT_DRAWS,
        help="how often to replay with --jitter (default: %(default)s)",
    )
    simulate.add_argument("--seed", type=int, default=0, help="of the jitter (default: 0)")
    simulate.add_argument("--json", action="store_true", help="print one JSON object")
    simulate.set_defaults(command=_simulate)

    draw = commands.add_parser("draw", help="draw one iteration of a plan")
    draw.add_argument("plan", type=Path, help="the plan, a JSON file")
    draw.add_argument("-o", "--output", type=Path, metavar="SVG", help="a Gantt chart")
    draw.add_argument(
        "--flows", type=Path, metavar="SVG", help="a map of which links carry how much"
    )
    draw.add_argument(
        "--paths", type=Path, metavar="SVG", help="the way of every microbatch through the stages"
    )
    draw.add_argument(
        "--trace", type=Path, metavar="JSON", help="a trace for ui.perfetto.dev, chrome://tracing"
    )
    draw.set_defaults(command=_draw)
    return parser


METHODS_HELP = """\
Makes a plan for a case by one of these methods:
  joint            placement, paths and order searched together (ours)
  full-joint       the same search for full paths: what planning brings without skipping
  full             DT-FM's placement, every microbatch visits every stage
  balanced         partial paths on the case's own order of nodes, greedily
  dtfm-skip        DT-FM's placement, random partial paths
  dtfm-skip-swaps  the same with random swaps
  skippipe         DT-FM's placement, the paper's search of paths that do not collide
  skippipe-no-tc2  the same without looking at collisions
Ctrl-C ends the search with the best plan so far.
"""


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the same seed and budget give the same plan (default: 0)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET_S,
        metavar="SECONDS",
        help="how long to search at most (default: %(default)g)",
    )


def _plan(arguments: argparse.Namespace) -> int:
    _require_writable("--output", arguments.output)
    cases = load_cases(arguments.case)
    if not 0 <= arguments.robust < float("inf"):
        raise InputError(
            "--robust", arguments.robust, "must be a share of 0 or more", "Give 0.3, say"
        )
    if arguments.robust and arguments.method not in ("joint", "full-joint"):
        raise InputError(
            "--robust", arguments.robust, f"the method {arguments.method} cannot plan for jitter",
            "Use --method joint or full-joint",
        )  # fmt: skip
    placement = None
    if arguments.placement is not None:
        placement = load_plan(arguments.placement).stages
        sizes = tuple(len(nodes) for nodes in placement)
        if len(cases) != 1 or sizes != cases[0].stages:
            raise InputError(
                "--placement", str(arguments.placement), f"its stages have sizes {list(sizes)}, "
                "which are not the case's", "Give the plan of a case with the same stages",
            )  # fmt: skip
    bound_s = min(lower_bound_s(case, case.path_length) for case in cases)
    with _progress(arguments.method, bound_s) as watch:
        search = Search(
            arguments.seed, arguments.budget, placement, jitter=arguments.robust, watch=watch
        )
        with search.interruptible():
            plan = plan_best(cases, arguments.method, search)
    if search.end.interrupted:
        print("the search was interrupted: this is the best plan it had", file=sys.stderr)
    elif search.end.cut_short:
        print(
            "the clock ended the search before its work was done: on a machine with less else to "
            "do, the same seed may find another plan",
            file=sys.stderr,
        )
    _write("--output", arguments.output, plan.save)
    print(_summary(plan, simulate_plan(plan)))
    print(f"wrote {arguments.output}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    _require_writable("--json", arguments.json)
    _require_writable("--output", arguments.output)
    cases = load_cases(arguments.case)
    if len(cases) != 1:
        raise InputError(
            "case.stages", "auto", "methods are compared on one case",
            "Run the plan command first and give the sizes and the length that it chose",
        )  # fmt: skip
    with _progress("compare", None) as watch:
        rows = compare.compare(
            cases[0],
            arguments.methods,
            lambda _: Search(arguments.seed, arguments.budget, watch=watch),
        )
    print(compare.table(rows))
    if arguments.json is not None:
        figures = json.dumps(compare.to_json(rows), indent=1) + "\n"
        _write("--json", arguments.json, lambda path: path.write_text(figures, encoding="utf-8"))
    if arguments.output is not None:
        picture = compare.picture(rows, arguments.case.stem)
        _write("--output", arguments.output, lambda path: path.write_text(picture, "utf-8"))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    plan = load_plan(arguments.plan)
    if arguments.contention:
        plan = replace(plan, case=replace(plan.case, contention=arguments.contention))
    timeline = simulate_plan(plan)
    broken = violations(plan.case, plan.stages, plan.microbatches)
    luck: dict[str, float] = {}
    if arguments.jitter is not None:
        draws_s = replay(plan, arguments.jitter, arguments.draws, arguments.seed)
        luck = {
            "jitter": arguments.jitter,
            "draws": arguments.draws,
            "median_s": float(np.median(draws_s)),
            "percentile_95_s": float(np.percentile(draws_s, 95)),
        }
    if arguments.json:
        problems = {"violations": [violation.problem for violation in broken]}
        print(json.dumps(_figures(plan, timeline) | luck | problems))
        return 0
    print(_summary(plan, timeline))
    if luck:
        print(
            f"with jitter {luck['jitter']:g}, {luck['draws']} draws: median "
            f"{luck['median_s']:.2f} s, 95th percentile {luck['percentile_95_s']:.2f} s"
        )
    for violation in broken:
        print(f"breaks a rule: {violation.problem}")
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    plan = load_plan(arguments.plan)
    timeline = simulate_plan(plan)
    pictures: dict[str, Callable[[], str]] = {
        "output": lambda: gantt(plan, timeline),
        "flows": lambda: flows_map(plan, timeline),
        "paths": lambda: paths_picture(plan),
        "trace": lambda: json.dumps(chrome_trace(plan, timeline)) + "\n",
    }
    asked = [name for name in pictures if getattr(arguments, name) is not None]
    if not asked:
        raise InputError(
            "--output",
            None,
            "there is nothing to draw",
            "Give -o, --flows, --paths or --trace, and a file",
        )
    for name in asked:
        text = pictures[name]()
        path = getattr(arguments, name)
        _write(f"--{name}", path, lambda path, text=text: path.write_text(text, encoding="utf-8"))
        print(f"wrote {path}")
    return 0


def _require_writable(option: str, path: Path | None) -> None:
    """Refuse before a search, not after it, what cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(option, str(path), "this is a folder", "Give the path of a file")
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(
            option, str(path), f"cannot write there: {existing} is no folder to write to",
            "Give another path",
        )  # fmt: skip


def _write(option: str, path: Path, write: Callable[[Path], Any]) -> None:
    _require_writable(option, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise InputError(
            option, str(path), f"cannot write there: {error.strerror}", "Give another path"
        ) from error


@contextmanager
def _progress(name: str, bound_s: float | None) -> Iterator[Callable[[float, float], None]]:
    """A bar on a terminal, with the best iteration so far and the bound; elsewhere nothing."""
    format_ = "{desc} {percentage:3.0f}%|{bar}|{postfix}"
    with tqdm(total=1.0, desc=name, bar_format=format_, leave=False, disable=None) as bar:
        bound = "" if bound_s is None else f", bound {bound_s:.2f} s"

        def watch(share: float, best_s: float) -> None:
            bar.n = share
            bar.set_postfix_str(f"best {best_s:.2f} s{bound}")

        yield watch


def _figures(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    bound_s = lower_bound_s(plan.case, min(len(path) for path in plan.microbatches))
    return {
        "method": plan.method,
        "iteration_s": timeline.iteration_s,
        "pipeline_s": timeline.pipeline_s,
        "averaging_s": timeline.averaging_s,
        "lower_bound_s": bound_s,
        "gap_to_bound": timeline.iteration_s / bound_s - 1.0,
        "idle_share": compare.idle_share(timeline),
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
