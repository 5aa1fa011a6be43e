"""What it costs in loss to round what nodes send to each other to bfloat16.

    python -m experiments.benchmarks.wire --json experiments/results/wire_MACHINE.json

The quickstart is trained four times: as it is, with activations and their gradients rounded for
each hop, with gradients rounded for each step of the averaging ring, and with both. Every node has
a CPU device of its own, so that hops and rings are those of nine machines. All four begin with the
same parameters and read the same text in the same order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from skippipe_sched.errors import run_command

from experiments.benchmarks import reporting
from skippipe_jax import Run
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import load_config
from skippipe_jax.training.planning import plan_of
from skippipe_jax.training.trainer import Trainer

QUICKSTART = Path("experiments/quickstart.yaml")
# What is rounded: settings of the section `network`.
ROUNDED = {
    "nothing": (),
    "activations": ("activation_dtype",),
    "averaging": ("averaging_dtype",),
    "both": ("activation_dtype", "averaging_dtype"),
}
LAST = 10


def run(rounded: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The training losses of one run, their mean over the last iterations, and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        rounding = [f"network.{name}=bfloat16" for name in ROUNDED[rounded]]
        own = [f"run_dir={folder}/run", "network.averaging=ring", *rounding]
        config = load_config(QUICKSTART, [*overrides, *own])
        alone = Membership(config.cluster, 0, 1)
        Trainer(config, host=alone, config_folder=QUICKSTART.parent).run()
        lines = Run(config.run_dir).metrics
    losses = [line["loss"] for line in lines]
    return {
        "rounded": rounded,
        "final_loss": round(statistics.mean(losses[-LAST:]), 5),
        "bytes_per_iteration": lines[-1]["bytes_sent"],
        "losses": losses,
    }


def give_every_node_a_device(overrides: Sequence[str]) -> None:
    """Must be called before JAX has looked for devices."""
    plan = plan_of(load_config(QUICKSTART, overrides), QUICKSTART.parent)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", len(plan.case.nodes))


def compare(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """All four runs, and how much more than that without rounding each one's final loss is."""
    results = [run(rounded, overrides) for rounded in ROUNDED]
    exact = results[0]["final_loss"]
    return [own | {"difference": round(own["final_loss"] - exact, 5)} for own in results]


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each run."""
    iterations = len(results[0]["losses"])
    last = min(LAST, iterations)
    return "\n".join(
        [
            f"{'rounded':<14}{f'loss, last {last} of {iterations}':>22}{'difference':>12}"
            f"{'MB/iteration':>14}",
            *(
                f"{own['rounded']:<14}{own['final_loss']:>22.4f}{own['difference']:>12.4f}"
                f"{own['bytes_per_iteration'] / 1e6:>14.2f}"
                for own in results
            ),
        ]
    )


def main() -> int:
    """Parse the command line, train, print; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    overrides = [f"train.steps={arguments.iterations}", *arguments.set]
    give_every_node_a_device(overrides)
    report = {
        **reporting.begun("wire"),
        "results": compare(overrides),
    }
    return reporting.finish(report, table(report["results"]), arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("wire", __doc__)
    parser.add_argument("--iterations", type=int, default=60, help="iterations of each run (60)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="override one key of the quickstart's configuration; may be given often",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
