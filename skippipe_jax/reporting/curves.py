"""A curve of a figure over the steps of a run, as an SVG that stays small however long the run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.etree.ElementTree import Element, SubElement

import numpy as np
from jaxtyping import Float, Int
from skippipe_sched.figures.svg import (
    add_circle,
    add_line,
    add_text,
    add_title,
    round_ticks,
    rounded,
    start_picture,
    svg_text,
)

# Pixels. A phone shows it at its own size, nearly; a page at a desk has room for two.
WIDTH = 440
HEIGHT = 260
LEFT = 58
RIGHT = WIDTH - 28
TOP = 52
BOTTOM = HEIGHT - 40
TICKS_ACROSS = 6
TICKS_UP = 5

# More points than this lie closer together than a pixel or so.
MOST_POINTS = 300
# From this many on a running mean is drawn, over one of so many parts of the points.
LEAST_SMOOTHED = 60
PARTS = 30

STYLE = """
.curve polyline{fill:none;stroke-linejoin:round}
.curve .raw{stroke:#a9c4e4;stroke-width:1}
.curve .line{stroke:#2f6db5;stroke-width:2}
.curve .dot{fill:#2f6db5}
.curve .mark{stroke:#b5482f;stroke-width:1.5;stroke-dasharray:5 3}
.curve .mark-label{fill:#9c3a23}
"""


def curve(
    title: str,
    unit: str,
    steps: Int[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    span: tuple[float, float],
    mark: tuple[str, float] | None = None,
) -> str:
    """`values` over ascending `steps`, at least one, as the text of an SVG.

    `span` are the lowest and the highest value shown, the second greater; what lies outside is
    drawn on the edge. Many points are thinned out to the least and the greatest of each group, and
    a running mean lies over them. `mark` is a level to compare with, and its name.
    """
    svg = start_picture("curve", (WIDTH, HEIGHT), f"{title} over the steps", STYLE)
    last = max(int(steps[0]) + 1, int(steps[-1]))
    low, high = span

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * (step - steps[0]) / (last - steps[0])

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (min(max(value, low), high) - low) / (high - low)

    groups = min(len(values), MOST_POINTS)
    steps_of = np.array_split(steps, groups)
    values_of = np.array_split(values, groups)
    centres = [float(of_group.mean()) for of_group in steps_of]
    means = np.array([of_group.mean() for of_group in values_of])

    for tick in round_ticks(high, low, TICKS_UP):
        add_line(svg, "grid", (LEFT, y(tick)), (RIGHT, y(tick)))
        add_text(svg, "end", LEFT - 7, y(tick) + 4, f"{tick:,.10g}")
    for tick in round_ticks(last, int(steps[0]), TICKS_ACROSS):
        if tick == int(tick):
            add_line(svg, "grid", (x(tick), BOTTOM), (x(tick), BOTTOM + 4))
            add_text(svg, "middle", x(tick), BOTTOM + 17, f"{tick:,.0f}")
    add_text(svg, "middle", (LEFT + RIGHT) / 2, HEIGHT - 9, "step")

    figures = [unit] if unit else []
    if groups < LEAST_SMOOTHED:
        _add_polyline(svg, "line", zip(map(x, centres), map(y, means), strict=True))
    else:
        extremes = (
            (x(centre), y(value))
            for centre, of_group in zip(centres, values_of, strict=True)
            # One after the other: the line then covers all that lies between.
            for value in dict.fromkeys((of_group.min(), of_group.max()))
        )
        _add_polyline(svg, "raw", extremes)
        window = math.ceil(groups / PARTS)
        smooth = _running_mean(means, window)
        _add_polyline(svg, "line", zip(map(x, centres), map(y, smooth), strict=True))
        figures.append(f"mean over {round(window * len(values) / groups):,} steps")
    if len(values) == 1:
        add_circle(svg, "dot", x(centres[0]), y(means[0]), 3)
    add_title(svg, title, " · ".join(figures))
    if mark is not None:
        label, level = mark
        add_line(svg, "mark", (LEFT, y(level)), (RIGHT, y(level)))
        add_text(svg, "end mark-label", RIGHT, y(level) + 14, label)
    return svg_text(svg)


def _running_mean(values: Float[np.ndarray, " n"], window: int) -> Float[np.ndarray, " n"]:
    """The mean of the values around each, of fewer at the ends."""
    weights = np.ones(window)
    return np.convolve(values, weights, "same") / np.convolve(np.ones(len(values)), weights, "same")


def _add_polyline(svg: Element, classes: str, points: Iterable[tuple[float, float]]) -> None:
    corners = " ".join(f"{rounded(x)},{rounded(y)}" for x, y in points)
    SubElement(svg, "polyline", {"class": classes, "points": corners})
