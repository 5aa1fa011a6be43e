"""Simulate a run whose hosts fail and return."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched import fields
from skippipe_sched.churn.policies import POLICIES
from skippipe_sched.commands.output_files import require_writable, write
from skippipe_sched.commands.search_options import progress
from skippipe_sched.errors import InputError, loading
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

if TYPE_CHECKING:
    from skippipe_sched.churn.simulation import ChurnCosts
    from skippipe_sched.churn.sweep import Churn
    from skippipe_sched.problem.plan import Plan

# Larger values are mistakes, and would only fill the memory.
MAX_FAULTS, MAX_SEEDS, MAX_DOUBLINGS = 10_000_000, 1000, 20
DAY_S = 86400.0
DESCRIPTION = "\n".join(
    [
        "Simulate a run whose hosts, of one node each, fail at random and return. Print the",
        "goodput, useful microbatches relative to a run without faults, by policy:",
        *(f"  {name:<8} {policy.about}" for name, policy in POLICIES.items()),
        "All but restart continue without failed hosts while every stage has a live host.",
        "All see the same faults.",
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    # Otherwise argparse takes -5h for an option, and reports that the time before it is missing.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    parser.add_argument("case", type=Path, help="YAML file to plan first; or a plan, a .json file")
    time = parser.add_argument_group("faults")
    about = "mean time between faults of a node, such as 5min, 2h or 7d"
    time.add_argument("--mtbf", required=True, metavar="TIME", help=about)
    _add(time, "--repair", "10min", "downtime of a failed node, startup included", "TIME")
    _add(time, "--days", 7, "simulated time in days", type=float)
    _add(time, "--sweep", 3, "times to halve and to double --mtbf", "N", type=int)
    _add(time, "--seed", 0, "seed of the faults and of the search", type=int)
    about = "draws of the faults, the first with --seed"
    _add(time, "--seeds", 3, about, "N", type=int)
    costs = parser.add_argument_group("costs")
    _add(costs, "--heartbeat", "30s", "time until a failure is detected", "TIME")
    _add(costs, "--regroup", "1s", "time to form a generation, without planning", "TIME")
    _add(costs, "--restore", "10s", "time of live hosts to read a checkpoint", "TIME")
    _add(costs, "--restart", "2min", "time to restart a run once all hosts are present", "TIME")
    _add(costs, "--checkpoint-every", 50, "interval of checkpoints, in steps", "STEPS", type=int)
    _add(costs, "--checkpoint", "1s", "pause of training for a checkpoint", "TIME")
    _add(costs, "--copy-every", 10, "interval of buddy checkpoints, in steps", "STEPS", type=int)
    costs.add_argument(
        "--state-factor", type=float, default=3.0, metavar="FACTOR",
        help="state of a stage as a multiple of stage_bytes (default: %(default)g, for parameters "
        "and two moments)",
    )  # fmt: skip
    plans = parser.add_argument_group("plans")
    about = "method of the plan for all nodes"
    _add(plans, "--method", DEFAULT_METHOD, about, choices=METHODS)
    _add(plans, "--budget", f"{DEFAULT_BUDGET_S:g}s", "time limit of the search", "TIME")
    plans.add_argument(
        "--plans", type=int, metavar="N",
        help="maximum sets of live nodes to plan for; others are estimated (default: as many as "
        "a few minutes allow)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="file for a plot")


def _add(
    group: argparse._ArgumentGroup,
    option: str,
    default: object,
    about: str,
    metavar: str | None = None,
    **kind: Any,
) -> None:
    about += " (default: %(default)s)"
    group.add_argument(option, default=default, metavar=metavar, help=about, **kind)


def run(arguments: argparse.Namespace) -> int:
    """Print tables and a verdict, and write the requested figures and picture."""
    with loading():
        from tqdm import tqdm

        from skippipe_sched.churn.iteration_times import (
            IterationTimes,
            max_planned_placements,
            planning_s,
        )
        from skippipe_sched.churn.picture import picture
        from skippipe_sched.churn.sweep import causes, doublings, goodputs, sweep, verdict
    require_writable("--json", arguments.json, arguments.case)
    require_writable("--figure", arguments.figure, arguments.case)
    churn, costs = _churn(arguments), _costs(arguments)
    mtbf_s = fields.duration(arguments.mtbf, "--mtbf", above=True)
    mtbfs_s = doublings(mtbf_s, fields.integer(arguments.sweep, "--sweep", 0, MAX_DOUBLINGS))
    plans = arguments.plans
    max_plans = None if plans is None else fields.integer(plans, "--plans", 1)
    plan = _plan(arguments)
    _require_few_faults(len(plan.case.nodes), mtbfs_s[-1], churn)
    costs = replace(costs, planning_s=planning_s(plan))
    runs = len(mtbfs_s) * len(churn.seeds) * len(POLICIES)
    with tqdm(total=runs, desc="simulate-faults", unit="run", leave=False, disable=None) as bar:
        times = IterationTimes(
            plan,
            max_plans or max_planned_placements(plan),
            lambda planned: bar.set_postfix(planned=planned),
        )
        points = sweep(plan, mtbfs_s, churn, costs, times, bar.update)
    print(
        f"{len(plan.case.nodes)} nodes, {times(plan.stages):.2f} s per iteration, "
        f"{arguments.days:g} days, {len(churn.seeds)} draws; {times.planned} sets of live nodes "
        f"planned, {times.estimated_placements} estimated from similar sets"
    )
    print(f"\n{goodputs(points)}")
    print(f"\n{causes(points, mtbf_s, churn.end_s)}")
    print(f"\n{verdict(points)}")
    if arguments.json is not None:
        results = {
            "churn": asdict(churn),
            "costs": asdict(costs),
            "planned": times.planned,
            "likened": times.estimated_placements,
            "verdict": verdict(points),
            "points": [asdict(point) for point in points],
            "iteration_s": times(plan.stages),
        }
        write("--json", arguments.json, json.dumps(results, indent=1) + "\n")
    if arguments.figure is not None:
        write("--figure", arguments.figure, picture(points, arguments.case.stem))
    return 0


def _churn(arguments: argparse.Namespace) -> Churn:
    from skippipe_sched.churn.sweep import Churn

    count = fields.integer(arguments.seeds, "--seeds", 1, MAX_SEEDS)
    first = fields.integer(arguments.seed, "--seed", 0, fields.MAX_SEED - MAX_SEEDS)
    days = fields.number(arguments.days, "--days", 0.0, above=True)
    repair_s = fields.duration(arguments.repair, "--repair")
    return Churn(repair_s, days * DAY_S, tuple(range(first, first + count)))


def _costs(arguments: argparse.Namespace) -> ChurnCosts:
    from skippipe_sched.churn.simulation import ChurnCosts

    return ChurnCosts(
        heartbeat_s=fields.duration(arguments.heartbeat, "--heartbeat"),
        regroup_s=fields.duration(arguments.regroup, "--regroup"),
        restore_s=fields.duration(arguments.restore, "--restore"),
        restart_s=fields.duration(arguments.restart, "--restart"),
        save_every=fields.integer(arguments.checkpoint_every, "--checkpoint-every", 1),
        save_s=fields.duration(arguments.checkpoint, "--checkpoint"),
        copy_every=fields.integer(arguments.copy_every, "--copy-every", 1),
        state_factor=fields.number(arguments.state_factor, "--state-factor", 0.0),
    )


def _plan(arguments: argparse.Namespace) -> Plan:
    """Load the plan for all nodes from a file, or make it from a case by a method."""
    from skippipe_sched.methods import plan_best
    from skippipe_sched.problem.open_case import load_cases
    from skippipe_sched.problem.plan import load_plan
    from skippipe_sched.search.budget import Search

    path: Path = arguments.case
    if path.suffix == ".json":
        return load_plan(path)
    cases = load_cases(path)
    budget_s = fields.duration(arguments.budget, "--budget", above=True)
    with progress(arguments.method) as watch:
        search = Search(arguments.seed, budget_s, watch=watch)
        return plan_best(cases, arguments.method, search)


def _require_few_faults(nodes: int, mtbf_s: float, churn: Churn) -> None:
    from skippipe_sched.figures.amounts import duration_text

    faults = nodes * len(churn.seeds) * churn.end_s / (mtbf_s + churn.repair_s)
    if faults > MAX_FAULTS:
        problem = f"causes {faults:.3g} faults in the sweep, but at most {MAX_FAULTS} are simulated"
        remedy = "Set a longer --mtbf, fewer --days or a smaller --sweep"
        raise InputError("--mtbf", duration_text(mtbf_s), problem, remedy)
