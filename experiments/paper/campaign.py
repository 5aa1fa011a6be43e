"""Trains the runs that the figures need, each once.

A run is a file in configs/ and a seed. It trains as a job (see `jobs`), and ends as a summary,
results/runs/ARM-SEED.json. That says by a digest for which configuration it holds, and a run whose
summary is there is never trained again: so a campaign may take days, and what it found is
committed.

    python -m experiments.paper.campaign --folder runs/paper      trains all runs, and draws nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

from experiments.benchmarks.harness import reporting
from experiments.paper import jobs
from experiments.paper.jobs import Job
from experiments.paper.summary import Summary
from skippipe_jax.config.parsing import read_files

PAPER = Path(__file__).parent
CONFIGS, RESULTS = PAPER / "configs", PAPER / "results" / "runs"
# The arms, and how many seeds each has: more if it decides a claim. Of each seed, the first arms
# are trained first.
DECIDING, OTHERS = 5, 2
SEEDS: dict[str, int] = {
    "full": DECIDING,
    "skip33": DECIDING,
    "skip50": DECIDING,
    "skip33_equal_time": DECIDING,
    "skip50_equal_time": DECIDING,
    "small67": DECIDING,
    "small67_equal_time": DECIDING,
    "skip33_random": OTHERS,
    "skip33_swaps": OTHERS,
    "skip33_ends_full_equal_time": OTHERS,
    "skip33_ends_full": OTHERS,
    "skip33_full_every_10": OTHERS,
    "skip33_random_swaps": OTHERS,
    "skip25": OTHERS,
    "small50": OTHERS,
    "full_higher_rate": OTHERS,
    "skip33_higher_rate": OTHERS,
    "skip25_equal_time": OTHERS,
    "skip50_random": OTHERS,
    "skip25_random": OTHERS,
    "skip33_skippipe": OTHERS,
}
# The order of sections on which the digests of committed summaries depend.
SECTIONS = (
    *("model", "plan", "recipe", "data", "optimizer"),
    *("train", "validation", "checkpoint", "network"),
)
# A quick run has so many times fewer iterations, and a model that learns little.
QUICK = 12
QUICK_SIZES = {
    "model": {"width": 16, "heads": 2, "kv_heads": 2, "ffn_width": 32, "context": 32},
    "data": {"sequence_length": 32},
    "plan": {"budget_s": 0.2},
    "validation": {"every": 5, "sequences": 8},
}


@dataclass(frozen=True)
class Run:
    """An arm, which is a configuration, with a seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """How its files are called."""
        return f"{self.arm}-{self.seed}"


def runs_of(arms: Iterable[str], quick: bool) -> list[Run]:
    """The runs of these arms, first seeds first; only these if it has to be quick."""
    chosen = [arm for arm in SEEDS if arm in set(arms)]
    most = 1 if quick else max(SEEDS.values())
    return [Run(arm, seed) for seed in range(most) for arm in chosen if seed < SEEDS[arm]]


class Campaign:
    """Where the runs of a campaign train, and where their summaries are."""

    def __init__(self, folder: Path, quick: bool):
        """`folder` is worked in; a quick campaign leaves its summaries there."""
        self.folder = folder.resolve()
        self.quick = quick
        self.results = self.folder / "results" if quick else RESULTS

    def config(self, run: Run) -> dict[str, Any]:
        """The configuration of a run as its files hold it, but for its folder."""
        tree = read_files(CONFIGS / f"{run.arm}.yaml", "config").tree
        del tree["run_dir"]
        tree = {section: tree[section] for section in sorted(tree, key=SECTIONS.index)}
        if self.quick:
            tree = shrunken(tree)
        # Random paths, and others that are drawn again, are others for each seed.
        return tree | {"seed": run.seed, "plan": tree["plan"] | {"seed": 100 * run.seed}}

    def digest(self, run: Run) -> str:
        """What two runs have in common that are the same run, wherever and whenever they train."""
        return self.job(run).digest

    def job(self, run: Run) -> Job:
        """A run as it is trained."""
        command = f"python -m experiments.paper.campaign --only {run.arm}"
        where = self.results, self.folder
        return jobs.job_of(run.name, self.config(run), *where, command, self.quick)

    def summary(self, run: Run) -> Summary | None:
        """What has been found by a run, if it has been trained as its configuration says now."""
        return self.job(run).summary()

    def trained(self, run: Run) -> Summary:
        """Return what has been found by a run.

        Raises:
            InputError: if it has not been trained.
        """
        summary = self.summary(run)
        if summary is None:
            remedy = f"Run python -m experiments.paper.campaign --only {run.arm}"
            raise InputError("run", run.name, "has not been trained by the campaign", remedy)
        return summary

    def finished(self, runs: Iterable[Run]) -> dict[str, list[Summary]]:
        """Return the summaries of trained runs by arm, in the order of their seeds.

        Raises:
            InputError: if one has not been trained.
        """
        found: dict[str, list[Summary]] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            found.setdefault(run.arm, []).append(self.trained(run))
        return found

    def train(self, runs: Sequence[Run]) -> dict[str, list[Summary]]:
        """The summaries of these runs; those that are missing are trained.

        Ctrl-C stops after a checkpoint of each run that is training, and the next call goes on.
        """
        jobs.train([self.job(run) for run in runs], self.folder)
        return self.finished(runs)


def shrunken(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration that trains in seconds, on the same paths and by the same recipe."""
    small = tree | {
        section: tree[section] | sizes for section, sizes in QUICK_SIZES.items() if section in tree
    }
    small["train"] = {"steps": tree["train"]["steps"] // QUICK}
    small["optimizer"] = tree["optimizer"] | {"warmup_steps": 1}
    recipe = dict(tree.get("recipe", {}))
    if "phases" in recipe:
        recipe["phases"] = [
            phase | {"from_step": phase["from_step"] // QUICK} for phase in recipe["phases"]
        ]
    return small | {"recipe": recipe}


def main() -> int:
    """Parse the command line and train; returns the exit code."""
    parser = reporting.documented_parser("python -m experiments.paper.campaign", __doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="(%(default)s)")
    parser.add_argument("--only", nargs="+", choices=SEEDS, default=list(SEEDS), help="arms (all)")
    parser.add_argument("--list", action="store_true", help="list the trained runs, and train none")
    arguments = parser.parse_args()
    return jobs.stoppable(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    campaign = Campaign(arguments.folder, quick=False)
    runs = runs_of(arguments.only, quick=False)
    if not arguments.list:
        campaign.train(runs)
    jobs.show([campaign.job(run) for run in runs])
    return 0


if __name__ == "__main__":
    sys.exit(main())
