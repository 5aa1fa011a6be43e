"""What is left of a model when stages are left out at inference, or run in another order.

Every set of so many stages is evaluated, the data stage always among them. The control learnt
without skipping; the smaller models have as many blocks as the partial ones run, and cost as much.
"""

from __future__ import annotations

import math
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

NAME = "robustness"

WHOLE = {
    "full": ("trained in full", BLACK),
    "skip33": ("33% skipped", BLUE),
    "skip33_swaps": ("33% skipped, swaps", ORANGE),
    "skip33_ends_full_equal_time": ("33%, ends full,\nas long as full", GREEN),
    "skip50": ("50% skipped", VERMILION),
}
# Smaller models, and how many of the 6 stages of the whole model they are worth.
SMALLER = {"small67": 4, "small50": 3}
STAGES = 6
# Five stages are 0.83 of all, and so on; a single one is left to the early exit.
COUNTS = range(2, STAGES + 1)


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Perplexities with fewer stages, of the control, of what learnt to skip, of smaller models."""
    return figures_of(Campaign(folder, quick).train(runs_of([*WHOLE, *SMALLER], quick)))


def figures_of(found: dict[str, list[Summary]]) -> dict[str, Any]:
    """What is drawn, for the arms that are there."""
    return {
        "arms": {arm: _of_arm(found[arm]) for arm in WHOLE if arm in found},
        "smaller": {
            arm: {
                "stages": stages,
                "perplexity": [round(math.exp(seed.loss), 4) for seed in found[arm]],
            }
            for arm, stages in SMALLER.items()
            if arm in found
        },
    }


def _of_arm(seeds: Sequence[Summary]) -> dict[str, Any]:
    """By how many stages run: over seeds, the mean of the means, and so on; the extremes of all."""

    def over_sets(spreads: Sequence[dict[str, float]]) -> dict[str, float]:
        return {
            "perplexity": float(np.mean([own["perplexity"] for own in spreads])),
            "deviation": float(np.mean([own["deviation"] for own in spreads])),
            "least": min(own["least"] for own in spreads),
            "greatest": max(own["greatest"] for own in spreads),
        }

    full = float(np.mean([math.exp(seed.loss) for seed in seeds]))
    keep = {count: over_sets([seed.keep[str(count)] for seed in seeds]) for count in COUNTS}
    return {
        "seeds": len(seeds),
        "keep": {str(count): own for count, own in keep.items()},
        "worse_than_all_stages": {
            f"{count / STAGES:.2f}": round(own["perplexity"] / full - 1, 4)
            for count, own in keep.items()
        },
        "early_exit": np.exp([seed.early_exit for seed in seeds]).mean(axis=0).tolist(),
        "swaps": over_sets([seed.swaps for seed in seeds]),
    }


def draw(figures: dict[str, Any]) -> Figure:
    """Perplexity against the share of the stages, against where one leaves, and with swaps."""
    figure, [(sets, early, swaps)] = drawing.panels(3, 4.2)
    arms = {arm: figures["arms"][arm] for arm in WHOLE if arm in figures["arms"]}
    for offset, (arm, own) in enumerate(arms.items()):
        label, color = WHOLE[arm]
        keep = own["keep"].values()
        shares = np.array(COUNTS) / STAGES + 0.012 * (offset - (len(arms) - 1) / 2)
        middle = [spread["perplexity"] for spread in keep]
        ends = [[spread[end] for spread in keep] for end in ("least", "greatest")]
        sets.plot(shares, middle, "o-", color=color, label=label, markersize=4, linewidth=1.2)
        sets.vlines(shares, *ends, color=color, linewidth=1.0, alpha=0.6)
        early.plot(range(1, STAGES + 1), own["early_exit"], "o-", color=color, markersize=4)
    smaller = figures["smaller"].values()
    if smaller:
        shares = [own["stages"] / STAGES for own in smaller]
        middle = [np.mean(own["perplexity"]) for own in smaller]
        sets.plot(shares, middle, "*", color="grey", markersize=9, label="smaller model")
        early.plot([own["stages"] for own in smaller], middle, "*", color="grey", markersize=9)
    sets.set_title("Any stages left out")
    sets.set_xlabel("share of the stages that run")
    sets.set_ylabel("held-out perplexity per byte")
    sets.set_xticks(np.array(COUNTS) / STAGES, [f"{count / STAGES:.2f}" for count in COUNTS])
    early.set_title("The last stages left out")
    early.set_xlabel("stages that run: the first ...")
    for one in (sets, early):
        one.set_yscale("log")
        _plain_ticks(one)
    for row, (arm, own) in enumerate(arms.items()):
        spread, color = own["swaps"], WHOLE[arm][1]
        in_order = own["keep"][str(STAGES)]["perplexity"]
        swaps.plot([row], [spread["perplexity"] / in_order], "o", color=color, markersize=5)
        ends = [spread[end] / in_order for end in ("least", "greatest")]
        swaps.vlines([row], *[[end] for end in ends], color=color, linewidth=1.0)
    swaps.set_title("Two neighbours swapped")
    swaps.set_ylabel("perplexity, times that in order")
    swaps.set_xlim(-0.6, len(arms) - 0.4)
    swaps.set_xticks([])
    swaps.ticklabel_format(axis="y", useOffset=False)
    figure.legend(*sets.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _plain_ticks(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
