"""What it costs in loss that parameters and moments are held in bfloat16, rounded by chance.

    python -m experiments.paper.rounded_state              trains what is missing, and prints it
    python -m experiments.paper.rounded_state --quick      small, in minutes

The campaign's control is trained for 500 iterations, for each seed with parameters and moments in
float32, and with both in bfloat16. All else is the same, and the loss of a run is on text that
nothing was chosen by.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.paper import intervals, jobs, study_command
from experiments.paper.campaign import Run
from experiments.paper.intervals import HOW, Losses, line
from experiments.paper.jobs import Job

ARM, STEPS, SEEDS = "full", 500, 5
EXACT = "float32"
HELD: dict[str, dict[str, dict[str, str]]] = {
    EXACT: {},
    "bfloat16": {
        "model": {"parameter_dtype": "bfloat16"},
        "optimizer": {"moment_dtype": "bfloat16"},
    },
}
"""What each kind of run is told besides."""


class HeldRun(NamedTuple):
    """A run whose parameters and moments are held in some way."""

    held: str
    seed: int


class Study(study_command.CampaignStudy):
    """The runs, which differ in how state is held and in nothing else."""

    NAME = "rounded_state"

    def __init__(self, folder: Path, quick: bool = False):
        """`folder` is that of the campaign."""
        super().__init__(folder, quick)
        seeds = range(1 if quick else SEEDS)
        self.runs = [HeldRun(held, seed) for held in HELD for seed in seeds]

    def job(self, run: HeldRun) -> Job:
        """The campaign's configuration of its control, as long as it is here."""
        config = self.campaign.config(Run(ARM, run.seed))
        if not self.quick:
            config["train"] = config["train"] | {"steps": STEPS}
        for section, keys in HELD[run.held].items():
            config[section] = config[section] | keys
        return self.job_of(f"{run.held}-{run.seed}", config)

    def tasks(self) -> list[Job]:
        """Name all runs."""
        return [self.job(run) for run in self.runs]

    def digest(self) -> str:
        """Of all that the study comes from."""
        return jobs.digest_of([job.digest for job in self.tasks()])

    def figures(self) -> dict[str, Any]:
        """Gather the losses."""
        losses: Losses = {held: [] for held in HELD}
        for run in self.runs:
            losses[run.held].append(self.job(run).trained().loss)
        return {"digest": self.digest(), "steps": STEPS} | figures_of(losses)


def figures_of(losses: Losses) -> dict[str, Any]:
    """What is written of the losses of each kind, by seed [nats per byte]."""
    others = {held: own for held, own in losses.items() if held != EXACT}
    difference = intervals.minus(others, losses[EXACT])
    return {"interval": HOW, "loss": losses, "difference": difference}


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each way that state is held."""
    lines = [f"held-out loss [nats per byte], minus that with {EXACT}, by seed:"]
    losses = figures["loss"]
    for held, found in figures["difference"].items():
        lines.append(line(held, losses[held], losses[EXACT], found))
    return "\n".join(lines)


def main() -> int:
    """Parse the command line, train and print; returns the exit code."""
    return study_command.run(Study, __doc__, table)


if __name__ == "__main__":
    sys.exit(main())
