"""Where skipping pays: held-out loss after equal time, against the share of stages skipped.

An iteration that skips is shorter, so there are more of them in the same time; how many more
depends on the network. For each share there is a run with as many iterations as the control and
one with as many as take its time in 12 regions. The loss after another number of iterations, each
with a learning rate that falls to its end, lies on the line through the two against the logarithm
of that number. So it does for a smaller model that is trained in full: whoever skips to save time
could as well train that. All are compared on the seeds that every one of them has, as another seed
moves a loss by as much as another share does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.paper import drawing, plans
from experiments.paper.campaign import Campaign, runs_of
from experiments.paper.drawing import BLACK, BLUE, GREEN, VERMILION
from experiments.paper.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "trade_off"

SKIPPED = {"skip25": 1 / 4, "skip33": 1 / 3, "skip50": 1 / 2}
# Has as many blocks as a path visits with a third skipped.
SMALLER, WORTH_SKIPPING = "small67", SKIPPED["skip33"]
OTHERS = (*SKIPPED, SMALLER)
ARMS = ("full", *OTHERS, *(f"{name}_equal_time" for name in OTHERS))
COLORS = (BLUE, VERMILION, GREEN)
BUDGET_S, QUICK_BUDGET_S = 30.0, 0.3


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Seconds of an iteration for each share on each network, and the loss after equal time."""
    found = Campaign(folder, quick).train(runs_of(ARMS, quick))
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    seconds = {
        network: {
            name: plans.iteration_s(name, network, budget_s, folder / "plans")
            for name in ("full", *OTHERS)
        }
        for network in plans.NETWORKS
    }
    return figures_of(found, seconds)


def figures_of(
    found: dict[str, list[Summary]], seconds: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """What is drawn, for the arms that are there."""
    of_all_seeds = [seed.loss for seed in found["full"]]
    there = [arm for arm in ARMS if arm in found]
    seeds = min(len(found[arm]) for arm in there)
    found = {arm: found[arm][:seeds] for arm in there}
    [control] = {seed.steps for seed in found["full"]}

    def point(name: str, of_plan: dict[str, float]) -> dict[str, float | bool]:
        iterations = control * of_plan["full"] / of_plan[name]
        longer = found[f"{name}_equal_time"]
        return {
            "iterations": iterations,
            "loss": _loss_after(iterations, found[name], longer),
            "beyond_what_was_trained": iterations > 1.02 * longer[0].steps,
        }

    compared = [name for name in OTHERS if {name, f"{name}_equal_time"} <= found.keys()]
    networks = {
        network: {
            "points": [
                {"skipped": SKIPPED[name]} | point(name, of_plan)
                for name in compared
                if name in SKIPPED
            ],
            "smaller_model": point(SMALLER, of_plan) if SMALLER in compared else None,
        }
        for network, of_plan in seconds.items()
    }
    return {
        "seeds": seeds,
        "control": {
            "iterations": control,
            "loss": [seed.loss for seed in found["full"]],
            "loss_of_all_seeds": of_all_seeds,
        },
        "equal_data": {
            name: {"skipped": SKIPPED[name], "loss": [seed.loss for seed in found[name]]}
            for name in SKIPPED
            if name in found
        },
        "smaller_model": {"loss": [seed.loss for seed in found.get(SMALLER, [])]},
        "iteration_s": seconds,
        "equal_time": networks,
    }


def _loss_after(iterations: float, shorter: Sequence[Summary], longer: Sequence[Summary]) -> float:
    """The mean loss after a run of so many iterations, on the line through two such means."""
    first, second = (float(np.mean([own.loss for own in runs])) for runs in (shorter, longer))
    reach = math.log(longer[0].steps / shorter[0].steps)
    return first + (second - first) * math.log(iterations / shorter[0].steps) / reach


def draw(figures: dict[str, Any]) -> Figure:
    """Loss against the share skipped, at equal data and at equal time on each network."""
    figure, [(losses, pace)] = drawing.panels(2, 4.2)
    control = figures["control"]
    base, spread = float(np.mean(control["loss"])), control["loss_of_all_seeds"]
    losses.axhspan(min(spread), max(spread), color=BLACK, alpha=0.1, lw=0)
    losses.axhline(base, color=BLACK, linewidth=0.8)
    alike = figures["equal_data"].values()
    losses.plot(
        [0, *(own["skipped"] for own in alike)],
        [base, *(float(np.mean(own["loss"])) for own in alike)],
        "s--", color="grey", markersize=4, linewidth=1.0, label="equal data",
    )  # fmt: skip
    smaller = figures["smaller_model"]["loss"]
    if smaller:
        name = "8 blocks, trained in full"
        losses.plot(WORTH_SKIPPING, np.mean(smaller), "*", color="grey", markersize=9, label=name)
    for (network, own), color in zip(figures["equal_time"].items(), COLORS, strict=True):
        points = own["points"]
        shares = [0, *(point["skipped"] for point in points)]
        values = [base, *(point["loss"] for point in points)]
        losses.plot(shares, values, "-", color=color, label=f"equal time, {network}")
        marks = [("o", 5, point) for point in points]
        if own["smaller_model"]:
            marks.append(("*", 9, {"skipped": WORTH_SKIPPING} | own["smaller_model"]))
        for mark, size, point in marks:
            face = "white" if point["beyond_what_was_trained"] else color
            losses.plot(point["skipped"], point["loss"], mark, color=color, mfc=face, ms=size)
        more = [point["iterations"] / control["iterations"] for point in points]
        pace.plot(shares, [1.0, *more], "o-", color=color, markersize=4)
    losses.set_title("Below the black line, skipping pays")
    losses.set_ylabel("held-out loss of the full model, nats per byte")
    pace.set_title("What skipping saves")
    pace.set_ylabel("iterations in the time of one full iteration")
    pace.set_ylim(bottom=0.9)
    for one in (losses, pace):
        one.set_xlabel("share of the stages skipped")
        one.set_xticks([0, *SKIPPED.values()], ["0", "1/4", "1/3", "1/2"])
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
