"""What it brings to let operations go ahead of those whose transfers are late.

    python -m experiments.benchmarks.network.late --json FILE

One plan, that of the quickstart's nodes and links, is run by `execution: strict` and `ready-first`
over an emulated network: everything, hops, operations and averagings, takes (1 + x) times as long
as the case says, x exponential with the mean `--jitter`. Both have the same luck, that of the
iteration's number. Operations take the case's seconds, which are longer than this machine takes, so
the ratio is that of the executions and not of the machine. The first iteration, in which programs
are compiled, is not counted.

Both train from the same parameters on the same text; the largest difference between their losses
says that nothing but the order has changed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from typing import Any

import numpy as np

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import QUICKSTART
from skippipe_jax import Run
from skippipe_jax.config import Config, load_config, parse_config
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.trainer import Trainer

# Less than in the quickstart's case, so that an iteration takes a second or two.
FORWARD_S, HOP_OVERHEAD_S = 0.03, 0.0
# So small that nine nodes of it fit into the seconds of the case on two cores.
MODEL = {"width": 64, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 128, "context": 64}
EXECUTIONS = ("strict", "ready-first")


def config_of(execution: str, iterations: int, jitter: float, run_dir: str) -> Config:
    """The run of one execution: the first iteration, and those that are counted."""
    quickstart = load_config(QUICKSTART).plan
    assert isinstance(quickstart.case, dict)
    case = quickstart.case | {"forward_s": FORWARD_S, "hop_overhead_s": HOP_OVERHEAD_S}
    return parse_config(
        {
            "run_dir": run_dir,
            "execution": execution,
            "network": {"mode": "emulate", "emulate_compute": True, "jitter": jitter},
            "plan": {"case": case, "method": quickstart.method},
            "model": MODEL,
            "data": {"sequence_length": 64, "microbatch_size": 1},
            "train": {"steps": 1 + iterations},
            "checkpoint": {"every": 1 + iterations},
        }
    )


def run(execution: str, iterations: int, jitter: float) -> dict[str, Any]:
    """Seconds and losses of the iterations that count, and what the plan and the luck predict."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(execution, iterations, jitter, f"{folder}/run")
        Trainer(config, config_folder=QUICKSTART.parent).run()
        lines = Run(config.run_dir).metrics[1:]
        plan = RunDir(config.run_dir).plan()
    seconds = [line["seconds_per_iteration"] for line in lines]
    return {
        "execution": execution,
        "median_s": round(statistics.median(seconds), 4),
        "predicted_s": round(plan.predicted.iteration_s, 4),
        "seconds": [round(value, 4) for value in seconds],
        "losses": [line["loss"] for line in lines],
    }


def table(report: dict[str, Any]) -> str:
    """A line for each execution."""
    strict, ready_first = report["results"]
    return "\n".join(
        [
            f"{'':<14}{'median of an iteration':>24}",
            *(f"{own['execution']:<14}{own['median_s']:>22.3f} s" for own in report["results"]),
            f"predicted without jitter {strict['predicted_s']:.3f} s",
            f"ready-first takes {report['ratio']:.3f} times as long as strict; their losses differ "
            f"by at most {report['largest_difference_of_losses']:.1e} after "
            f"{len(ready_first['losses'])} iterations",
        ]
    )


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str:
    """Measure both executions, and how they compare."""
    iterations, jitter = arguments.iterations, arguments.jitter
    strict, ready_first = (run(execution, iterations, jitter) for execution in EXECUTIONS)
    difference = np.abs(np.subtract(strict["losses"], ready_first["losses"])).max()
    report |= {
        "jitter": jitter,
        "ratio": round(ready_first["median_s"] / strict["median_s"], 4),
        "largest_difference_of_losses": float(difference),
        "results": [strict, ready_first],
    }
    return table(report)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {"iterations": (20, 1, "iterations that count"), "jitter": (0.3, None, "mean of x")}
    return reporting.run("network.late", __doc__, measure, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
