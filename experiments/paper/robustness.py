"""What is left of a model when stages are left out at inference, or run in another order.

Every set of so many stages is evaluated, the data stage always among them: with the weights as they
were trained, and with what residual branches add multiplied by the share of microbatches that
visited their stage, and by as many times more as fewer stages run. The control learnt without
skipping; the smaller models have as many blocks as the partial ones run, and cost as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.paper import drawing, intervals
from experiments.paper.campaign import Campaign, runs_of
from experiments.paper.drawing import BLACK, BLUE, GREEN, ORANGE, VERMILION
from experiments.paper.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "robustness"

CONTROL = "full"
WHOLE = {
    CONTROL: ("trained in full", BLACK),
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
HALF = STAGES // 2
PLAIN, SCALED = WAYS = ("plain", "scaled")


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Perplexities with fewer stages, of the control, of what learnt to skip, of smaller models."""
    return figures_of(Campaign(folder, quick).train(runs_of([*WHOLE, *SMALLER], quick)))


def figures_of(found: dict[str, list[Summary]]) -> dict[str, Any]:
    """Return what is drawn, from the summaries of each arm's seeds."""
    smaller = {arm: [math.exp(seed.loss) for seed in found[arm]] for arm in SMALLER}
    found = {arm: found[arm] for arm in WHOLE}
    return {
        "arms": {arm: _of_arm(seeds) for arm, seeds in found.items()},
        "smaller": {
            arm: {"stages": SMALLER[arm], "perplexity": [round(one, 4) for one in own]}
            for arm, own in smaller.items()
        },
        "intervals": intervals.HOW,
        "compared": {way: _compared(way, found, smaller) for way in WAYS},
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

    keep = {
        way: {str(n): over_sets([_keep(seed, way)[str(n)] for seed in seeds]) for n in COUNTS}
        for way in WAYS
    }
    return {
        "seeds": len(seeds),
        "keep": keep[PLAIN],
        "keep_scaled": keep[SCALED],
        "early_exit": np.exp([seed.early_exit for seed in seeds]).mean(axis=0).tolist(),
        "swaps": over_sets([seed.swaps for seed in seeds]),
    }


def _keep(seed: Summary, way: str) -> dict[str, dict[str, float]]:
    return seed.keep if way == PLAIN else seed.keep_scaled


def _compared(
    way: str, found: Mapping[str, Sequence[Summary]], smaller: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Of mean perplexities of seeds with fewer stages, scaled or not: what claims rest on.

    By how many stages run: by which share they are more than with all stages, alike scaled; and
    how much more than those of the control as it is without scales. By the smaller model: how much
    more they are where as many blocks run as it has.
    """

    def perplexities(arm: str, count: int, way: str = way) -> list[float]:
        return [_keep(seed, way)[str(count)]["perplexity"] for seed in found[arm]]

    def of_all(seed: Summary) -> float:
        return math.exp(seed.loss if way == PLAIN else seed.loss_scaled)

    def worse(arm: str, count: int) -> list[float]:
        pairs = zip(perplexities(arm, count), found[arm], strict=True)
        return [own / of_all(seed) - 1 for own, seed in pairs]

    def minus(
        count: int, control: Sequence[float], arms: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        return intervals.minus({arm: perplexities(arm, count) for arm in arms}, control)

    others = [arm for arm in found if arm != CONTROL]

    return {
        "worse_than_all_stages": {
            str(count): intervals.figures({arm: worse(arm, count) for arm in found})
            for count in COUNTS
            if count < STAGES
        },
        "minus_control": {
            str(count): minus(count, perplexities(CONTROL, count, PLAIN), others)
            for count in COUNTS
        },
        "minus_smaller": {arm: minus(SMALLER[arm], own, found) for arm, own in smaller.items()},
    }


def draw(figures: dict[str, Any]) -> Figure:
    """Perplexity with fewer stages, without scales and with them; by early exit, and with swaps."""
    figure, [(plain, scaled), (early, swaps), (worse, against)] = drawing.panels(2, 3.6, 3.0, 2.4)
    arms = figures["arms"]
    for axes, keep in ((plain, "keep"), (scaled, "keep_scaled")):
        _any_left_out(axes, {arm: own[keep] for arm, own in arms.items()})
    for arm, own in arms.items():
        early.plot(range(1, STAGES + 1), own["early_exit"], "o-", color=WHOLE[arm][1], markersize=4)
    smaller = figures["smaller"].values()
    counts = np.array([own["stages"] for own in smaller])
    middle = [np.mean(own["perplexity"]) for own in smaller]
    for axes, x in ((plain, counts / STAGES), (scaled, counts / STAGES), (early, counts)):
        axes.plot(x, middle, "*", color="grey", markersize=9, label="smaller model")
    plain.set_title("Any stages left out")
    scaled.set_title("The same, branches scaled")
    early.set_title("The last stages left out")
    early.set_xlabel("stages that run: the first ...")
    early.set_ylabel("held-out perplexity per byte")
    limits = [*plain.get_ylim(), *scaled.get_ylim()]
    for axes in (plain, scaled, early):
        drawing.plain_log(axes, "y", (2, 5, 10, 20, 50, 100, 200))
    for axes in (plain, scaled):
        axes.set_ylim(min(limits), max(limits))
    _swaps(swaps, arms)
    compared = figures["compared"]
    _rows(worse, [compared[way]["worse_than_all_stages"][str(HALF)] for way in WAYS])
    worse.set_title("Half of the stages, against all")
    worse.set_xlabel("share of perplexity lost (hollow: branches scaled)")
    of_half = next(arm for arm, stages in SMALLER.items() if stages == HALF)
    _rows(against, [compared[way]["minus_smaller"][of_half] for way in WAYS])
    against.set_title("Half of the stages, minus 6 blocks in full")
    against.set_xlabel("perplexity (hollow: branches scaled)")
    figure.legend(*plain.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _any_left_out(axes: Any, arms: dict[str, dict[str, dict[str, float]]]) -> None:
    """Means over all sets of so many stages, and the least and greatest of all."""
    for offset, (arm, keep) in enumerate(arms.items()):
        label, color = WHOLE[arm]
        shares = np.array(COUNTS) / STAGES + 0.012 * (offset - (len(arms) - 1) / 2)
        middle = [spread["perplexity"] for spread in keep.values()]
        ends = [[spread[end] for spread in keep.values()] for end in ("least", "greatest")]
        axes.plot(shares, middle, "o-", color=color, label=label, markersize=4, linewidth=1.2)
        axes.vlines(shares, *ends, color=color, linewidth=1.0, alpha=0.6)
    axes.set_xlabel("share of the stages that run")
    axes.set_ylabel("held-out perplexity per byte")
    axes.set_xticks(np.array(COUNTS) / STAGES, [f"{count / STAGES:.2f}" for count in COUNTS])


def _swaps(axes: Any, arms: dict[str, Any]) -> None:
    for row, (arm, own) in enumerate(arms.items()):
        spread, color = own["swaps"], WHOLE[arm][1]
        in_order = own["keep"][str(STAGES)]["perplexity"]
        axes.plot([row], [spread["perplexity"] / in_order], "o", color=color, markersize=5)
        ends = [spread[end] / in_order for end in ("least", "greatest")]
        axes.vlines([row], *[[end] for end in ends], color=color, linewidth=1.0)
    axes.set_title("Two neighbours swapped")
    axes.set_ylabel("perplexity, times that in order")
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.set_xticks([])
    axes.ticklabel_format(axis="y", useOffset=False)


def _rows(axes: Any, ways: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Means with their intervals, a row for each arm: as trained above, scaled below."""
    for (row, (arm, (_, color))), (way, own) in product(enumerate(WHOLE.items()), enumerate(ways)):
        drawing.interval(axes, row - 0.15 + 0.3 * way, own[arm], color, hollow=way > 0)
    axes.axvline(0.0, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_yticks([])
    axes.set_ylim(len(WHOLE) - 0.5, -0.5)
