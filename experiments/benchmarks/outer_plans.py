"""What averaging behind the iterations brings, as the planner has it.

    python -m experiments.benchmarks.outer_plans --json experiments/results/outer_plans_MACHINE.json

`joint` plans two cases, with several seeds each.

gcp20  the paper's case of 20 nodes, with hops in several dtypes
8b     the recipe of Llama 3 8B on the same links, experiments/paper/configs/8b.yaml, whose hops and
       gradients are in bfloat16; changes are quantised from float32

outer        everything is averaged once in 20 iterations, in four fragments of 8-bit numbers, each
             within the iteration that follows
outer-later  once in 40, in two fragments, each within the ten iterations that follow
outer-free   as outer, with nothing to average
exact        gradients, in every iteration

By what the first two take longer than the third is averaging's share: in the same plan if its
rings took no time (`pipeline_s`), and against plans that had none to think of.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import yaml
from skippipe_sched import fields
from skippipe_sched.errors import run_command
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan

from experiments.benchmarks import reporting
from experiments.benchmarks.hop_bytes import SHARES
from experiments.benchmarks.planner import searched
from experiments.paper import cases

OUTER = {"mode": "outer", "every": 20, "fragments": 4, "delay": 1, "dtype": "int8"}
POLICIES = {
    "outer": OUTER,
    "outer-later": OUTER | {"every": 40, "fragments": 2, "delay": 10},
    "outer-free": OUTER,
}
# What is planned, with which dtypes of hops, and in which settings.
CASES = {"gcp20": ("float32", "int8"), "8b": ("bfloat16",)}
SETTINGS = {"gcp20": ("outer",), "8b": ("exact", "outer-free", "outer", "outer-later")}
# The most that is asked for [s], and of averaging's share.
MOST_S = {("gcp20", "float32"): 29.5, ("gcp20", "int8"): 22.5}
MOST_SHARE = 0.05


def source_of(name: str, dtype: str) -> dict[str, Any]:
    """One of `CASES` with hops in a dtype, and bytes of what is averaged in float32."""
    if name == "gcp20":
        source = dict(cases.load(name).source)
        return source | {"activation_bytes": round(SHARES[dtype] * source["activation_bytes"])}
    recipe = (cases.FOLDER / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    source = yaml.safe_load(recipe)["plan"]["case"]
    hop_bytes = round(SHARES[dtype] / SHARES["bfloat16"] * source["activation_bytes"])
    stage_bytes = [2 * size for size in source["stage_bytes"]]
    return source | {"activation_bytes": hop_bytes, "stage_bytes": stage_bytes}


def case_of(name: str, dtype: str, setting: str) -> Case:
    """A case in one of the settings."""
    source = source_of(name, dtype)
    if setting == "exact":
        # Gradients travel in the recipe's own dtype.
        share = 0.5 if name == "8b" else 1.0
        sizes = source["stage_bytes"]
        sizes = [share * size for size in sizes] if isinstance(sizes, list) else share * sizes
        return parse_case(source | {"stage_bytes": sizes})
    free = {"stage_bytes": 0} if setting == "outer-free" else {}
    return parse_case(source | {"averaging": POLICIES[setting]} | free)


def searches(name: str, dtype: str, setting: str, seeds: int, budget_s: float) -> dict[str, Any]:
    """Plans of several seeds, and their medians."""
    case = case_of(name, dtype, setting)
    runs = []
    for seed in range(seeds):
        plan, run = searched(case, "joint", Search(seed, budget_s))
        found = plan.predicted
        told = {"averaging_s": round(found.averaging_s, 3), "late_s": round(found.late_s, 3)}
        runs.append(run | told)
    return {
        "case": name,
        "hops": dtype,
        "setting": setting,
        "median_iteration_s": statistics.median(run["iteration_s"] for run in runs),
        "median_pipeline_s": statistics.median(run["pipeline_s"] for run in runs),
        "median_averaging_share": statistics.median(
            run["iteration_s"] / run["pipeline_s"] - 1 for run in runs
        ),
        "longest_averaging_s": max(run["averaging_s"] for run in runs),
        "late_s": max(run["late_s"] for run in runs),
        "lower_bound_s": runs[0]["lower_bound_s"],
        "runs": runs,
    }


def published() -> dict[str, float]:
    """Seconds of an iteration of the published plans of gcp20."""
    return {
        "plan": round(simulate_plan(cases.published_plan()).iteration_s, 2),
        "full_pipeline": round(cases.published_full_pipeline().iteration_s, 2),
    }


def checks(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for, and whether it is so."""
    median_s = {
        (found["case"], found["hops"], found["setting"]): found["median_iteration_s"]
        for found in results
    }
    own_shares = {
        (found["case"], found["hops"], found["setting"]): found["median_averaging_share"]
        for found in results
    }
    made = []
    for (name, dtype, setting), seconds in median_s.items():
        if setting == "outer" and (name, dtype) in MOST_S:
            most = MOST_S[name, dtype]
            made.append({"what": f"{name}, {dtype} hops, s", "found": seconds, "most": most})
        free_s = median_s.get((name, dtype, "outer-free"))
        if setting in ("outer", "outer-later") and free_s is not None:
            what = f"{name}, {dtype} hops, {setting}: averaging's share"
            share, own_share = seconds / free_s - 1, own_shares[name, dtype, setting]
            for of, found in ((" of free plans", share), (" of its own plan", own_share)):
                made.append({"what": what + of, "found": round(found, 4), "most": MOST_SHARE})
    return [check | {"holds": check["found"] <= check["most"]} for check in made]


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    seconds = sorted(run["iteration_s"] for run in result["runs"])
    return (
        f"{result['case']:<8}{result['hops']:<10}{result['setting']:<12}"
        f"{result['median_iteration_s']:>10.2f}{result['median_pipeline_s']:>10.2f}"
        f"{seconds[0]:>9.2f} to {seconds[-1]:<9.2f}{result['longest_averaging_s']:>9.2f}"
        f"{result['late_s']:>8.2f}{result['lower_bound_s']:>9.2f}"
    )


def main() -> int:
    """Parse the command line, search, print; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    fields.integer(arguments.seeds, "--seeds", 1)
    report = reporting.begun("outer_plans")
    report |= {"seeds": arguments.seeds, "budget_s": arguments.budget, "averaging": POLICIES}
    report |= {"published_s": published(), "results": []}
    print(f"published: {report['published_s']}")
    print(
        f"{'case':<8}{'hops':<10}{'setting':<12}{'iteration':>10}{'pipeline':>10}{'all seeds':>19}"
        f"{'ring':>12}{'late':>8}{'bound':>9}   [s, medians]"
    )
    for name in arguments.cases:
        for dtype in arguments.hops or CASES[name]:
            for setting in arguments.settings or SETTINGS[name]:
                found = searches(name, dtype, setting, arguments.seeds, arguments.budget)
                report["results"].append(found)
                report["checks"] = checks(report["results"])
                print(row(found), flush=True)
                reporting.write(report, arguments.json)
    for check in report["checks"]:
        holds = "" if check["holds"] else " (exceeded)"
        print(f"{check['what']}: {check['found']} at most {check['most']}{holds}")
    return reporting.finish(report, None, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("outer_plans", __doc__)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES), help="(all)")
    parser.add_argument(
        "--hops", choices=SHARES, nargs="+", help="dtypes of hops (those of the case)"
    )
    parser.add_argument(
        "--settings", choices=("exact", *POLICIES), nargs="+", help="settings (those of the case)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each search (5)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each search (60)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
