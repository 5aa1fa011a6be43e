"""Perplexity by domain and arm, as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skippipe_sched.figures.colours import GOLDEN_ANGLE, oklch
from skippipe_sched.figures.svg import CHARACTER, MARGIN, WIDTH, round_ticks, start_picture

# Pixels.
LEGEND_TOP, LEGEND_LINE, LEGEND_COLUMNS = 54, 18, 3
ROW, AXIS, DOT = 30, 34, 5
MOST_RATIO_TICKS = 10

STYLE = """
.experts .first{stroke:#171b22;stroke-width:1.2;stroke-dasharray:4 3}
.experts .mean{font-weight:600;fill:#171b22}
"""


def picture(
    inside: Sequence[str], outside: Sequence[str], arms: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return a chart with a line for each domain and each mean, and a dot for every arm on it.

    The position of a dot is the arm's perplexity relative to the first arm's, which is written
    beside the domain. Dots to the left of the dashed line are better than the first arm.
    """
    first_name, first = next(iter(arms.items()))
    rows = [(name, lambda arm, d=name: arm["domains"][d]) for name in inside]
    rows += [(f"{name} (outside)", lambda arm, d=name: arm["domains"][d]) for name in outside]
    domains = len(rows)
    rows += [("mean, inside", lambda arm: arm["inside"])]
    rows += [("mean, outside", lambda arm: arm["outside"])] if outside else []

    shares = [read(arm) / read(first) for _, read in rows for arm in arms.values()]
    low, high = min(*shares, 0.98) - 0.01, max(*shares, 1.02) + 0.01
    left = MARGIN + CHARACTER * max(len(label) for label, _ in rows) + 60
    right = WIDTH - MARGIN - 12

    def x(share: float) -> float:
        return left + (right - left) * (share - low) / (high - low)

    top = LEGEND_TOP + LEGEND_LINE * (1 + (len(arms) - 1) // LEGEND_COLUMNS) + 8
    bottom = top + ROW * len(rows)
    svg = start_picture("experts", (WIDTH, bottom + AXIS), "Perplexity by domain and arm", STYLE)
    svg.add_title("Perplexity by domain", f"relative to {first_name}")
    for number, name in enumerate(arms):
        across, down = number % LEGEND_COLUMNS, number // LEGEND_COLUMNS
        place = MARGIN + across * (WIDTH - 2 * MARGIN) / LEGEND_COLUMNS
        height = LEGEND_TOP + LEGEND_LINE * down
        svg.add_circle("", place + DOT, height - 4, DOT).set("fill", _colour(number))
        svg.add_text("", place + 3 * DOT, height, name)
    for index, (label, read) in enumerate(rows):
        height = top + ROW * (index + 0.5)
        if index % 2 == 0:
            svg.add_rect("band", (MARGIN, right + 12), (height - ROW / 2, height + ROW / 2))
        svg.add_text("stage" if index < domains else "mean", MARGIN + 4, height + 4, label)
        svg.add_text("end", left - 12, height + 4, f"{read(first):.3f}")
    for tick in round_ticks(high, low, MOST_RATIO_TICKS):
        svg.add_line("grid", (x(tick), top), (x(tick), bottom + 4))
        svg.add_text("middle", x(tick), bottom + 18, f"{tick:.10g}")
    svg.add_line("first", (x(1.0), top), (x(1.0), bottom))
    for index, (label, read) in enumerate(rows):
        for number, (name, arm) in enumerate(arms.items()):
            perplexity = read(arm)
            # Shift the dots of different arms, so that they do not overlap.
            height = top + ROW * (index + 0.5) + (number - (len(arms) - 1) / 2) * 2
            dot = svg.add_circle("", x(perplexity / read(first)), height, DOT)
            dot.set("fill", _colour(number))
            dot.set("fill-opacity", "0.85")
            dot.add_tip(f"{label}, {name}: {perplexity:.3f}")
    return svg.to_text()


def _colour(number: int) -> str:
    """Return the color of an arm; neighbors differ in lightness too."""
    return oklch(0.62 + 0.1 * (number % 3 - 1), 0.13, 250 + GOLDEN_ANGLE * number)
