"""How well a model learns when microbatches skip stages, against bytes and against time.

All runs learn the same number of bytes in an iteration, in the same order, at the same learning
rate unless an arm is about that. What is compared is always the held-out loss of the full model.
Beside it stands the loss when what a stage adds is multiplied, at evaluation, by the share of
microbatches that visited it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.paper import drawing
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
PATHS = {
    "full": "full pipeline",
    "skip33": "33% planned, in order",
    "skip33_swaps": "33% planned, swaps",
    "skip33_skippipe": "33% by the paper's search, swaps",
    "skip33_random": "33% random, in order",
    "skip33_random_swaps": "33% random, swaps",
    "skip25": "25% planned, in order",
    "skip25_random": "25% random, in order",
    "skip50": "50% planned, in order",
    "skip50_random": "50% random, in order",
    "small67": "8 blocks instead of 12, in full",
    "small50": "6 blocks instead of 12, in full",
}
RECIPES = {
    "full": "full pipeline",
    "full_higher_rate": "full, twice the learning rate",
    "skip33": "33% skipped",
    "skip33_higher_rate": "twice the learning rate",
    "skip33_full_every_10": "every 10th iteration full",
    "skip33_inverse": "scaled by 1/p in training",
    "skip33_ends_full": "last fifth full",
    "skip33_inverse_ends_full": "scaled by 1/p, last fifth full",
    "skip33_equal_time": "as long as the full pipeline",
    "skip33_ends_full_equal_time": "as long, last fifth full",
}
ARMS = tuple(dict.fromkeys([*RATIOS, *IN_TIME, *PATHS, *RECIPES]))


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Held-out losses of all arms, while they train and at the end."""
    return figures_of(Campaign(folder, quick).train(runs_of(ARMS, quick)))


def figures_of(found: dict[str, list[Summary]]) -> dict[str, Any]:
    """What is drawn, for the arms that are there."""
    return {"arms": {arm: _of_arm(found[arm]) for arm in ARMS if arm in found}}


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
    """Losses against bytes and against time, and those at the end by paths and by recipe."""
    arms = figures["arms"]
    figure, ((data, time), (paths, recipes)) = drawing.panels(2, 3.6, 3.6)
    _curves(data, arms, RATIOS, in_time=False)
    data.set_title("Against data")
    _curves(time, arms, IN_TIME, in_time=True)
    time.set_title("Against time, on 20 nodes in 12 regions")
    _ends(paths, arms, PATHS)
    paths.set_title("By paths (hollow: stages scaled)")
    _ends(recipes, arms, RECIPES)
    recipes.set_title("By recipe (hollow: stages scaled)")
    return figure


def _curves(axes: Any, arms: dict[str, Any], shown: dict[str, Any], *, in_time: bool) -> None:
    lowest, ends = np.inf, []
    for arm, (label, color) in shown.items():
        if arm not in arms:
            continue
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
    if ends:
        # What comes in the first quarter is steep, and would leave no room for the rest.
        axes.set_ylim(lowest - 0.03, max(ends) + 0.02)
        axes.legend()


def _ends(axes: Any, arms: dict[str, Any], shown: dict[str, str]) -> None:
    rows = [arm for arm in shown if arm in arms]
    for row, arm in enumerate(rows):
        own = arms[arm]
        drawing.dots(axes, row, own["loss"], BLACK if arm == "full" else BLUE)
        if own["loss"] != (scaled := own["loss_scaled_at_evaluation"]):
            axes.plot(scaled, [row] * len(scaled), "o", color=BLUE, markersize=5, mfc="none")
    if "full" in arms:
        axes.axvline(np.mean(arms["full"]["loss"]), color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [shown[arm] for arm in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("held-out loss, nats per byte")
    axes.grid(axis="y", visible=False)
