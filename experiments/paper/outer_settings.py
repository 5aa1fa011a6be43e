"""Settings of `averaging: {mode: outer}`, tried on text that no reported run reads.

One seed, one arm, and as text the tests of Python's standard library, which the campaign's source
leaves out: so nothing is chosen by the text that is reported. Beside the settings stands the same
run with gradients averaged in every iteration.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.paper import jobs
from experiments.paper.campaign import Campaign, Run
from experiments.paper.jobs import Job

# A fragment is whole blocks of every stage, and the campaign's stages have two.
SENT = {"fragments": 2, "delay": 1, "dtype": "int8"}
EXACT = "exact"


@dataclass(frozen=True)
class Setting:
    """What of the section `averaging` is tried.

    Attributes:
        every: iterations in which everything is averaged once.
        exact_steps: first iterations, which average gradients.
        rate, momentum: of the outer optimizer.
    """

    every: int
    exact_steps: int
    rate: float
    momentum: float

    @property
    def name(self) -> str:
        """How its figures and files are called."""
        return f"every{self.every}-exact{self.exact_steps}-{self.rate:g}-{self.momentum:g}"

    def section(self, steps: int) -> dict[str, Any]:
        """The section `averaging` of a run of so many iterations.

        Few iterations are for trying the command: at most half of them are exact, and in the rest
        everything is averaged twice at least.
        """
        exact_steps = min(self.exact_steps, steps // 2)
        every = min(self.every, max(SENT["delay"] + 1, (steps - exact_steps) // 2))
        own = {"rate": self.rate, "momentum": self.momentum, "exact_steps": exact_steps}
        return {"mode": "outer", "every": every, **SENT, **own}


# After 99 exact iterations of 300, and cycles of 20 or 5, the last fragment is sent at the end of
# iteration 299, and applied as the run ends. After 150 of them it is sent after iteration 290: what
# replicas learn by themselves in the nine that are left does not count.
TRIED = (
    Setting(20, 99, 1.0, 0.0),
    Setting(2, 0, 1.0, 0.5),
    Setting(20, 99, 1.0, 0.5),
    Setting(20, 99, 1.0, 0.7),
    Setting(20, 99, 0.7, 0.9),
    Setting(5, 99, 1.0, 0.5),
    Setting(20, 150, 1.0, 0.5),
    Setting(20, 99, 1.0, 0.9),
    Setting(20, 150, 1.0, 0.7),
    Setting(20, 150, 1.0, 0.6),
)
QUICK_TRIED = 2
# The cycle of the planner's figures.
PLANNED_EVERY = 20
OTHER_TEXT = "test/*.py"
SEED, SEQUENCES = 5, 512
# Skipping leaves each replica fewer microbatches of its own, so it is the harder of the two.
ARM = "skip33"


class Trials:
    """The runs by which a setting is chosen."""

    def __init__(self, campaign: Campaign, results: Path):
        """Their summaries are in `results`."""
        self.campaign, self.results = campaign, results
        self.tried = TRIED[:QUICK_TRIED] if campaign.quick else TRIED

    def jobs(self) -> dict[str, Job]:
        """All of them by name; the exact one first."""
        return {EXACT: self._job(EXACT, None)} | {
            setting.name: self._job(setting.name, setting) for setting in self.tried
        }

    def losses(self) -> dict[str, float]:
        """The held-out losses at the end, on the other text, of those that have been trained."""
        found = {name: job.summary() for name, job in self.jobs().items()}
        return {name: own.curve[-1][-1] for name, own in found.items() if own is not None}

    def chosen(self) -> tuple[Setting, ...]:
        """The best of those that have been trained, and the best with the planner's cycle.

        They may be the same one.
        """
        losses = self.losses()
        best_first = sorted(
            (setting for setting in self.tried if setting.name in losses),
            key=lambda setting: losses[setting.name],
        )
        planned = [setting for setting in best_first if setting.every == PLANNED_EVERY]
        return tuple(dict.fromkeys(best_first[:1] + planned[:1]))

    def figures(self) -> dict[str, Any]:
        """What is written of them."""
        losses = self.losses()
        return {
            "text": OTHER_TEXT,
            "arm": ARM,
            "seed": SEED,
            "loss": losses,
            "minus_exact": {
                name: round(loss - losses[EXACT], 4)
                for name, loss in losses.items()
                if EXACT in losses and name != EXACT
            },
        }

    def _job(self, name: str, setting: Setting | None) -> Job:
        config: Mapping[str, Any] = self.campaign.config(Run(ARM, SEED))
        if not self.campaign.quick:
            config = config | {"validation": config["validation"] | {"sequences": SEQUENCES}}
        if setting is not None:
            config = config | {"averaging": setting.section(config["train"]["steps"])}
        other = {"source": "text", "path": str(Path(sysconfig.get_path("stdlib"), OTHER_TEXT))}
        return Job(
            name=f"{ARM}-{name}",
            # Without the path of the text: where the library lies differs by machine.
            digest=jobs.digest_of([config, OTHER_TEXT, jobs.plan_of(config).to_json()]),
            config=config | {"data": config["data"] | other},
            results=self.results,
            command="python -m experiments.paper.outer_averaging",
            # Their losses are those of validation; nothing else of the summary is of use here.
            quick=True,
        )
