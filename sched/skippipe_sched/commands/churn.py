"""The command `churn`: what a run gets done whose hosts vanish and come back, on paper."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from skippipe_sched import fields
from skippipe_sched.churn.iteration_times import IterationTimes, affordable, planning_s
from skippipe_sched.churn.life import Costs
from skippipe_sched.churn.picture import picture
from skippipe_sched.churn.policies import POLICIES
from skippipe_sched.churn.sweep import Churn, Point, doublings, sweep
from skippipe_sched.churn.verdict import causes, goodputs, verdict
from skippipe_sched.commands.searching import progress
from skippipe_sched.commands.writing import require_writable, write
from skippipe_sched.errors import InputError
from skippipe_sched.figures.amounts import duration_text
from skippipe_sched.methods import plan_best
from skippipe_sched.problem.auto import load_cases
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.search.budget import Search

# What is more is a mistake, and would only fill the memory.
MOST_FAULTS, MOST_SEEDS, MOST_DOUBLINGS = 10_000_000, 1000, 20
DAY_S = 86400.0


def run(arguments: argparse.Namespace) -> int:
    """Print tables and a verdict, and write figures and a picture where they are asked for."""
    require_writable("--json", arguments.json)
    require_writable("--figure", arguments.figure)
    churn, costs = _churn(arguments), _costs(arguments)
    mtbf_s = fields.duration(arguments.mtbf, "--mtbf", above=True)
    mtbfs_s = doublings(mtbf_s, fields.integer(arguments.sweep, "--sweep", 0, MOST_DOUBLINGS))
    plans = arguments.plans
    most = None if plans is None else fields.integer(plans, "--plans", 1)
    plan = _plan(arguments)
    _require_few_faults(len(plan.case.nodes), mtbfs_s[-1], churn)
    costs = replace(costs, planning_s=planning_s(plan))
    runs = len(mtbfs_s) * len(churn.seeds) * len(POLICIES)
    with tqdm(total=runs, desc="churn", unit="run", leave=False, disable=None) as bar:
        times = IterationTimes(
            plan, most or affordable(plan), lambda planned: bar.set_postfix(planned=planned)
        )
        points = sweep(plan, mtbfs_s, churn, costs, times, bar.update)
    print(
        f"{len(plan.case.nodes)} nodes, {times(plan.stages):.2f} s an iteration, "
        f"{arguments.days:g} days, {len(churn.seeds)} times; planned for {times.planned} sets of "
        f"live nodes, {times.likened} likened to those"
    )
    print(f"\n{goodputs(points)}")
    print(f"\n{causes(points, mtbf_s, churn.end_s)}")
    print(f"\n{verdict(points)}")
    if arguments.json is not None:
        told = _told(churn, costs, times, points) | {"iteration_s": times(plan.stages)}
        write("--json", arguments.json, json.dumps(told, indent=1) + "\n")
    if arguments.figure is not None:
        write("--figure", arguments.figure, picture(points, arguments.case.stem))
    return 0


def _churn(arguments: argparse.Namespace) -> Churn:
    count = fields.integer(arguments.seeds, "--seeds", 1, MOST_SEEDS)
    first = fields.integer(arguments.seed, "--seed", 0, fields.LARGEST_SEED - MOST_SEEDS)
    days = fields.number(arguments.days, "--days", 0.0, above=True)
    repair_s = fields.duration(arguments.repair, "--repair")
    return Churn(repair_s, days * DAY_S, tuple(range(first, first + count)))


def _costs(arguments: argparse.Namespace) -> Costs:
    return Costs(
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
    """The plan for all nodes: that of a file, or the one that a method makes of a case."""
    path: Path = arguments.case
    if path.suffix == ".json":
        return load_plan(path)
    cases = load_cases(path)
    with progress(arguments.method, None) as watch:
        search = Search(arguments.seed, arguments.budget, watch=watch)
        return plan_best(cases, arguments.method, search)


def _require_few_faults(nodes: int, mtbf_s: float, churn: Churn) -> None:
    faults = nodes * len(churn.seeds) * churn.end_s / (mtbf_s + churn.repair_s)
    if faults > MOST_FAULTS:
        raise InputError(
            "--mtbf", duration_text(mtbf_s),
            f"is in the sweep, and there would be {faults:.3g} faults",
            f"Give a longer time, fewer days or a smaller --sweep: {MOST_FAULTS} faults at most",
        )  # fmt: skip


def _told(churn: Churn, costs: Costs, times: IterationTimes, points: list[Point]) -> dict[str, Any]:
    return {
        "churn": asdict(churn),
        "costs": asdict(costs),
        "planned": times.planned,
        "likened": times.likened,
        "verdict": verdict(points),
        "points": [asdict(point) for point in points],
    }
