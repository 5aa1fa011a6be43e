"""What it costs in loss that parameters and moments are held in bfloat16, rounded by chance.

    python -m experiments.paper.rounded_state              trains what is missing, and prints it

The campaign's control is trained for 500 iterations, for each seed with parameters and moments in
float32, and with both in bfloat16. All else is the same, and the loss of a run is on text that
nothing was chosen by.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import intervals, jobs, study_command
from experiments.paper.campaign import Run
from experiments.paper.intervals import HOW, line
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


class Study(study_command.CampaignStudy):
    """The runs, which differ in how state is held and in nothing else."""

    NAME = "rounded_state"

    def jobs(self, held: str) -> list[Job]:
        """Describe the runs that hold state in some way, one for each seed."""
        return [self._job(held, seed) for seed in range(SEEDS)]

    def tasks(self) -> list[Job]:
        """Name all runs."""
        return [job for held in HELD for job in self.jobs(held)]

    def _job(self, held: str, seed: int) -> Job:
        """The campaign's configuration of its control, as long as it is here."""
        config = self.campaign.config(Run(ARM, seed))
        config["train"] = config["train"] | {"steps": STEPS}
        for section, keys in HELD[held].items():
            config[section] = config[section] | keys
        return self.job_of(f"{held}-{seed}", config)

    def digest(self) -> str:
        """Of all that the study comes from."""
        return jobs.json_digest([job.digest for job in self.tasks()])

    def figures(self) -> dict[str, Any]:
        """Gather the losses, and the differences from those of exact state."""
        losses = {held: [job.trained().loss for job in self.jobs(held)] for held in HELD}
        others = {held: own for held, own in losses.items() if held != EXACT}
        difference = intervals.minus(others, losses[EXACT])
        given = {"digest": self.digest(), "steps": STEPS, "interval": HOW}
        return given | {"loss": losses, "difference": difference}


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each way that state is held."""
    lines = [f"held-out loss [nats per byte], minus that with {EXACT}, by seed:"]
    losses = figures["loss"]
    for held, found in figures["difference"].items():
        lines.append(line(held, losses[held], losses[EXACT], found))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(study_command.run(Study, __doc__, table))
