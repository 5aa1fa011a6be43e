"""Full paths, partial paths, and partial paths by a recipe: three short runs and a picture.

    python -m experiments.paper.recipe_quick            15 minutes on two cores
    python -m experiments.paper.recipe_quick --list     says which runs are there, trains none

All three are `configs/recipe_quick.yaml`: the first one with the plan of full paths, the second one
without its recipe. They train as any run does, two at a time; their losses are held-out. One seed,
and few bytes for each parameter: what can be concluded is in README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched import fields

from experiments.benchmarks.harness import reporting
from experiments.paper import drawing, jobs
from experiments.paper.drawing import BLACK, BLUE, VERMILION
from experiments.paper.reproduce import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.paper.summary import Summary

NAME = "recipe_quick"
COMMAND = "python -m experiments.paper.recipe_quick"
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


def job_of(arm: str, results: Path) -> jobs.Job:
    """Describe the run of an arm."""
    config = dict(fields.load_yaml(CONFIG, "config")) | ARMS[arm]
    del config["run_dir"]
    return jobs.job_of(jobs.slug(arm), config, results, COMMAND)


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


def curves_of(found: dict[str, Summary]) -> dict[str, Any]:
    """Gather what is drawn."""
    return {
        arm: {
            "million_bytes": [step * own.tokens_per_iteration / 1e6 for step, _, _ in own.curve],
            "hours": [seconds / 3600 for _, seconds, _ in own.curve],
            "loss": [loss for *_, loss in own.curve],
            "loss_of_half_of_the_stages": own.keep["3"]["loss"],
        }
        for arm, own in found.items()
    }


def main() -> int:
    """Parse the command line, train and draw; returns the exit code."""
    parser = reporting.documented_parser(COMMAND, __doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/recipe_quick"), help="working folder"
    )
    parser.add_argument("--list", action="store_true", help="list the trained runs, and train none")
    arguments = parser.parse_args()
    return jobs.stoppable(lambda: _run(arguments.folder.resolve(), arguments.list))


def _run(folder: Path, lists: bool) -> int:
    of_arms = {arm: job_of(arm, folder / "results") for arm in ARMS}
    if lists:
        for arm, job in of_arms.items():
            print(f"{arm:32s}", "trained" if job.summary() else "not trained")
        return 0
    jobs.train(list(of_arms.values()), folder)
    found = {arm: own for arm, job in of_arms.items() if (own := job.summary()) is not None}
    curves = curves_of(found)
    write(sys.modules[__name__], reporting.origin(COMMAND) | {"curves": curves}, folder)
    for arm, own in found.items():
        half = curves[arm]["loss_of_half_of_the_stages"]
        print(
            f"{arm:32s} loss {own.loss:.3f}, with half of the stages {half:.3f}, "
            f"after {own.simulated_s / 3600:.1f} h by the planner"
        )
    print(folder / f"{NAME}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
