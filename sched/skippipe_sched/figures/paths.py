"""Picture of the path of every microbatch through the stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from skippipe_sched.figures.colours import microbatch_colours
from skippipe_sched.figures.gantt import node_label
from skippipe_sched.figures.svg import (
    HALF_DIGIT_HEIGHT,
    MARGIN,
    WIDTH,
    Shape,
    rounded,
    start_picture,
)
from skippipe_sched.problem.plan import Plan

# Pixels.
LEGEND_Y = 54.0
TOP = 96.0
BOX = 150.0
LABEL = 22.0
VISIT = 17.0
BAR = 12.0
GAP = 16.0
ARROW = 6.0
LANE = 6.0

STYLE = """
.paths .node{fill:#f4f6f9;stroke:#c3c9d3}
.paths .way{fill:none;stroke-width:1.6}
.paths .number{font-size:9px;text-anchor:middle;fill:#10141a}
"""


@dataclass(frozen=True)
class _Layout:
    """Positions of the boxes of the nodes and the bars of the visits [pixels].

    `visits[node, microbatch]` is the middle height of a bar, `lanes[microbatch]` that of a line
    below the boxes, for microbatches that skip a stage.
    """

    left: tuple[float, ...]
    boxes: Mapping[int, tuple[float, float]]
    visits: Mapping[tuple[int, int], float]
    lanes: Mapping[int, float]
    bottom: float


def paths_picture(plan: Plan) -> str:
    """Draw the paths of a plan as the text of an SVG, forward from each microbatch's data node.

    Each stage has a column with a box for each node, which contains a bar for each microbatch that
    visits it. A line below a column means that the microbatch skips the stage; a line back to the
    left is a swap.
    """
    layout = _layout(plan)
    about = f"The paths of {len(plan.microbatches)} microbatches through {len(plan.stages)} stages"
    styles = STYLE + "".join(map(_microbatch_style, range(len(plan.microbatches))))
    svg = start_picture("paths", (WIDTH, layout.bottom + MARGIN), about, styles)
    figures = f"{len(plan.microbatches)} microbatches, {len(plan.case.nodes)} nodes"
    svg.add_title(plan.method, f"{figures}, {len(plan.stages)} stages")
    legend = "below a column: the stage is skipped; to the left: a swap"
    svg.add_text("", MARGIN, LEGEND_Y, f"a line is the path of a microbatch; {legend}")
    for microbatch in range(len(plan.microbatches)):
        _draw_path(svg, layout, plan, microbatch)
    for stage, nodes in enumerate(plan.stages):
        x = layout.left[stage]
        label = f"Stage {stage} · data" if stage == 0 else f"Stage {stage}"
        svg.add_text("stage", x, TOP - 10, label)
        for node in nodes:
            svg.add_rect("node", (x, x + BOX), layout.boxes[node], radius=5)
            svg.add_text("", x + 8, layout.boxes[node][0] + 15, node_label(plan, node))
    for (node, microbatch), y in layout.visits.items():
        x = layout.left[plan.stage_of[node]]
        svg.add_rect(f"m{microbatch}", (x, x + BOX), (y - BAR / 2, y + BAR / 2), radius=3)
        svg.add_text("number", x + BOX / 2, y + HALF_DIGIT_HEIGHT, str(microbatch))
    return svg.to_text()


def _layout(plan: Plan) -> _Layout:
    visitors: dict[int, list[int]] = defaultdict(list)
    for microbatch, path in enumerate(plan.microbatches):
        for node in path:
            visitors[node].append(microbatch)
    step = (WIDTH - 2 * MARGIN - BOX) / max(1, len(plan.stages) - 1)
    boxes: dict[int, tuple[float, float]] = {}
    visits: dict[tuple[int, int], float] = {}
    for nodes in plan.stages:
        y = TOP
        for node in nodes:
            for place, microbatch in enumerate(visitors[node]):
                visits[node, microbatch] = y + LABEL + VISIT * (place + 0.5)
            height = LABEL + VISIT * len(visitors[node]) + 5
            boxes[node] = (y, y + height)
            y += height + GAP
    bottom = max(bottom for _, bottom in boxes.values())
    skipping = [
        microbatch
        for microbatch, path in enumerate(plan.microbatches)
        if any(abs(plan.stage_of[a] - plan.stage_of[b]) > 1 for a, b in pairwise(path))
    ]
    lanes = {m: bottom + LANE * (place + 2) for place, m in enumerate(skipping)}
    return _Layout(
        left=tuple(MARGIN + step * stage for stage in range(len(plan.stages))),
        boxes=boxes,
        visits=visits,
        lanes=lanes,
        bottom=max(lanes.values(), default=bottom),
    )


def _draw_path(svg: Shape, layout: _Layout, plan: Plan, microbatch: int) -> None:
    path = plan.microbatches[microbatch]
    group = svg.add("g", {"class": f"way m{microbatch}"})
    group.add_tip(f"Microbatch {microbatch}: nodes {', '.join(map(str, path))}")
    for source, target in pairwise(path):
        a, b = plan.stage_of[source], plan.stage_of[target]
        # A line leaves a box on the side of the next one, and enters that one on the opposite side.
        onward = 1 if b > a else -1

        def side(stage: int, ahead: bool, onward: int = onward) -> float:
            return layout.left[stage] + BOX * ((onward == 1) == ahead)

        x, y = side(a, True), layout.visits[source, microbatch]
        end_x, end_y = side(b, False), layout.visits[target, microbatch]
        line = f"M{rounded(x)} {rounded(y)}"
        if abs(b - a) > 1:
            lane = layout.lanes[microbatch]
            line += _curve((x, y), (side(a + onward, False), lane))
            x, y = side(b - onward, True), lane
            line += f"L{rounded(x)} {rounded(y)}"
        line += _curve((x, y), (end_x, end_y))
        back = rounded(-onward * ARROW)
        line += f"l{back} -3M{rounded(end_x)} {rounded(end_y)}l{back} 3"
        group.add("path", {"d": line})


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Draw a curve from `start` to `end`, level at both."""
    middle = rounded((start[0] + end[0]) / 2)
    y, end_x, end_y = map(rounded, (start[1], *end))
    return f"C{middle} {y} {middle} {end_y} {end_x} {end_y}"


def _microbatch_style(microbatch: int) -> str:
    light, dark = microbatch_colours(microbatch)
    return f".paths rect.m{microbatch}{{fill:{light}}}.paths .way.m{microbatch}{{stroke:{dark}}}\n"
