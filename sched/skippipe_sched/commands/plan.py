"""The command `plan`: make a plan for a case."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skippipe_sched.commands.searching import progress
from skippipe_sched.commands.simulate import summary
from skippipe_sched.commands.writing import require_writable, write
from skippipe_sched.errors import InputError
from skippipe_sched.methods import plan_best
from skippipe_sched.problem.auto import load_cases
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.simulate import simulate_plan


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the plan, and say how good it is."""
    require_writable("--output", arguments.output)
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
    placement = begin = None
    if arguments.placement is not None:
        placement = _plan_of("--placement", arguments.placement, cases).stages
    if arguments.begin is not None:
        begin = _plan_of("--begin", arguments.begin, cases)
    bound_s = min(lower_bound_s(case, case.path_length) for case in cases)
    with progress(arguments.method, bound_s) as watch:
        search = Search(arguments.seed, arguments.budget, placement, arguments.robust, begin, watch)
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
    write("--output", arguments.output, plan.save)
    print(summary(plan, simulate_plan(plan)))
    print(f"wrote {arguments.output}")
    return 0


def _plan_of(option: str, path: Path, cases: tuple[Case, ...]) -> Plan:
    """Another plan, whose placement must be one of the case's."""
    plan = load_plan(path)
    sizes = tuple(len(nodes) for nodes in plan.stages)
    if len(cases) != 1 or sizes != cases[0].stages:
        raise InputError(
            option, str(path), f"its stages have sizes {list(sizes)}, "
            "which are not the case's", "Give the plan of a case with the same stages",
        )  # fmt: skip
    sent = tuple(sum(path[0] == node for path in plan.microbatches) for node in plan.stages[0])
    if option == "--begin" and (
        sent != cases[0].microbatches
        or {len(path) for path in plan.microbatches} != {cases[0].path_length}
    ):
        raise InputError(
            option, str(path), "its paths are not as many or not as long as the case's",
            "Give the plan of a case with the same microbatches and path_length",
        )  # fmt: skip
    return plan
