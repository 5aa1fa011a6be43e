"""Make a plan for a case."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.commands.output_files import require_writable, write
from skippipe_sched.commands.search_options import add_search_arguments, progress
from skippipe_sched.errors import InputError, loading
from skippipe_sched.methods import DEFAULT_METHOD, METHODS, begins_from_plans, path_length_of
from skippipe_sched.search.budget import DEFAULT_BOUND_BUDGET_S

if TYPE_CHECKING:
    from skippipe_sched.problem.case import Case
    from skippipe_sched.problem.plan import Plan
    from skippipe_sched.search.budget import Search

DESCRIPTION = "\n".join(
    [
        "Make a plan for a case, by one of these methods:",
        *(f"  {name:<16} {method.about}" for name, method in METHODS.items()),
        "Ctrl-C ends the search and writes the best plan so far.",
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("case", type=Path, help="YAML file")
    add("-o", "--output", type=Path, required=True, help="file for the plan")
    about = "planning method (default: %(default)s)"
    add("--method", choices=METHODS, default=DEFAULT_METHOD, help=about)
    add_search_arguments(parser)
    add(
        "--bound", choices=("quick", "placements"), default="quick",
        help="lower bounds; placements adds a tighter one, in minutes for 20 nodes (default: "
        "%(default)s)",
    )  # fmt: skip
    about = "time limit of --bound placements (default: %(default)gs)"
    add("--bound-budget", default=DEFAULT_BOUND_BUDGET_S, metavar="TIME", help=about)
    add("--placement", type=Path, metavar="PLAN", help="fix the placement to that of this plan")
    known = parser.add_mutually_exclusive_group()
    about = "another starting point of joint: a plan for the same stages"
    known.add_argument("--begin", type=Path, metavar="PLAN", help=about)
    known.add_argument(
        "--improve", type=Path, metavar="PLAN",
        help="the only starting point of joint, to improve within seconds",
    )  # fmt: skip
    add(
        "--compiled", action="store_true",
        help="wait until joint is compiled, also with a budget of 2 s or less, so that the plan "
        "does not depend on previous searches on the machine",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Make a plan, write it, and print its figures."""
    with loading():
        from skippipe_sched import fields
        from skippipe_sched.commands.simulate import summary
        from skippipe_sched.problem.open_case import load_cases
        from skippipe_sched.search.budget import Search
        from skippipe_sched.timing.simulate import simulate_plan
    require_writable("--output", arguments.output, arguments.case)
    cases = load_cases(arguments.case)
    placement = begin = None
    if arguments.placement is not None:
        placement = _plan_of("--placement", arguments.placement, cases, arguments.method).stages
    for option, path in (("--begin", arguments.begin), ("--improve", arguments.improve)):
        if path is not None:
            begin = _plan_of(option, path, cases, arguments.method)
    budget_s = fields.duration(arguments.budget, "--budget", above=True)
    limit_s = fields.duration(arguments.bound_budget, "--bound-budget", above=True)
    improves = arguments.improve is not None
    with progress(arguments.method) as watch:
        search = Search(
            arguments.seed, budget_s, placement, begin, watch, arguments.compiled, improves
        )
        with search.interruptible():
            plan = _searched(cases, search, arguments)
    if search.end.interrupted:
        print("search interrupted; this is the best plan found so far", file=sys.stderr)
    elif search.end.interpreted and not search.end.uncompilable:
        print(
            "the search ran few steps, because it is not compiled yet on this machine; compilation "
            "continues. Run the command again in a minute for a better plan",
            file=sys.stderr,
        )
    elif search.end.cut_short and not search.end.uncompilable:
        print(
            "the time limit (--budget) ended the search before its last step: on a less busy "
            "machine, the same seed may give another plan",
            file=sys.stderr,
        )
    write("--output", arguments.output, plan.save)
    if arguments.bound == "placements":
        # Slow to load, because of SciPy.
        from skippipe_sched.timing.placement_bound import placement_bound_s

        length, found = min(map(len, plan.microbatches)), plan.predicted
        bound_s = placement_bound_s(plan.case, length, found.iteration_s, limit_s)
        plan = replace(plan, predicted=replace(found, placement_bound_s=bound_s))
        write("--output", arguments.output, plan.save)
    print(summary(plan, simulate_plan(plan)))
    print(f"wrote {arguments.output}")
    return 0


def _searched(cases: tuple[Case, ...], search: Search, arguments: argparse.Namespace) -> Plan:
    """Search for the best plan; while joint is being compiled, write one found without it."""
    from skippipe_sched.methods import plan_best
    from skippipe_sched.methods.joint import SHORT_BUDGET_S
    from skippipe_sched.search.compiled import is_compiled

    method, output = arguments.method, arguments.output
    is_short = search.waits_for_compiler or search.budget_s <= SHORT_BUDGET_S
    if is_short or METHODS[method].module != "joint" or is_compiled():
        return plan_best(cases, method, search)
    first = plan_best(cases, method, replace(search, budget_s=SHORT_BUDGET_S))
    if search.end.interrupted:
        return first
    write("--output", output, first.save)
    first_s = first.predicted.iteration_s
    print(f"wrote {output}, a first plan with {first_s:.2f} s per iteration", file=sys.stderr)
    search.end.cut_short = search.end.interpreted = False
    plan = plan_best(cases, method, replace(search, waits_for_compiler=True))
    quicker = min(first, plan, key=lambda candidate: candidate.predicted.iteration_s)
    return quicker if search.end.interpreted else plan


def _plan_of(option: str, path: Path, cases: tuple[Case, ...], method: str) -> Plan:
    """Load another plan, whose placement must fit the case."""
    from skippipe_sched.problem.plan import load_plan

    plan = load_plan(path)
    if len(cases) != 1:
        raise InputError(
            option, str(path), "requires a case with fixed stages and path_length",
            "Replace auto in the case by the sizes and the path length of this plan",
        )  # fmt: skip
    sizes = tuple(len(nodes) for nodes in plan.stages)
    if sizes != cases[0].stages:
        problem = f"its stages have sizes {list(sizes)}, unlike those of the case"
        raise InputError(option, str(path), problem, "Give a plan for a case with the same stages")
    if option == "--placement":
        return plan
    if not begins_from_plans(method):
        problem, remedy = f"is a plan that --method {method} does not use", "Use --method joint"
        raise InputError(option, str(path), problem, remedy)
    if not plan.fits(cases[0], path_length_of(method, cases[0])):
        problem = "its paths differ in number or length from those of the case"
        remedy = "Give a plan for a case with the same microbatches and path_length"
        raise InputError(option, str(path), problem, remedy)
    return plan
