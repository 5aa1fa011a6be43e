"""Full paths, partial paths, and partial paths by a recipe: three short runs and a picture.

    python -m experiments.paper.recipe_quick            15 minutes on two cores
    python -m experiments.paper.recipe_quick --list     says which runs are there, trains none

All three are `configs/recipe_quick.yaml`: the first one with the plan of full paths, the second one
without its recipe. They train as any run does, two at a time; their losses are held-out. One seed,
and few bytes for each parameter: what can be concluded is in README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched import fields

from experiments.paper import drawing, jobs, study_command
from experiments.paper.drawing import BLACK, BLUE, VERMILION
from experiments.paper.jobs import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.paper.summary import Summary

CONFIG = Path(__file__).parent / "configs" / "recipe_quick.yaml"
PLANS = "experiments/paper/plans"
ARMS: dict[str, dict[str, Any]] = {
    "full paths": {
        "plan": {"file": f"{PLANS}/full.json", "method": "full-joint", "budget_s": 5},
        "recipe": {},
    },
    "partial paths": {"recipe": {}},
    "partial paths, preset quality": {},
}
COLORS = dict(zip(ARMS, (BLACK, VERMILION, BLUE), strict=True))


class Study(study_command.Study):
    """The three runs, whose results are not committed."""

    NAME = FOLDER = "recipe_quick"

    def __init__(self, folder: Path):
        """`folder` is worked in, and has the results."""
        super().__init__(folder)
        self.summaries = self.folder / "summaries"
        self.result = self.folder / f"{self.NAME}.json"

    def job(self, arm: str) -> Job:
        """Describe the run of an arm."""
        config = dict(fields.load_yaml(CONFIG, "config")) | ARMS[arm]
        del config["run_dir"]
        where = self.summaries, self.folder
        return jobs.job_of(jobs.slug(arm), config, *where, self.command)

    def tasks(self) -> list[Job]:
        """Name the three runs."""
        return [self.job(arm) for arm in ARMS]

    def figures(self) -> dict[str, Any]:
        """Gather what is drawn and told."""
        return {"curves": {arm: curve_of(self.job(arm).trained()) for arm in ARMS}}


def curve_of(own: Summary) -> dict[str, Any]:
    """Gather what is drawn and told of a run."""
    return {
        "million_bytes": [step * own.tokens_per_iteration / 1e6 for step, _, _ in own.curve],
        "hours": [seconds / 3600 for _, seconds, _ in own.curve],
        "loss": [loss for *_, loss in own.curve],
        "end": own.loss,
        "end_hours": own.simulated_s / 3600,
        "loss_of_half_of_the_stages": own.keep["3"]["loss"],
    }


def draw(curves: dict[str, Any]) -> Figure:
    """Draw held-out losses against bytes and against planned time."""
    figure, [(data, hours)] = drawing.panels(2, 3.6)
    for arm, curve in curves["curves"].items():
        for axes, x in ((data, curve["million_bytes"]), (hours, curve["hours"])):
            drawing.band(axes, x, [curve["loss"]], arm, COLORS[arm])
            axes.set_ylabel("held-out loss of the full model, nats per byte")
    data.set_xlabel("million bytes read")
    hours.set_xlabel("hours by the planner, 20 nodes in 12 regions")
    data.legend()
    return figure


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each run."""
    return "\n".join(
        f"{arm:32s} loss {own['end']:.3f}, with half of the stages "
        f"{own['loss_of_half_of_the_stages']:.3f}, after {own['end_hours']:.1f} h by the planner"
        for arm, own in figures["curves"].items()
    )


def main() -> int:
    """Parse the command line, train and draw; returns the exit code."""
    return study_command.run(Study, __doc__, table, draw)


if __name__ == "__main__":
    sys.exit(main())
