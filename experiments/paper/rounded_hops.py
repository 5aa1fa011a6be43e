"""What it costs in loss that activations and their gradients travel in 8 bits.

    python -m experiments.paper.rounded_hops              trains what is missing, and prints it
    python -m experiments.paper.rounded_hops --quick      small, in minutes

The control and the arm with a third of the stages skipped are trained once more for each seed, the
same in all but `network.activation_dtype: int8`, which rounds both what goes forward and what comes
back. Beside each stands the campaign's own run of that seed, whose hops carry float32.

All of it is trained as the campaign's runs are: Ctrl-C stops, and the same command goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

from experiments.paper import intervals, jobs, study_command
from experiments.paper.campaign import Campaign, Run, runs_of
from experiments.paper.intervals import HOW, by_seed, paired, with_ends
from experiments.paper.jobs import Job

COMMAND = "python -m experiments.paper.rounded_hops"
RESULT = Path(__file__).parent / "results" / "rounded_hops.json"
ARMS = ("full", "skip33")
ROUNDED = {"activation_dtype": "int8"}
Losses = dict[str, list[float]]
"""Of each arm, the held-out losses of its seeds [nats per byte]."""


class Study:
    """The runs with rounded hops, beside those of the campaign."""

    def __init__(self, folder: Path, quick: bool):
        """`folder` is worked in."""
        self.campaign = Campaign(folder, quick)
        self.folder = self.campaign.folder / "rounded_hops"
        self.result = self.folder / RESULT.name if quick else RESULT
        self.runs = runs_of(ARMS, quick)

    def job(self, run: Run) -> Job:
        """A run of the campaign with rounded hops."""
        config = self.campaign.config(run)
        config = config | {"network": config["network"] | ROUNDED}
        return self.campaign.job_of(f"{run.name}-int8", config, self.folder / "results", COMMAND)

    def digest(self) -> str:
        """Of all that the study comes from."""
        own = [self.job(run).digest for run in self.runs]
        return jobs.digest_of(own + [self.campaign.digest(run) for run in self.runs])

    def train(self) -> dict[str, Any]:
        """Train what is missing; returns the figures of all.

        Raises:
            InputError: if a run of the campaign is not there to be compared with.
        """
        if self.campaign.quick:
            self.campaign.train(self.runs)
        jobs.train([self.job(run) for run in self.runs], self.folder)
        rounded: Losses = {arm: [] for arm in ARMS}
        control: Losses = {arm: [] for arm in ARMS}
        for run in self.runs:
            own, other = self.job(run).summary(), self.campaign.summary(run)
            assert own is not None, run.name
            if other is None:
                raise InputError(
                    "run",
                    run.name,
                    "has not been trained by the campaign",
                    f"Run python -m experiments.paper.campaign --only {run.arm}",
                )
            rounded[run.arm].append(own.loss)
            control[run.arm].append(other.loss)
        return {"digest": self.digest()} | figures_of(rounded, control)


def figures_of(rounded: Losses, control: Losses) -> dict[str, Any]:
    """What is written of the losses with rounded hops and of the campaign's."""
    differences = {arm: paired(rounded[arm], control[arm]) for arm in rounded}
    return {
        "rounded": ROUNDED,
        "interval": HOW,
        "loss": {"int8": rounded, "float32": control},
        "difference": intervals.figures(differences),
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each arm."""
    lines = ["held-out loss [nats per byte] with hops of int8, minus that with float32, by seed:"]
    for arm, found in figures["difference"].items():
        each = by_seed(paired(*(figures["loss"][kind][arm] for kind in ("int8", "float32"))))
        lines.append(f"{arm:8s} {each}: {with_ends(found)}")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line, train and print; returns the exit code."""
    return study_command.run(COMMAND, __doc__ or "", "small models, one seed", Study, table)


if __name__ == "__main__":
    sys.exit(main())
