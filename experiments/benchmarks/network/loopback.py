"""How much longer an iteration takes than its compute alone, where the network costs nothing.

    python -m experiments.benchmarks.network.loopback --json FILE      (needs Linux and taskset)

Two hosts on 127.0.0.1, each with a core of its own, serve one of two stages each. They measure
themselves, plan a full pipeline for what they found, and train along it. The shortest that an
iteration could take is that plan with hops that cost nothing, and then an update: what operations
take is what `skippipe measure` measured while nothing else ran.

The machine must be quiet: both cores are busy all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippipe_sched.problem.links import Link, LinkTable
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import simulate_plan

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import AllHosts, OwnCores, small_run, write_config
from skippipe_jax import Run
from skippipe_jax.storage.run_dir import CASE, RunDir

# The first iteration compiles, and the second may still load what others compiled.
WARMUP_ITERATIONS = 2


@dataclass(frozen=True)
class Workload:
    """What is trained: two stages of `layers` blocks each, whose forward takes some 60 ms."""

    width: int = 256
    layers: int = 2
    microbatch_size: int = 4
    sequence_length: int = 256
    microbatches: int = 8
    memory: int = 3


def config_of(folder: Path, workload: Workload, iterations: int) -> Path:
    """Write the configuration of a run that measures its hosts, plans for them, and trains."""
    shape = workload.width, 2 * workload.layers
    shape += workload.microbatch_size, workload.sequence_length
    case = {"stages": [1, 1], "path_length": 2, "memory": workload.memory}
    case["microbatches"] = workload.microbatches
    plan = {"measure": True, "method": "full", "case": case}
    config = small_run(folder, shape, plan, WARMUP_ITERATIONS + iterations)
    return write_config(folder / "config.yaml", config)


def figures_of(run_dir: Path) -> dict[str, Any]:
    """Seconds of iterations and of their compute alone, and the ratio."""
    profile = json.loads((run_dir / CASE).with_suffix(".measured.json").read_text())
    each_s = [line["seconds_per_iteration"] for line in Run(run_dir).metrics]
    median_s = statistics.median(each_s[WARMUP_ITERATIONS:])
    compute_s = compute_alone_s(RunDir(run_dir).plan()) + update_s(profile)
    return {
        "ratio": median_s / compute_s,
        "median_s": median_s,
        "compute_s": compute_s,
        "each_s": each_s,
        "largest_error_of_costs": profile["largest_error_of_costs"],
    }


def compute_alone_s(plan: Plan) -> float:
    """Seconds of the plan's operations in the plan's order, when hops cost nothing."""
    table = plan.case.link_table
    free = LinkTable({pair: Link(0.0, math.inf) for pair in table.links}, Link(0.0, math.inf))
    case = dataclasses.replace(plan.case, link_table=free, hop_overhead_s=0.0)
    runs = simulate_plan(dataclasses.replace(plan, case=case)).runs
    return max(run.end_s for run in runs)


def update_s(profile: dict[str, Any]) -> float:
    """Seconds of the update, which the hosts do at the same time: of the slowest stage."""
    timings = [stages for host in profile["hosts"] for stages in host["timings"].values()]
    return max(stage["update"]["median_s"] for stages in timings for stage in stages)


def table(figures: dict[str, Any]) -> str:
    """All figures that matter, as a line of text."""
    return (
        f"iteration {figures['median_s']:.3f} s, its compute alone {figures['compute_s']:.3f} s: "
        f"{figures['ratio']:.3f} times"
    )


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Train, and compare iterations with their compute."""
    network, workload = OwnCores(), Workload()
    with tempfile.TemporaryDirectory(prefix="loopback-") as name:
        folder = Path(name)
        config = config_of(folder, workload, arguments.iterations)
        AllHosts(network, folder, 2).run("train", "skippipe_jax.train", "--config", config)
        report |= {"workload": dataclasses.asdict(workload), **figures_of(folder / "run")}
    return table(report)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {"iterations": (20, 1, f"timed iterations, after {WARMUP_ITERATIONS} others")}
    return reporting.run("network.loopback", __doc__, measure, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
