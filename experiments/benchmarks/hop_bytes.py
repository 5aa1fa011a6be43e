"""What fewer bytes on every hop bring to the paper's case of 20 nodes, as the planner has it.

    python -m experiments.benchmarks.hop_bytes --json experiments/results/hop_bytes_MACHINE.json

The case's activations are in float32. bfloat16 has half of their bytes. int8 has a quarter, and
besides for every 128 channels of a token a scale of 2 bytes. Gradients have as many bytes as
activations. `joint` searches with each of them, over several seeds, in these settings:

given           averaging and memory as the case has them
no-averaging    `stage_bytes: 1`: averaging costs its latency only
more-in-flight  that, and `memory: 6`: twice as many microbatches in flight on a node
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import run_command
from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.search.budget import Search

from experiments.benchmarks import reporting
from experiments.benchmarks.planner import searched
from experiments.paper import cases
from skippipe_jax.models.footprint import SCALE_BYTES

# Of the bytes in float32.
SHARES = {"float32": 1.0, "bfloat16": 0.5, "int8": (1 + SCALE_BYTES / NUMBERS_OF_A_SCALE) / 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "given": {},
    "no-averaging": {"stage_bytes": 1},
    "more-in-flight": {"stage_bytes": 1, "memory": 6},
}


def case_of(setting: str, dtype: str) -> Case:
    """The paper's case in one of the settings, with hops in a dtype."""
    source = dict(cases.load("gcp20").source)
    hop = {"activation_bytes": round(SHARES[dtype] * source["activation_bytes"])}
    return parse_case(source | SETTINGS[setting] | hop)


def searches(setting: str, dtype: str, seeds: int, budget_s: float) -> dict[str, Any]:
    """Plans of several seeds, and their medians."""
    case = case_of(setting, dtype)
    runs = [searched(case, "joint", Search(seed, budget_s))[1] for seed in range(seeds)]
    return {
        "setting": setting,
        "dtype": dtype,
        "activation_bytes": case.activation_bytes,
        "median_iteration_s": statistics.median(run["iteration_s"] for run in runs),
        "median_pipeline_s": statistics.median(run["pipeline_s"] for run in runs),
        "lower_bound_s": runs[0]["lower_bound_s"],
        "runs": runs,
    }


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    seconds = sorted(run["iteration_s"] for run in result["runs"])
    return (
        f"{result['setting']:<16}{result['dtype']:<10}{result['activation_bytes'] / 1e6:>9.2f}"
        f"{result['median_iteration_s']:>10.2f}{result['median_pipeline_s']:>10.2f}"
        f"{seconds[0]:>9.2f} to {seconds[-1]:.2f}{result['lower_bound_s']:>9.2f}"
    )


def main() -> int:
    """Parse the command line, search, print; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    fields.integer(arguments.seeds, "--seeds", 1)
    report = reporting.begun("hop_bytes")
    report |= {"seeds": arguments.seeds, "budget_s": arguments.budget, "results": []}
    print(
        f"{'setting':<16}{'dtype':<10}{'MB a hop':>9}{'iteration':>10}{'pipeline':>10}"
        f"{'all seeds':>18}{'bound':>9}   [s, medians]"
    )
    for setting in arguments.settings:
        for dtype in arguments.dtypes:
            result = searches(setting, dtype, arguments.seeds, arguments.budget)
            report["results"].append(result)
            print(row(result), flush=True)
            reporting.write(report, arguments.json)
    return reporting.finish(report, None, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("hop_bytes", __doc__)
    parser.add_argument(
        "--settings", choices=SETTINGS, nargs="+", default=list(SETTINGS), help="settings (all)"
    )
    parser.add_argument(
        "--dtypes", choices=SHARES, nargs="+", default=list(SHARES), help="dtypes of hops (all)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each search (5)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each search (60)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
