"""Perplexity against the share of the stages that run, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from xml.etree.ElementTree import Element, SubElement

import numpy as np
from skippipe_sched.figures.svg import (
    add_circle,
    add_line,
    add_text,
    add_tip,
    add_title,
    point,
    round_ticks,
    start_picture,
    svg_text,
)

# Pixels.
WIDTH = 440
HEIGHT = 280
LEFT = 62
RIGHT = WIDTH - 28
TOP = 52
BOTTOM = HEIGHT - 42
TICKS_UP = 6
CAP = 5
DOT = 3.5
ASIDE = 7  # Between two models, so that their subsets do not cover each other.

STYLE = """
.shares .each{fill:#2f6db5;fill-opacity:.3}
.shares .spread{stroke:#2f6db5;stroke-width:1.5}
.shares .mean{fill:#2f6db5}
.shares .line{fill:none;stroke:#2f6db5;stroke-width:2;stroke-linejoin:round}
.shares .full{stroke:#b5482f;stroke-width:1.5;stroke-dasharray:5 3}
.shares .full-label{fill:#9c3a23}
.shares .scaled .each,.shares .scaled .mean{fill:#2f8a5b}
.shares .scaled .spread,.shares .scaled .line{stroke:#2f8a5b}
.shares .scaled-label{fill:#1f6a43}
"""

PerplexityOfSubsets = Mapping[int, Mapping[tuple[int, ...], float]]
"""By the number of stages that run, then by which."""


def picture(
    perplexities: PerplexityOfSubsets,
    stages: int,
    full_perplexity: float,
    scaled: PerplexityOfSubsets | None = None,
) -> str:
    """Mean, standard deviation and every subset, for each number of the `stages` stages that run.

    Those of a model whose branches are `scaled` stand beside them. A dashed line marks the full
    model. The axis is logarithmic, for a model that has never been run in part can be worse by
    orders of magnitude.
    """
    svg = start_picture("shares", (WIDTH, HEIGHT), "Perplexity of partial models", STYLE)
    add_title(svg, "Perplexity", "mean ± standard deviation, each subset")
    curves = {"plain": perplexities} | ({} if scaled is None else {"scaled": scaled})
    everything = [p for curve in curves.values() for of in curve.values() for p in of.values()]
    everything.append(full_perplexity)
    low, high = math.log(min(everything)) - 0.02, math.log(max(everything)) + 0.02

    def x(share: float) -> float:
        return LEFT + (RIGHT - LEFT) * share

    def y(perplexity: float) -> float:
        height = (math.log(perplexity) - low) / (high - low) if perplexity > 0 else 0.0
        return BOTTOM - (BOTTOM - TOP) * min(max(height, 0.0), 1.0)

    for perplexity in _ticks(math.exp(low), math.exp(high)):
        add_line(svg, "grid", (LEFT, y(perplexity)), (RIGHT, y(perplexity)))
        add_text(svg, "end", LEFT - 7, y(perplexity) + 4, f"{perplexity:,.10g}")
    for count in range(stages + 1):
        add_line(svg, "grid", (x(count / stages), BOTTOM), (x(count / stages), BOTTOM + 4))
    for percent in range(0, 101, 25):
        add_text(svg, "middle", x(percent / 100), BOTTOM + 17, f"{percent}%")
    add_text(svg, "middle", (LEFT + RIGHT) / 2, HEIGHT - 9, f"share of the {stages} stages")
    add_line(svg, "full", (LEFT, y(full_perplexity)), (RIGHT, y(full_perplexity)))
    add_text(svg, "full-label", LEFT + 4, y(full_perplexity) - 5, "all stages")
    for place, (kind, curve) in enumerate(curves.items()):
        group = SubElement(svg, "g", {"class": kind})
        aside = (place - (len(curves) - 1) / 2) * ASIDE
        _curve(group, curve, stages, lambda share, aside=aside: x(share) + aside, y)
    if scaled is not None:
        add_text(svg, "scaled-label end", RIGHT, TOP - 8, "branches scaled")
    return svg_text(svg)


def _curve(
    group: Element,
    perplexities: PerplexityOfSubsets,
    stages: int,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> None:
    """Draw one model: its subsets, and a line through their means."""
    means = []
    for kept, of_orders in sorted(perplexities.items()):
        across, values = x(kept / stages), list(of_orders.values())
        mean, deviation = float(np.mean(values)), float(np.std(values))
        for stages_run, perplexity in of_orders.items():
            tip = f"stages {' '.join(map(str, stages_run))}: {perplexity:.3f}"
            add_tip(add_circle(group, "each", across, y(perplexity), DOT), tip)
        ends = [y(mean - deviation), y(mean + deviation)]
        add_line(group, "spread", (across, ends[0]), (across, ends[1]))
        for end in ends:
            add_line(group, "spread", (across - CAP, end), (across + CAP, end))
        tip = f"{kept} of {stages} stages: {mean:.3f} ± {deviation:.3f}"
        add_tip(add_circle(group, "mean", across, y(mean), DOT), tip)
        means.append(point((across, y(mean))))
    SubElement(group, "polyline", {"class": "line", "points": " ".join(means)})


def _ticks(low: float, high: float) -> list[float]:
    """Round perplexities from `low` to `high`: evenly spaced, or 1, 2, 5, 10 and so on."""
    if high < 10 * low:
        return round_ticks(high, low, TICKS_UP)
    digits = (1, 2, 5) if high < 1e3 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]
