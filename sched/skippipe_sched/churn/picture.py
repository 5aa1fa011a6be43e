"""SVG picture of the goodput of every policy over the fault rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skippipe_sched.churn.policies import POLICIES
from skippipe_sched.churn.sweep import Point
from skippipe_sched.figures.amounts import duration_text
from skippipe_sched.figures.colours import GOLDEN_ANGLE, oklch
from skippipe_sched.figures.svg import MARGIN, WIDTH, Shape, round_ticks, rounded, start_picture

# Pixels.
HEIGHT = 380
LEGEND_Y = 58.0
LEGEND = 120.0
SAMPLE = 26.0
LEFT = 58.0
RIGHT = WIDTH - 34.0
TOP = 80.0
BOTTOM = HEIGHT - 50.0
TICKS_UP = 5

STYLE = """
.churn polyline{fill:none;stroke-width:2;stroke-linejoin:round}
.churn .sample{stroke-width:2}
.churn .inexact{stroke-dasharray:6 4}
"""


def picture(points: Sequence[Point], name: str) -> str:
    """Draw a line for each policy, dashed where it is not exact, and return the text of an SVG.

    The fault rate increases from left to right; between two rates the line is straight on a
    logarithmic axis.
    """
    mtbfs_s = sorted({one.mtbf_s for one in points}, reverse=True)
    highest = max(1.0, *(one.goodput for one in points))
    calm, worst = math.log(mtbfs_s[0]), math.log(mtbfs_s[-1])

    def x(mtbf_s: float) -> float:
        share = (calm - math.log(mtbf_s)) / (calm - worst) if calm > worst else 0.5
        return LEFT + (RIGHT - LEFT) * share

    def y(goodput: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * goodput / highest

    svg = start_picture("churn", (WIDTH, HEIGHT), f"Goodput of {name} under churn", _styles())
    svg.add_title(name, "useful microbatches as a share of a run without faults")
    for tick in round_ticks(highest, most=TICKS_UP):
        svg.add_line("grid", (LEFT, y(tick)), (RIGHT, y(tick)))
        svg.add_text("end", LEFT - 7, y(tick) + 4, f"{tick:g}")
    svg.add_ticks({x(mtbf_s): duration_text(mtbf_s) for mtbf_s in mtbfs_s}, TOP, BOTTOM)
    below = "mean time between faults of a node"
    svg.add_text("middle", (LEFT + RIGHT) / 2, HEIGHT - 12, below)
    for index, policy in enumerate(POLICIES):
        _draw_legend(svg, index, policy)
        own = sorted((one for one in points if one.policy == policy), key=lambda one: x(one.mtbf_s))
        corners = " ".join(f"{rounded(x(one.mtbf_s))},{rounded(y(one.goodput))}" for one in own)
        svg.add("polyline", {"class": _classes(policy), "points": corners})
        for one in own:
            dot = svg.add_circle(f"dot-{policy}", x(one.mtbf_s), y(one.goodput), 3)
            goodput = f"{one.goodput:.3f} ({one.least:.3f} to {one.most:.3f})"
            dot.add_tip(f"{policy}, {duration_text(one.mtbf_s)} between faults: {goodput}")
    return svg.to_text()


def _classes(policy: str) -> str:
    return f"of-{policy}" if POLICIES[policy].is_exact else f"of-{policy} inexact"


def _draw_legend(svg: Shape, index: int, policy: str) -> None:
    left = MARGIN + LEGEND * index
    ends = (left, LEGEND_Y - 4), (left + SAMPLE, LEGEND_Y - 4)
    svg.add_line(f"sample {_classes(policy)}", *ends)
    label = svg.add_text("", left + SAMPLE + 6, LEGEND_Y, policy)
    label.add_tip(POLICIES[policy].about)


def _styles() -> str:
    colours = (oklch(0.58, 0.14, 30 + GOLDEN_ANGLE * index) for index in range(len(POLICIES)))
    return STYLE + "".join(
        f".churn .of-{policy}{{stroke:{colour}}}.churn .dot-{policy}{{fill:{colour}}}\n"
        for policy, colour in zip(POLICIES, colours, strict=True)
    )
