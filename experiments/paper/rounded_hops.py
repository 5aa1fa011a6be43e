"""What it costs in loss that activations and their gradients travel in 8 bits.

    python -m experiments.paper.rounded_hops              trains what is missing, and prints it

The control and the arm with a third of the stages skipped are trained once more for each seed, the
same in all but `network.activation_dtype: int8`, which rounds both what goes forward and what comes
back. Beside each stands the campaign's own run of that seed, whose hops carry float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.paper import intervals, jobs, study_command
from experiments.paper.campaign import Run, runs_of
from experiments.paper.intervals import HOW, Losses, line, paired
from experiments.paper.jobs import Job

ARMS = ("full", "skip33")
ROUNDED = {"activation_dtype": "int8"}


class Study(study_command.CampaignStudy):
    """The runs with rounded hops, beside those of the campaign."""

    NAME = "rounded_hops"

    def __init__(self, folder: Path):
        """`folder` is that of the campaign."""
        super().__init__(folder)
        self.summaries = self.folder / "results"
        self.runs = runs_of(ARMS, quick=False)

    def job(self, run: Run) -> Job:
        """A run of the campaign with rounded hops."""
        config = self.campaign.config(run)
        config = config | {"network": config["network"] | ROUNDED}
        return self.job_of(f"{run.name}-int8", config)

    def tasks(self) -> list[Job]:
        """Name the runs."""
        return [self.job(run) for run in self.runs]

    def digest(self) -> str:
        """Of all that the study comes from."""
        own = [job.digest for job in self.tasks()]
        return jobs.json_digest(own + [self.campaign.digest(run) for run in self.runs])

    def figures(self) -> dict[str, Any]:
        """Gather the losses.

        Raises:
            InputError: if a run of the campaign is not there to be compared with.
        """
        rounded: Losses = {arm: [] for arm in ARMS}
        control: Losses = {arm: [] for arm in ARMS}
        for run in self.runs:
            rounded[run.arm].append(self.job(run).trained().loss)
            control[run.arm].append(self.campaign.trained(run).loss)
        return {"digest": self.digest()} | figures_of(rounded, control)


def figures_of(rounded: Losses, control: Losses) -> dict[str, Any]:
    """What is written of the losses with rounded hops and of the campaign's."""
    differences = {arm: paired(own, control[arm]) for arm, own in rounded.items()}
    return {
        "rounded": ROUNDED,
        "interval": HOW,
        "loss": {"int8": rounded, "float32": control},
        "difference": intervals.figures(differences),
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each arm."""
    lines = ["held-out loss [nats per byte] with hops of int8, minus that with float32, by seed:"]
    losses = figures["loss"]
    for arm, found in figures["difference"].items():
        lines.append(line(arm, losses["int8"][arm], losses["float32"][arm], found))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(study_command.run(Study, __doc__, table))
