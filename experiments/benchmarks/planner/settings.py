"""How long plans take with other bytes on hops, other averaging and other memory.

    python -m experiments.benchmarks.planner.settings --json FILE

`joint` plans two cases, with several seeds each.

gcp20  the paper's case of 20 nodes, with hops in several dtypes
8b     the recipe of Llama 3 8B on the same links, experiments/paper/configs/8b.yaml, whose hops and
       gradients are in bfloat16; changes are quantised from float32

bfloat16 has half of the bytes of float32. int8 has a quarter, and besides for every 128 channels of
a token a scale of 2 bytes. Gradients have as many bytes as activations. The settings:

exact           averaging of gradients in every iteration, and memory as the case has it
no-averaging    `stage_bytes: 1`: averaging costs its latency only
more-in-flight  that, and `memory: 6`: twice as many microbatches in flight on a node of gcp20
outer           everything is averaged once in 20 iterations, in four fragments of 8-bit numbers,
                each within the iteration that follows
outer-later     once in 40, in two fragments, each within the ten iterations that follow
outer-free      as outer, with nothing to average

By what the first two of outer take longer than the third is averaging's share: in the same plan if
its rings took no time (`pipeline_s`), and against plans that had none to think of.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import yaml
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan

from experiments.benchmarks.harness import reporting
from experiments.paper import cases
from skippipe_jax.models.footprint import ACTIVATION_SCALE_BYTES

# Of the bytes in float32.
SHARES = {
    "float32": 1.0,
    "bfloat16": 0.5,
    "int8": (1 + ACTIVATION_SCALE_BYTES / NUMBERS_OF_A_SCALE) / 4,
}
OUTER = {"mode": "outer", "every": 20, "fragments": 4, "delay": 1, "dtype": "int8"}
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "no-averaging": {"stage_bytes": 1},
    "more-in-flight": {"stage_bytes": 1, "memory": 6},
    "outer": {"averaging": OUTER},
    "outer-later": {"averaging": OUTER | {"every": 40, "fragments": 2, "delay": 10}},
    "outer-free": {"averaging": OUTER, "stage_bytes": 0},
}
# What is planned, with which dtypes of hops, and in which settings.
CASES = {"gcp20": ("float32", "int8"), "8b": ("bfloat16",)}
SETTINGS_OF = {"gcp20": ("outer",), "8b": ("exact", "outer-free", "outer", "outer-later")}


def searched(case: Case, method: str, search: Search) -> tuple[Plan, dict[str, Any]]:
    """A plan and what it took to find it."""
    plan = make_plan(case, method, search)
    found = plan.predicted
    assert found.lower_bound_s is not None
    return plan, {
        "method": method,
        "seed": search.seed,
        "budget_s": search.budget_s,
        "search_s": round(search.elapsed_s, 2),
        "cut_short": search.end.cut_short,
        "iteration_s": round(found.iteration_s, 3),
        "pipeline_s": round(found.pipeline_s, 3),
        "lower_bound_s": round(found.lower_bound_s, 3),
        "gap": round(found.iteration_s / found.lower_bound_s - 1, 4),
    }


def case_of(name: str, dtype: str, setting: str) -> Case:
    """One of `CASES` with hops in a dtype, in one of the settings."""
    if name == "gcp20":
        source = dict(cases.load(name).source)
        share = SHARES[dtype]
    else:
        recipe = (cases.FOLDER / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
        source = yaml.safe_load(recipe)["plan"]["case"]
        share = SHARES[dtype] / SHARES["bfloat16"]
        if setting != "exact":  # Gradients travel in the recipe's own dtype, changes in float32.
            source["stage_bytes"] = [2 * size for size in source["stage_bytes"]]
    hop = {"activation_bytes": round(share * source["activation_bytes"])}
    return parse_case(source | hop | SETTINGS[setting])


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
        "activation_bytes": case.activation_bytes,
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


def shares(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Averaging's share: by how much outer plans take longer than plans that had none to think of.

    And than themselves, if their rings took no time.
    """
    free_s = {
        (found["case"], found["hops"]): found["median_iteration_s"]
        for found in results
        if found["setting"] == "outer-free"
    }
    return [
        {
            "case": own["case"],
            "hops": own["hops"],
            "setting": own["setting"],
            "of_free_plans": round(
                own["median_iteration_s"] / free_s[own["case"], own["hops"]] - 1, 4
            ),
            "of_its_own_plan": round(own["median_averaging_share"], 4),
        }
        for own in results
        if own["setting"] in ("outer", "outer-later") and (own["case"], own["hops"]) in free_s
    ]


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    seconds = sorted(run["iteration_s"] for run in result["runs"])
    return (
        f"{result['case']:<8}{result['hops']:<10}{result['setting']:<16}"
        f"{result['median_iteration_s']:>10.2f}{result['median_pipeline_s']:>10.2f}"
        f"{seconds[0]:>9.2f} to {seconds[-1]:<9.2f}{result['longest_averaging_s']:>9.2f}"
        f"{result['late_s']:>8.2f}{result['lower_bound_s']:>9.2f}"
    )


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Search in all settings."""
    report |= {"seeds": arguments.seeds, "budget_s": arguments.budget, "settings": SETTINGS}
    report |= {"published_s": published(), "results": []}
    print(f"published: {report['published_s']}")
    print(
        f"{'case':<8}{'hops':<10}{'setting':<16}{'iteration':>10}{'pipeline':>10}{'all seeds':>19}"
        f"{'ring':>12}{'late':>8}{'bound':>9}   [s, medians]"
    )
    for name in arguments.cases:
        for dtype in arguments.hops or CASES[name]:
            for setting in arguments.settings or SETTINGS_OF[name]:
                found = searches(name, dtype, setting, arguments.seeds, arguments.budget)
                report["results"].append(found)
                report["averaging_shares"] = shares(report["results"])
                print(row(found), flush=True)
                reporting.write(report, arguments.json)
    for share in report["averaging_shares"]:
        print(f"averaging's share: {share}")


def main() -> int:
    """Parse the command line, search, print; returns the exit code."""
    numbers = {
        "seeds": (5, 1, "seeds of each search"),
        "budget": (60.0, None, "seconds of each search"),
    }
    several = {"nargs": "+"}
    options = {
        "--cases": several | {"choices": CASES, "default": [*CASES], "help": "(all)"},
        "--hops": several | {"choices": SHARES, "help": "dtypes of hops (those of the case)"},
        "--settings": several | {"choices": SETTINGS, "help": "settings (those of the case)"},
    }
    return reporting.run("planner.settings", __doc__, measure, numbers=numbers, options=options)


if __name__ == "__main__":
    sys.exit(main())
