"""Map of the cluster with the traffic of the links in one iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from skippipe_sched.figures.amounts import seconds_text, size_text
from skippipe_sched.figures.colours import GOLDEN_ANGLE, oklch
from skippipe_sched.figures.svg import (
    CHARACTER,
    HALF_DIGIT_HEIGHT,
    MARGIN,
    Shape,
    point,
    rounded,
    shortened,
    start_picture,
)
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.timeline import Timeline
from skippipe_sched.timing.traffic import (
    Flow,
    link_name,
    link_traffic,
    location_traffic,
    wide_area_bytes,
)

# Above this number of nodes the map shows locations.
MOST_NODES = 60
BUSIEST = 8
# Pixels.
LEAST_RADIUS = 210.0
SLOT = 21.0
DISC = 9.0
ARC = 16.0
LABEL = 24.0
PANEL = 310.0
TOP = 60.0
LINE = 16.0
WIDEST_FLOW = 7.0
LEAST_FLOW = 0.5
# Up to this number of arrows there is room for the full width.
ROOMY_FLOWS = 60
BADGE = 7.0
# A few places need no large circle: this radius for each except the first.
RADIUS_PER_PLACE = 70.0
# Gap between two locations, in slots.
GAP = 0.7
# Names within this sine of the vertical through the center are above and below the circle.
UPRIGHT = 0.15
LONGEST_NAME = 16
COLUMNS = 3

STYLE = """
.flows path{fill:none}
.flows .pipeline path{stroke:#687386}
.flows .pipeline polygon{fill:#687386}
.flows .averaging path{stroke:#8a5a12;stroke-dasharray:8 3}
.flows .averaging polygon{fill:#8a5a12}
.flows .flow{opacity:.42}
.flows .flow.busiest{opacity:1}
.flows .flow:hover{opacity:1}
.flows .location{stroke:#c3c9d4;stroke-width:3}
.flows circle.place{fill:#e3e7ee;stroke:#4a5362}
.flows .number{font-size:9px;text-anchor:middle;fill:#10141a;pointer-events:none}
.flows .badge circle{fill:#171b22;stroke:#fff}
.flows .badge text{font-size:9px;font-weight:600;text-anchor:middle;fill:#fff}
"""


def flows_map(plan: Plan, timeline: Timeline) -> str:
    """Draw a map of the cluster, with the traffic of an iteration, as the text of an SVG.

    The nodes are on a circle, those of a location together and near locations side by side; above
    `MOST_NODES` nodes a disc is a location. Each flow on a link is an arrow, with a width in
    proportion to the root of its bytes: gray for activations and gradients, dashed for the
    averaging of a stage, in the color of the stage (one color for all between locations). The
    busiest links are numbered and listed.
    """
    by_node = len(plan.case.nodes) <= MOST_NODES
    links = link_traffic(plan, timeline)
    flows = links if by_node else location_traffic(plan, timeline)
    drawn = [flow for flow in flows if flow.source != flow.target]
    layout = _layout(plan, by_node, len(drawn[:BUSIEST]))
    about = "Map of the link traffic of an iteration"
    styles = STYLE + "".join(map(_stage_style, range(len(plan.stages))))
    svg = start_picture("flows", (layout.width, layout.height), about, styles)
    total, wide = sum(flow.bytes for flow in links), wide_area_bytes(plan.case, links)
    figures = f"{size_text(total)} in an iteration of {seconds_text(timeline.iteration_s)}"
    svg.add_title(plan.method, f"{figures} · {size_text(wide)} between locations")
    _draw_locations(svg, layout, plan)
    curves = _draw_flows(svg, layout, plan, drawn)
    _draw_places(svg, layout, plan, flows)
    _draw_badges(svg, layout, curves[:BUSIEST])
    y = _draw_legend(svg, layout, plan, drawn)
    _draw_busiest(svg, layout, plan, drawn[:BUSIEST], y)
    return svg.to_text()


@dataclass(frozen=True)
class _Layout:
    """Positions [pixels, and angles clockwise from the top]."""

    angles: Mapping[int | str, float]
    arcs: Mapping[str, tuple[float, float]]
    level_names: bool
    radius: float
    centre: tuple[float, float]
    panel: float
    width: float
    height: float

    def at(self, angle: float, radius: float) -> np.ndarray:
        return np.array(self.centre) + radius * np.array([math.sin(angle), -math.cos(angle)])

    def place(self, place: int | str) -> np.ndarray:
        return self.at(self.angles[place], self.radius)


def _layout(plan: Plan, by_node: bool, listed: int) -> _Layout:
    members: dict[str, list[int | str]] = {}
    for location in _ordered_by_distance(plan.case):
        nodes = [n for n, node in enumerate(plan.case.nodes) if node.location == location]
        nodes.sort(key=lambda node: (plan.stage_of[node], node))
        members[location] = [*nodes] if by_node else [location]
    slots = sum(len(places) + GAP for places in members.values())
    turn = 2 * math.pi / slots
    angles: dict[int | str, float] = {}
    arcs = {}
    slot = 0.0
    for location, places in members.items():
        arcs[location] = (slot * turn, (slot + len(places) - 1) * turn)
        for place in places:
            angles[place] = slot * turn
            slot += 1
        slot += GAP
    radius = min(LEAST_RADIUS, RADIUS_PER_PLACE * (len(angles) - 1))
    radius = max(radius, slots * SLOT / (2 * math.pi))
    level = _level_names_fit(arcs, radius + LABEL)
    across = radius + LABEL + CHARACTER * max(len(_cut(location)) for location in members)
    up = radius + LABEL + LINE if level else across
    panel = 2 * MARGIN + 2 * across
    # Lines of the legend and of the list of the busiest links.
    lines = 5 + math.ceil(len(plan.stages) / COLUMNS) + 2.2 * listed
    return _Layout(
        angles=angles,
        arcs=arcs,
        level_names=level,
        radius=radius,
        centre=(MARGIN + across, TOP + up),
        panel=panel,
        width=panel + PANEL + MARGIN,
        height=max(TOP + 2 * up + MARGIN, TOP + LINE * lines),
    )


def _side(angle: float) -> str:
    """Return the class of a level name's text anchor at this angle: its end at the circle."""
    if abs(math.sin(angle)) < UPRIGHT:
        return "middle"
    return "end" if math.sin(angle) < 0 else "start"


def _level_names_fit(arcs: Mapping[str, tuple[float, float]], radius: float) -> bool:
    """Return whether level names do not overlap their neighbors on the circle."""
    boxes = []
    for name, arc in arcs.items():
        angle, length = sum(arc) / 2, CHARACTER * len(_cut(name))
        share_on_the_left = {"start": 0.0, "middle": 0.5, "end": 1.0}[_side(angle)]
        left = radius * math.sin(angle) - share_on_the_left * length
        boxes.append((left, left + length, -radius * math.cos(angle)))
    return len(boxes) == 1 or all(
        abs(a_height - b_height) >= LINE or a_right < b_left or b_right < a_left
        for (a_left, a_right, a_height), (b_left, b_right, b_height) in pairwise([*boxes, boxes[0]])
    )


def _ordered_by_distance(case: Case) -> list[str]:
    """Order the locations so that neighbors on the circle have short hops between them.

    The tour goes from the first name always to the nearest next one, and is then shortened by
    reversing parts of it.
    """
    node_at = {node.location: index for index, node in reversed([*enumerate(case.nodes)])}
    names = sorted(node_at)
    nodes = [node_at[name] for name in names]
    round_trip_s = case.round_trip_s[np.ix_(nodes, nodes)]
    distances_s = ((round_trip_s + round_trip_s.T) / 4).tolist()
    order, left = [0], set(range(1, len(names)))
    while left:
        order.append(min(left, key=lambda place: (distances_s[order[-1]][place], place)))
        left.remove(order[-1])
    improved = True
    while improved:
        improved = False
        for first, last in combinations(range(1, len(names)), 2):
            before, after = order[first - 1], order[(last + 1) % len(names)]
            now_s = distances_s[before][order[first]] + distances_s[order[last]][after]
            turned_s = distances_s[before][order[last]] + distances_s[order[first]][after]
            # Require more than rounding, so that the loop ends.
            if turned_s < now_s * (1 - 1e-9):
                order[first : last + 1] = order[first : last + 1][::-1]
                improved = True
    return [names[place] for place in order]


def _stage_style(stage: int) -> str:
    hue = 60 + GOLDEN_ANGLE * stage
    light, dark = oklch(0.84, 0.1, hue), oklch(0.55, 0.14, hue)
    return (
        f".flows circle.s{stage}{{fill:{light};stroke:{dark}}}"
        f".flows .s{stage} path{{stroke:{dark}}}.flows .s{stage} polygon{{fill:{dark}}}\n"
    )


def _draw_locations(svg: Shape, layout: _Layout, plan: Plan) -> None:
    """Draw names outside the circle: level if there is room, else along the radius."""
    for name, (first, last) in layout.arcs.items():
        if last > first and len(layout.arcs) > 1:
            radius = layout.radius + ARC
            start, end = layout.at(first, radius), layout.at(last, radius)
            large = int(last - first > math.pi)
            curve = f"M{point(start)}A{point((radius, radius))} 0 {large} 1 {point(end)}"
            svg.add("path", {"class": "location", "d": curve})
        angle = (first + last) / 2
        if layout.level_names:
            text = svg.add_text(_side(angle), 0, 4 - 6 * math.cos(angle), _cut(name))
            turned = 0.0
        else:
            left = math.sin(angle) < 0
            text = svg.add_text("end" if left else "start", 0, 4, _cut(name))
            turned = math.degrees(angle) - 90 + 180 * left
        place = layout.at(angle, layout.radius + LABEL)
        text.set("transform", f"translate({point(place)}) rotate({rounded(turned)})")
        nodes = sum(node.location == name for node in plan.case.nodes)
        text.add_tip(f"{name}: {nodes} node{'s' * (nodes > 1)}")


class _Curve(NamedTuple):
    """A quadratic Bezier curve."""

    start: np.ndarray
    control: np.ndarray
    end: np.ndarray

    def at(self, share: float) -> np.ndarray:
        rest = 1 - share
        return rest**2 * self.start + 2 * rest * share * self.control + share**2 * self.end


def _draw_flows(svg: Shape, layout: _Layout, plan: Plan, flows: Sequence[Flow]) -> list[_Curve]:
    """Draw the arrows, the busiest on top; return their curves in the order of the flows."""
    curves = [_curve(layout, flow) for flow in flows]
    for rank in reversed(range(len(flows))):
        flow, curve = flows[rank], curves[rank]
        group = svg.add("g", {"class": _flow_class(plan, flow, rank < BUSIEST)})
        _draw_arrow(group, curve, _flow_width(flow, flows))
        figures = f"{size_text(flow.bytes)}, busy {seconds_text(flow.busy_s)}"
        group.add_tip(f"{link_name(plan.case, flow)}: {flow.use}, {figures}")
    return curves


def _curve(layout: _Layout, flow: Flow) -> _Curve:
    """Draw from disc to disc, bent to the center and to the left to separate directions."""
    start, end = layout.place(flow.source), layout.place(flow.target)
    across = end - start
    left = np.array([across[1], -across[0]])
    aside = 0.09 if flow.use == "pipeline" else 0.17
    inwards = 0.5 * (np.array(layout.centre) - (start + end) / 2)
    control = (start + end) / 2 + inwards + aside * left
    return _Curve(
        start + (DISC + 1) * _direction(control - start),
        control,
        end + (DISC + 1) * _direction(control - end),
    )


def _draw_arrow(group: Shape, curve: _Curve, width: float) -> None:
    towards = _direction(curve.end - curve.control)
    base = curve.end - (4 + 1.2 * width) * towards
    aside = (2 + 0.8 * width) * np.array([-towards[1], towards[0]])
    line = f"M{point(curve.start)}Q{point(curve.control)} {point(base)}"
    group.add("path", {"d": line, "stroke-width": rounded(width)})
    corners = " ".join(map(point, (curve.end, base + aside, base - aside)))
    group.add("polygon", {"points": corners})


def _draw_places(svg: Shape, layout: _Layout, plan: Plan, flows: Sequence[Flow]) -> None:
    for place in layout.angles:
        x, y = layout.place(place)
        sent = size_text(sum(flow.bytes for flow in flows if flow.source == place))
        received = size_text(sum(flow.bytes for flow in flows if flow.target == place))
        if isinstance(place, int):
            stage, location = plan.stage_of[place], plan.case.nodes[place].location
            classes, number = f"place s{stage}", place
            about = f"Node {place} in {location}, stage {stage}: "
        else:
            classes, number = "place", sum(node.location == place for node in plan.case.nodes)
            about = f"{number} nodes in {place}: "
        disc = svg.add_circle(classes, x, y, DISC)
        disc.add_tip(f"{about}sends {sent}, receives {received}")
        svg.add_text("number", x, y + HALF_DIGIT_HEIGHT, str(number))


def _draw_badges(svg: Shape, layout: _Layout, curves: Sequence[_Curve]) -> None:
    """Draw the rank of each of the busiest links on its curve, away from other badges."""
    taken: list[np.ndarray] = []
    for rank, curve in enumerate(curves, start=1):
        places = [curve.at(0.5 + shift * side) for shift in (0, 0.1, 0.2, 0.3) for side in (1, -1)]
        room = [
            min((math.dist(place, other) for other in taken), default=math.inf) for place in places
        ]
        free = next((i for i, r in enumerate(room) if r > 2 * BADGE + 2), int(np.argmax(room)))
        taken.append(places[free])
        _draw_badge(svg, rank, *places[free])


def _draw_badge(svg: Shape, rank: int, x: float, y: float) -> None:
    badge = svg.add("g", {"class": "badge"})
    badge.add_circle("", x, y, BADGE)
    badge.add_text("", x, y + HALF_DIGIT_HEIGHT, str(rank))


def _draw_legend(svg: Shape, layout: _Layout, plan: Plan, flows: Sequence[Flow]) -> float:
    """Draw the legend; return its lower end."""
    x, y = layout.panel, TOP + 4
    labels = {"pipeline": "activations, gradients", "averaging": "averaging of a stage"}
    for use, label in labels.items():
        own = (flow for flow in flows if flow.use == use)
        largest = max(own, key=lambda flow: flow.bytes, default=None)
        if largest is None:
            continue
        start, end = np.array([x, y - 4]), np.array([x + 40, y - 4])
        group = svg.add("g", {"class": _flow_class(plan, largest, True)})
        _draw_arrow(group, _Curve(start, (start + end) / 2, end), _flow_width(largest, flows))
        svg.add_text("", x + 48, y, f"{label}, up to {size_text(largest.bytes)}")
        y += LINE
    if isinstance(next(iter(layout.angles)), str):
        svg.add_circle("place", x + DISC, y + 2, DISC)
        svg.add_text("", x + 48, y + 6, "a location, with its number of nodes")
        return y + LINE
    for stage in range(len(plan.stages)):
        left, down = x + stage % COLUMNS * PANEL / COLUMNS, y + 4 + LINE * (stage // COLUMNS)
        svg.add_circle(f"s{stage}", left + 5, down - 4, 5)
        svg.add_text("", left + 14, down, f"stage {stage}" + " · data" * (stage == 0))
    return y + LINE * math.ceil(len(plan.stages) / COLUMNS)


def _draw_busiest(
    svg: Shape, layout: _Layout, plan: Plan, flows: Sequence[Flow], top: float
) -> None:
    x, y = layout.panel, top + 1.5 * LINE
    svg.add_text("stage", x, y, "Busiest links" if flows else "No link carries traffic")
    for rank, flow in enumerate(flows, start=1):
        y += 1.3 * LINE
        _draw_badge(svg, rank, x + BADGE, y - 4)
        ends, nodes = (flow.source, flow.target), ""
        if isinstance(flow.source, int):
            ends = (plan.case.nodes[node].location for node in ends)
            nodes = f"{flow.source} → {flow.target} · "
        svg.add_text("", x + 22, y, " → ".join(map(_cut, ends)))
        y += 0.9 * LINE
        figures = f"busy {seconds_text(flow.busy_s)} · {size_text(flow.bytes)} · {flow.use}"
        svg.add_text("", x + 22, y, nodes + figures)


def _flow_class(plan: Plan, flow: Flow, busiest: bool) -> str:
    stage = flow.use == "averaging" and isinstance(flow.source, int)
    of_stage = f" s{plan.stage_of[flow.source]}" if stage else ""
    return f"flow {flow.use}{of_stage}" + " busiest" * busiest


def _flow_width(flow: Flow, flows: Sequence[Flow]) -> float:
    """Return the root of its bytes, on a scale that is finer when there are many arrows."""
    most = max(flow.bytes for flow in flows)
    widest = WIDEST_FLOW * min(1.0, math.sqrt(ROOMY_FLOWS / len(flows)))
    return max(LEAST_FLOW, widest * math.sqrt(flow.bytes / most)) if most else LEAST_FLOW


def _cut(name: str) -> str:
    return shortened(name, LONGEST_NAME)


def _direction(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.hypot(*vector)), 1e-9)
