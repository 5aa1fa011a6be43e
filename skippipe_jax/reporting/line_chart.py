"""Line charts as SVG: a metric over the steps, and perplexity over the share of stages."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from skippipe_sched.figures.svg import Shape, point, round_ticks, start_picture

# Pixels. The chart fits a phone at about its natural size; a desktop page has room for two.
WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 60, WIDTH - 28, 52, HEIGHT - 41
CAP, DOT = 5, 3.5
ASIDE = 7  # Offset between two models, so that their subsets do not overlap.
TICKS_ACROSS, TICKS_UP = 6, 6

# With more points than this, neighbors would be about a pixel apart.
MOST_POINTS = 300
# With this many points or more, a running mean over 1/`PARTS` of them is drawn.
LEAST_SMOOTHED = 60
PARTS = 30

STYLE = """
.chart polyline{fill:none;stroke-linejoin:round}
.chart .raw{stroke:#a9c4e4;stroke-width:1}
.chart .line{stroke:#2f6db5;stroke-width:2}
.chart .each{fill:#2f6db5;fill-opacity:.3}
.chart .spread{stroke:#2f6db5;stroke-width:1.5}
.chart .mean{fill:#2f6db5}
.chart .mark{stroke:#b5482f;stroke-width:1.5;stroke-dasharray:5 3}
.chart .mark-label{fill:#9c3a23}
.chart .scaled .each,.chart .scaled .mean{fill:#2f8a5b}
.chart .scaled .spread,.chart .scaled .line{stroke:#2f8a5b}
.chart .scaled-label{fill:#1f6a43}
"""

PerplexityOfSubsets = Mapping[int, Mapping[tuple[int, ...], float]]
"""Perplexities by the number of stages that run, then by the stages."""


@dataclass(frozen=True)
class Chart:
    """Chart that notebooks display."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chart to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


class _Chart:
    """Chart with two axes, which map values to pixels."""

    def __init__(self, about: str, across: tuple[float, float], up: tuple[float, float]):
        """Draw an empty chart with these ranges of values."""
        self.svg = start_picture("chart", (WIDTH, HEIGHT), about, STYLE)
        self._across, self._up = across, up

    def x(self, value: float) -> float:
        first, last = self._across
        return LEFT + (RIGHT - LEFT) * (value - first) / (last - first)

    def y(self, value: float) -> float:
        low, high = self._up
        return BOTTOM - (BOTTOM - TOP) * (min(max(value, low), high) - low) / (high - low)

    def add_axes(self, ups: Mapping[float, str], acrosses: Mapping[float, str], name: str) -> None:
        """Draw ticks with labels, and the name of the horizontal axis."""
        for value, label in ups.items():
            self.svg.add_line("grid", (LEFT, self.y(value)), (RIGHT, self.y(value)))
            self.svg.add_text("end", LEFT - 7, self.y(value) + 4, label)
        for value, label in acrosses.items():
            if label:
                self.svg.add_text("middle", self.x(value), BOTTOM + 17, label)
            self.svg.add_line("grid", (self.x(value), BOTTOM), (self.x(value), BOTTOM + 4))
        self.svg.add_text("middle", (LEFT + RIGHT) / 2, HEIGHT - 9, name)

    def add_mark(self, value: float, label: str, place: tuple[str, float, float]) -> None:
        """Draw a dashed level; `place` is the label's class, its x, and its y below the level."""
        self.svg.add_line("mark", (LEFT, self.y(value)), (RIGHT, self.y(value)))
        classes, x, below = place
        self.svg.add_text(f"{classes} mark-label", x, self.y(value) + below, label)


def line_chart(
    title: str,
    unit: str,
    steps: Int[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    span: tuple[float, float],
    mark: tuple[str, float] | None = None,
) -> str:
    """Draw `values` over ascending `steps`, at least one, as the text of an SVG.

    `span` is the lowest and the highest value shown, the second greater; values outside are drawn
    at the edge. Many points are reduced to the minimum and maximum of each group, with a running
    mean over them. `mark` is the name and the value of a level to compare with.
    """
    first, last = int(steps[0]), max(int(steps[0]) + 1, int(steps[-1]))
    chart = _Chart(f"{title} over the steps", (first, last), span)
    groups = min(len(values), MOST_POINTS)
    values_of = np.array_split(values, groups)
    centres = [chart.x(float(of_group.mean())) for of_group in np.array_split(steps, groups)]
    means = np.array([of_group.mean() for of_group in values_of])

    across = {t: f"{t:,.0f}" for t in round_ticks(last, first, TICKS_ACROSS) if t == int(t)}
    chart.add_axes(_labeled(round_ticks(span[1], span[0], TICKS_UP)), across, "step")
    figures = [unit] if unit else []
    if groups >= LEAST_SMOOTHED:
        extremes = (
            (centre, chart.y(value))
            for centre, of_group in zip(centres, values_of, strict=True)
            # In sequence, so that the line covers the range between them.
            for value in dict.fromkeys((of_group.min(), of_group.max()))
        )
        _add_polyline(chart.svg, "raw", extremes)
        window = math.ceil(groups / PARTS)
        means = _running_mean(means, window)
        figures.append(f"mean over {round(window * len(values) / groups):,} steps")
    _add_polyline(chart.svg, "line", zip(centres, map(chart.y, means), strict=True))
    if len(values) == 1:
        chart.svg.add_circle("mean", centres[0], chart.y(means[0]), 3)
    chart.svg.add_title(title, " · ".join(figures))
    if mark is not None:
        chart.add_mark(mark[1], mark[0], ("end", RIGHT, 14))
    return chart.svg.to_text()


def perplexity_plot(
    perplexities: PerplexityOfSubsets,
    stages: int,
    full_perplexity: float,
    scaled: PerplexityOfSubsets | None = None,
) -> str:
    """Draw mean, standard deviation and every subset, for each number of `stages` that run.

    The values of a model with `scaled` branches stand beside them. A dashed line marks the full
    model. The axis is logarithmic, because a model that was never trained in part can be worse by
    orders of magnitude.
    """
    models = {"plain": perplexities} | ({} if scaled is None else {"scaled": scaled})
    everything = [p for model in models.values() for of in model.values() for p in of.values()]
    everything.append(full_perplexity)
    low, high = math.log(min(everything)) - 0.02, math.log(max(everything)) + 0.02
    chart = _Chart("Perplexity of partial models", (0, stages), (low, high))
    chart.svg.add_title("Perplexity", "mean ± standard deviation, each subset")
    ups = {math.log(p): text for p, text in _labeled(_ticks(math.exp(low), math.exp(high))).items()}
    quarters = {stages * percent / 100: f"{percent}%" for percent in range(0, 101, 25)}
    across = dict.fromkeys(range(stages + 1), "") | quarters
    chart.add_axes(ups, across, f"share of the {stages} stages")
    chart.add_mark(math.log(full_perplexity), "all stages", ("", LEFT + 4, -5))
    for place, (kind, model) in enumerate(models.items()):
        group = chart.svg.add("g", {"class": kind})
        _add_model(chart, group, model, stages, (place - (len(models) - 1) / 2) * ASIDE)
    if scaled is not None:
        chart.svg.add_text("scaled-label end", RIGHT, TOP - 8, "branches scaled")
    return chart.svg.to_text()


def _add_model(
    chart: _Chart, group: Shape, perplexities: PerplexityOfSubsets, stages: int, aside: float
) -> None:
    """Draw one model, offset by `aside` pixels: its subsets, and a line through their means."""

    def y(perplexity: float) -> float:
        return chart.y(math.log(perplexity) if perplexity > 0 else -math.inf)

    means = []
    for kept, of_orders in sorted(perplexities.items()):
        across, values = chart.x(kept) + aside, list(of_orders.values())
        mean, deviation = float(np.mean(values)), float(np.std(values))
        for stages_run, perplexity in of_orders.items():
            tip = f"stages {' '.join(map(str, stages_run))}: {perplexity:.3f}"
            group.add_circle("each", across, y(perplexity), DOT).add_tip(tip)
        ends = [y(mean - deviation), y(mean + deviation)]
        group.add_line("spread", (across, ends[0]), (across, ends[1]))
        for end in ends:
            group.add_line("spread", (across - CAP, end), (across + CAP, end))
        tip = f"{kept} of {stages} stages: {mean:.3f} ± {deviation:.3f}"
        group.add_circle("mean", across, y(mean), DOT).add_tip(tip)
        means.append((across, y(mean)))
    _add_polyline(group, "line", means)


def _running_mean(values: Float[np.ndarray, " n"], window: int) -> Float[np.ndarray, " n"]:
    """Return the mean of the values around each one, over fewer values at the ends."""
    weights = np.ones(window)
    return np.convolve(values, weights, "same") / np.convolve(np.ones(len(values)), weights, "same")


def _add_polyline(parent: Shape, classes: str, points: Iterable[tuple[float, float]]) -> None:
    corners = " ".join(map(point, points))
    parent.add("polyline", {"class": classes, "points": corners})


def _labeled(ticks: Sequence[float]) -> dict[float, str]:
    return {tick: f"{tick:,.10g}" for tick in ticks}


def _ticks(low: float, high: float) -> list[float]:
    """Return round perplexities from `low` to `high`: evenly spaced, or 1, 2, 5, 10 and so on."""
    if high < 10 * low:
        return round_ticks(high, low, TICKS_UP)
    digits = (1, 2, 5) if high < 1e3 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]
