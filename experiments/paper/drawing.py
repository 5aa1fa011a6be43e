"""Style of figures: sizes, colours, seeds as bands, intervals as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skippipe_jax.config.extras import require_extra

# Inches: 900 pixels in a README at 100 dots per inch.
WIDTH = 9.0
DPI = 160
# Of Okabe and Ito: told apart by whoever does not see all colours.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "skippipe",
}


def panels(columns: int | Sequence[int], *heights: float) -> tuple[Any, list[Any]]:
    """A figure of the common width with a row of panels for each height, and the axes of each row.

    All rows have as many columns, or each its own number. Rows are laid out by themselves: labels
    that one needs room for do not narrow another.
    """
    require_extra("matplotlib", "paper", "figure", "matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    counts = [columns] * len(heights) if isinstance(columns, int) else columns
    return figure, [
        row.subplots(1, count, squeeze=False)[0] for row, count in zip(rows, counts, strict=True)
    ]


def plain_log(axes: Any, which: str, ticks: Sequence[float]) -> None:
    """Scale the `x` or `y` axis by logarithms, with those of the ticks that it has room for."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_ticks([], minor=True)


def write_svg(figure: Any, path: Path) -> None:
    """Write a picture; without a date, the same figures are the same file."""
    figure.savefig(path, format="svg", metadata={"Date": None})


def band(
    axes: Any, x: Sequence[float], of_seeds: Sequence[Sequence[float]], label: str, color: str
) -> None:
    """A line for the mean over seeds, and a band from the least to the greatest."""
    values = np.asarray(of_seeds)
    axes.plot(x, values.mean(axis=0), color=color, label=label, linewidth=1.4)
    if len(values) > 1:
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, lw=0)


def interval(
    axes: Any, y: float, figures: Mapping[str, Any], color: str, *, hollow: bool = False
) -> None:
    """A mean as a dot in the row `y`, and its interval, if it has one, as a line through it."""
    if figures["low"] is not None:
        axes.hlines([y], [figures["low"]], [figures["high"]], color=color, linewidth=1.4)
    face = "white" if hollow else color
    axes.plot([figures["mean"]], [y], "o", color=color, markersize=5, mfc=face)
