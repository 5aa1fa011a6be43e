"""How well a model learns when microbatches skip stages, against bytes and against time.

All runs learn the same number of bytes in an iteration, in the same order, at the same learning
rate unless an arm is about that. What is compared is always the held-out loss of the full model,
of an arm and of its control with the same seeds; each difference comes with its interval (see
`intervals`). Beside it stands the loss when what the residual branches of a stage add is
multiplied, at evaluation, by the share of microbatches that visited it. Arms and controls are
compared as they are or both scaled: a model that was trained in full is the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.paper import drawing, intervals
from experiments.paper.campaign import Campaign, runs_of
from experiments.paper.drawing import BLACK, BLUE, GREEN, ORANGE, VERMILION
from experiments.paper.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "convergence"

RATIOS = {
    "full": ("full pipeline", BLACK),
    "skip25": ("25% skipped", GREEN),
    "skip33": ("33% skipped", BLUE),
    "skip50": ("50% skipped", VERMILION),
}
IN_TIME = {
    "full": ("full pipeline", BLACK),
    "skip33": ("33% skipped", BLUE),
    "skip33_equal_time": ("33%, as long as full", ORANGE),
    "skip33_ends_full_equal_time": ("33%, as long, ends full", GREEN),
    "small67_equal_time": ("8 blocks, in full, as long", VERMILION),
}
# What is shown of arms at equal data against the full pipeline, and of recipes against skipping.
PATHS = {
    "skip25": "25% planned, in order",
    "skip25_random": "25% random, in order",
    "skip33": "33% planned, in order",
    "skip33_swaps": "33% planned, swaps",
    "skip33_skippipe": "33% by the paper's search, swaps",
    "skip33_random": "33% random, in order",
    "skip33_random_swaps": "33% random, swaps",
    "skip50": "50% planned, in order",
    "skip50_random": "50% random, in order",
    "small67": "8 blocks instead of 12, in full",
    "small50": "6 blocks instead of 12, in full",
}
RECIPES = {
    "full": "full pipeline",
    "full_higher_rate": "full, twice the learning rate",
    "skip33_higher_rate": "twice the learning rate",
    "skip33_full_every_10": "every 10th iteration full",
    "skip33_ends_full": "last fifth full",
}
# And at equal time, against the full pipeline and against a smaller model.
LONGER = {
    "skip25_equal_time": "25% skipped",
    "skip33_equal_time": "33% skipped",
    "skip33_ends_full_equal_time": "33% skipped, last fifth full",
    "skip50_equal_time": "50% skipped",
}
SMALLER = "small67_equal_time"
PANELS = {
    "Minus the full pipeline, equal data": ("full", PATHS),
    "Minus 33% skipped, equal data": ("skip33", RECIPES),
    "Minus the full pipeline, equal time": ("full", LONGER | {SMALLER: "8 blocks, in full"}),
    "Minus 8 blocks in full, equal time": (SMALLER, {"full": "full pipeline"} | LONGER),
}
ARMS = tuple(dict.fromkeys([*RATIOS, *IN_TIME, *PATHS, *RECIPES, *LONGER]))
# By control: the arms whose difference from it is written.
COMPARED = {
    "full": tuple(arm for arm in ARMS if arm != "full"),
    "skip25": ("skip25_random",),
    "skip33": tuple(dict.fromkeys([*RECIPES, *PATHS])),
    "skip33_equal_time": tuple(LONGER),
    "skip50": ("skip50_random",),
    "small67": ("skip25", "skip33", "skip50", "small50"),
    SMALLER: ("full", *LONGER),
}


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Held-out losses of all arms, while they train and at the end."""
    return figures_of(Campaign(folder, quick).train(runs_of(ARMS, quick)))


def figures_of(found: dict[str, list[Summary]]) -> dict[str, Any]:
    """Return what is drawn, from the summaries of each arm's seeds."""
    found = {arm: found[arm] for arm in ARMS}
    losses = {arm: [seed.loss for seed in seeds] for arm, seeds in found.items()}
    scaled = {arm: [seed.loss_scaled for seed in seeds] for arm, seeds in found.items()}
    gains = {arm: intervals.paired(own, losses[arm]) for arm, own in scaled.items()}
    return {
        "arms": {arm: _of_arm(seeds) for arm, seeds in found.items()},
        "intervals": intervals.HOW,
        "minus": {
            control: {
                "loss": _minus(control, arms, losses),
                "loss_scaled_at_evaluation": _minus(control, arms, scaled),
            }
            for control, arms in COMPARED.items()
        },
        "scaled_minus_plain": intervals.figures(
            {arm: own for arm, own in gains.items() if any(own)}
        ),
    }


def _minus(
    control: str, arms: Sequence[str], losses: dict[str, list[float]]
) -> dict[str, dict[str, Any]]:
    """The differences of these arms from a control; the deviation is pooled over all there are."""
    others = {arm: own for arm, own in losses.items() if arm != control}
    found = intervals.minus(others, losses[control])
    return {arm: own for arm, own in found.items() if arm in set(arms)}


def _of_arm(seeds: Sequence[Summary]) -> dict[str, Any]:
    first = seeds[0]
    return {
        "iterations": first.steps,
        "tokens_per_iteration": first.tokens_per_iteration,
        "simulated_s": [seed.simulated_s for seed in seeds],
        "loss": [seed.loss for seed in seeds],
        "loss_scaled_at_evaluation": [seed.loss_scaled for seed in seeds],
        "curve": {
            "iteration": [step for step, _, _ in first.curve],
            "simulated_s": [clock_s for _, clock_s, _ in first.curve],
            "loss": [[loss for _, _, loss in seed.curve] for seed in seeds],
        },
        "commits": sorted({seed.commit for seed in seeds}),
        "minutes": [seed.minutes for seed in seeds],
    }


def draw(figures: dict[str, Any]) -> Figure:
    """Losses against bytes and against time, and differences at the end from four controls."""
    arms = figures["arms"]
    figure, ((data, time), *rows) = drawing.panels(2, 3.6, 3.6, 2.4)
    _curves(data, arms, RATIOS, in_time=False)
    data.set_title("Against data")
    _curves(time, arms, IN_TIME, in_time=True)
    time.set_title("Against time, on 20 nodes in 12 regions")
    for axes, (title, (control, shown)) in zip(chain(*rows), PANELS.items(), strict=True):
        _differences(axes, figures["minus"][control], shown)
        axes.set_title(title)
    return figure


def _curves(axes: Any, arms: dict[str, Any], shown: dict[str, Any], *, in_time: bool) -> None:
    lowest, ends = np.inf, []
    for arm, (label, color) in shown.items():
        curve = arms[arm]["curve"]
        in_millions = arms[arm]["tokens_per_iteration"] / 1e6
        hours = np.array(curve["simulated_s"]) / 3600
        x = hours if in_time else np.array(curve["iteration"]) * in_millions
        drawing.band(axes, x.tolist(), curve["loss"], label, color)
        lowest = min(lowest, float(np.min(curve["loss"])))
        ends.append(float(np.max([losses[len(losses) // 4] for losses in curve["loss"]])))
    axes.set_xlabel("simulated hours, averaging included" if in_time else "million bytes read")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.set_xlim(left=0)
    # What comes in the first quarter is steep, and would leave no room for the rest.
    axes.set_ylim(lowest - 0.03, max(ends) + 0.02)
    axes.legend()


def _differences(axes: Any, minus: dict[str, Any], shown: dict[str, str]) -> None:
    """A row for each arm: its difference with the interval, hollow with branches scaled."""
    plain, scaled = minus["loss"], minus["loss_scaled_at_evaluation"]
    for row, arm in enumerate(shown):
        drawing.interval(axes, row - 0.15, plain[arm], BLACK)
        if scaled[arm]["mean"] != plain[arm]["mean"]:
            drawing.interval(axes, row + 0.2, scaled[arm], BLUE, hollow=True)
    axes.axvline(0.0, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(shown)), [*shown.values()])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("nats per byte (hollow: scaled)")
    axes.grid(axis="y", visible=False)
