"""Gantt chart of a timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skippipe_sched.figures.colours import microbatch_colours
from skippipe_sched.figures.svg import (
    CHARACTER,
    HALF_DIGIT_HEIGHT,
    MARGIN,
    WIDTH,
    Shape,
    round_ticks,
    rounded,
    shortened,
    start_picture,
)
from skippipe_sched.problem.plan import Operation, Plan
from skippipe_sched.timing.timeline import Timeline, Transfer

# Pixels.
LEGEND_Y = 56
PLOT_TOP = 100
STAGE_HEADER = 20
ROW = 27
BAR_TOP = 2
BAR = 15
LANES_TOP = 18.5
LANES = 5
AXIS = 30
# Width of a digit in a bar.
DIGIT = 5.6

LONGEST_LABEL = 24
NAMES = {"F": "Forward", "L": "Loss", "B": "Backward"}


STYLE = """
.gantt .number{font-size:9px;text-anchor:middle;fill:#10141a;pointer-events:none}
.gantt .number.B{fill:#fff}
.gantt .side{font-size:8px}
.gantt rect.L{stroke-width:1.2}
.gantt .wait{fill:url(#gantt-wait)}
.gantt .hatch{stroke:#b4bac5;stroke-width:1.2}
.gantt .queued{opacity:.4}
.gantt .averaging{fill:#d9dde5;stroke:#a3abb8;stroke-width:.8}
.gantt .marker{stroke:#171b22;stroke-width:1.2;stroke-dasharray:4 3}
"""


def gantt(plan: Plan, timeline: Timeline, title: str | None = None) -> str:
    """Draw one iteration of `plan`, predicted or measured, as the text of an SVG.

    The chart has a row for every node, grouped by stage; a bar for every operation in the color of
    its microbatch; below the bars the transfers that the node receives; hatching where the node is
    idle while the input of its next operation is in transit; and a gray bar where a stage averages.

    In outer mode, it shows one iteration of the steady state, with rings behind the operations. A
    node begins the next iteration as soon as it has ended this one; a mark shows the time at which
    the next iteration is about as far as this one is at 0.

    `title` stands before the figures; the default is the plan's method. Times are drawn from 0 to
    the timeline's own end.
    """
    return gantt_series(plan, {title or plan.method: timeline})


def gantt_series(plan: Plan, timelines: Mapping[str, Timeline]) -> str:
    """Draw iterations of one plan by title, one below the other on one scale, as an SVG.

    Each is drawn as by `gantt`, for the visual comparison of a prediction with measurements.
    """
    # In steady state the next iteration's mark may be later than all events.
    ends_s = (max(timeline.end_s, timeline.iteration_s) for timeline in timelines.values())
    layout = _layout(plan, max(ends_s))
    height = layout.bottom + AXIS
    seconds = ", ".join(layout.seconds(timeline.iteration_s) for timeline in timelines.values())
    about = f"Timeline of one iteration of {seconds}"
    styles = STYLE + "".join(map(_microbatch_style, range(len(plan.microbatches))))
    svg = start_picture("gantt", (WIDTH, height * len(timelines)), about, styles)
    _draw_hatching(svg)
    for index, (title, timeline) in enumerate(timelines.items()):
        chart = svg.add("g", {"transform": f"translate(0 {rounded(index * height)})"})
        _draw_chart(chart, layout, plan, timeline, title)
    return svg.to_text()


def _draw_chart(svg: Shape, layout: _Layout, plan: Plan, timeline: Timeline, title: str) -> None:
    figures = {
        "iteration": timeline.iteration_s,
        "pipeline": timeline.pipeline_s,
        "lower bound": plan.predicted.lower_bound_s,
        "rings late by": timeline.late_s or None,
    }
    told = [f"{name} {layout.seconds(s)}" for name, s in figures.items() if s is not None]
    svg.add_title(title, " · ".join(told))
    _draw_legend(svg)
    _draw_stages(svg, layout, plan, timeline)
    ticks = {layout.x(tick_s): f"{tick_s:g}" for tick_s in round_ticks(layout.end_s)}
    svg.add_ticks(ticks, PLOT_TOP, layout.bottom)
    svg.add_text("", MARGIN, layout.bottom + 17, "seconds")
    if timeline.steady:
        _draw_averagings(svg, layout, plan, timeline)
    _draw_waits(svg, layout, timeline)
    _draw_transfers(svg, layout, timeline)
    _draw_runs(svg, layout, plan, timeline)
    _draw_markers(svg, layout, timeline)
    if not timeline.steady:
        _draw_averagings(svg, layout, plan, timeline)


@dataclass(frozen=True)
class _Layout:
    """Positions [pixels], and the format of times."""

    left: float
    bottom: float
    stage_tops: tuple[float, ...]
    row_tops: Mapping[int, float]
    end_s: float
    decimals: int

    def x(self, time_s: float) -> float:
        return self.left + (WIDTH - MARGIN - self.left) * time_s / self.end_s

    def seconds(self, time_s: float) -> str:
        return f"{time_s:.{self.decimals}f} s"

    def span(self, start_s: float, end_s: float) -> str:
        return f"{start_s:.{self.decimals}f}\N{EN DASH}{self.seconds(end_s)}"


def _layout(plan: Plan, end_s: float) -> _Layout:
    y = PLOT_TOP
    stage_tops = []
    row_tops = {}
    for nodes in plan.stages:
        stage_tops.append(y)
        y += STAGE_HEADER
        for node in nodes:
            row_tops[node] = y
            y += ROW
    longest = max(len(node_label(plan, node)) for node in row_tops)
    return _Layout(
        left=MARGIN + longest * CHARACTER + 12,
        bottom=y,
        stage_tops=tuple(stage_tops),
        row_tops=row_tops,
        end_s=end_s,
        decimals=max(2, 2 - math.floor(math.log10(end_s))),
    )


def node_label(plan: Plan, node: int) -> str:
    """Format a node's number and location, shortened to fit next to a plot."""
    label = f"node {node} · {plan.case.nodes[node].location}"
    return shortened(label, LONGEST_LABEL)


def _draw_hatching(svg: Shape) -> None:
    attributes = {
        "id": "gantt-wait",
        "width": "5",
        "height": "5",
        "patternUnits": "userSpaceOnUse",
        "patternTransform": "rotate(45)",
    }
    pattern = svg.add("defs").add("pattern", attributes)
    pattern.add_line("hatch", (2.5, 0), (2.5, 5))


def _draw_legend(svg: Shape) -> None:
    """Draw samples in the style of the plot, with the color of microbatch 0."""
    middle = LEGEND_Y - 4
    x = MARGIN
    for sample, label, room in (
        ("F", "forward", 82),
        ("L", "loss", 48),
        ("B", "backward", 92),
        ("transfer", "transfer to the node", 154),
        ("queued", "waiting for a busy link", 168),
        ("wait", "node waits for a transfer", 178),
        ("averaging", "averaging", 0),
    ):
        width = 4 if sample == "L" else 20
        if sample in ("transfer", "queued"):
            svg.add_line(f"{sample} T0", (x, middle), (x + width, middle), width=2)
        else:
            _bar(svg, f"{sample} m0" if sample in NAMES else sample, x, x + width, middle - 7)
        svg.add_text("", x + width + 5, LEGEND_Y, label)
        x += room


def _draw_stages(svg: Shape, layout: _Layout, plan: Plan, timeline: Timeline) -> None:
    for stage, (top, nodes) in enumerate(zip(layout.stage_tops, plan.stages, strict=True)):
        bottom = top + STAGE_HEADER + ROW * len(nodes)
        if stage % 2 == 0:
            svg.add_rect("band", (1, WIDTH - 1), (top, bottom))
        what = " · data" if stage == 0 else " · bypassed" if not nodes else ""
        svg.add_text("stage", MARGIN, top + 15, f"Stage {stage}{what}")
        for node in nodes:
            y = layout.row_tops[node] + BAR_TOP + 12
            text = svg.add_text("", MARGIN, y, node_label(plan, node))
            busy = layout.seconds(timeline.busy_s[node])
            text.add_tip(f"Node {node} in {plan.case.nodes[node].location}: busy {busy}")


def _draw_waits(svg: Shape, layout: _Layout, timeline: Timeline) -> None:
    """Draw the waits that the network causes, without the time in which another node computes."""
    transfers = {transfer.operation: transfer for transfer in timeline.transfers}
    free_s = [*timeline.free_s] or [0.0] * timeline.nodes
    for run in timeline.runs:
        _, microbatch, node = run.operation
        transfer = transfers.get(run.operation)
        if transfer is not None and transfer.end_s > free_s[node]:
            start_s = max(free_s[node], transfer.ready_s)
            start, end = layout.x(start_s), layout.x(transfer.end_s)
            about = f"Node {node} waits for microbatch {microbatch} from node {transfer.source}"
            bar = _bar(svg, "wait", start, end, layout.row_tops[node])
            bar.add_tip(f"{about}: {layout.span(start_s, transfer.end_s)}")
        free_s[node] = run.end_s


def _draw_transfers(svg: Shape, layout: _Layout, timeline: Timeline) -> None:
    for node in range(timeline.nodes):
        lanes = in_lanes([t for t in timeline.transfers if t.target == node])
        for lane, transfers in enumerate(lanes):
            y = layout.row_tops[node] + LANES_TOP + LANES * (lane + 0.5) / len(lanes)
            for transfer in transfers:
                _draw_transfer(svg, layout, transfer, y, min(2.0, LANES / len(lanes)))


def in_lanes(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Distribute transfers over the fewest lanes without overlaps, waiting included."""
    lanes: list[list[Transfer]] = []
    for transfer in sorted(transfers, key=lambda transfer: transfer.ready_s):
        for lane in lanes:
            if lane[-1].end_s <= transfer.ready_s:
                lane.append(transfer)
                break
        else:
            lanes.append([transfer])
    return lanes


def _draw_transfer(svg: Shape, layout: _Layout, transfer: Transfer, y: float, width: float) -> None:
    colour = f"T{transfer.operation.microbatch}"
    ready, start, end = map(layout.x, (transfer.ready_s, transfer.start_s, transfer.end_s))
    link = f"node {transfer.source} to node {transfer.target}"
    line = svg.add_line(f"transfer {colour}", (start, y), (end, y), width)
    microbatch = f"Microbatch {transfer.operation.microbatch}"
    line.add_tip(f"{microbatch} from {link}: {layout.span(transfer.start_s, transfer.end_s)}")
    if transfer.start_s > transfer.ready_s:
        queued = svg.add_line(f"queued {colour}", (ready, y), (start, y), width)
        span = layout.span(transfer.ready_s, transfer.start_s)
        queued.add_tip(f"{microbatch} waits for the link from {link}: {span}")


def _draw_runs(svg: Shape, layout: _Layout, plan: Plan, timeline: Timeline) -> None:
    for run in timeline.runs:
        kind, microbatch, node = run.operation
        start, end = layout.x(run.start_s), layout.x(run.end_s)
        bar = _bar(svg, f"{kind} m{microbatch}", start, end, layout.row_tops[node])
        about = f"{NAMES[kind]} of microbatch {microbatch} on node {node}"
        span = layout.span(run.start_s, run.end_s)
        bar.add_tip(f"{about} (stage {plan.stage_of[node]}): {span}")
        _draw_number(svg, run.operation, (start + end) / 2, layout.row_tops[node], end - start)


def _draw_number(svg: Shape, operation: Operation, x: float, row_top: float, room: float) -> None:
    """Write the microbatch in the middle of a bar: upright, or rotated if that is too wide."""
    label = str(operation.microbatch)
    y = row_top + BAR_TOP + BAR / 2
    if room > DIGIT * len(label):
        svg.add_text(f"number {operation.kind}", x, y + HALF_DIGIT_HEIGHT, label)
    elif room > 2 * HALF_DIGIT_HEIGHT:
        text = svg.add_text(f"number side {operation.kind}", 0, HALF_DIGIT_HEIGHT, label)
        text.set("transform", f"translate({rounded(x)} {rounded(y)}) rotate(-90)")


def _draw_averagings(svg: Shape, layout: _Layout, plan: Plan, timeline: Timeline) -> None:
    for averaging in timeline.averagings:
        if averaging.end_s == averaging.start_s:
            continue
        nodes = plan.stages[averaging.stage]
        start, end = layout.x(averaging.start_s), layout.x(averaging.end_s)
        top = layout.row_tops[nodes[0]] + BAR_TOP
        bottom = layout.row_tops[nodes[-1]] + ROW - 3
        bar = svg.add_rect("averaging", (start, end), (top, bottom), radius=3)
        span = layout.span(averaging.start_s, averaging.end_s)
        bar.add_tip(f"Averaging of stage {averaging.stage}: {span}")
        label = f"averaging {layout.seconds(averaging.end_s - averaging.start_s)}"
        if end - start > len(label) * CHARACTER:
            svg.add_text("middle", (start + end) / 2, (top + bottom) / 2 + 4, label)


def _draw_markers(svg: Shape, layout: _Layout, timeline: Timeline) -> None:
    marks = [
        (5, "end of pipeline", timeline.pipeline_s),
        (19, "end of iteration", timeline.iteration_s),
    ]
    if timeline.steady:
        marks = [(5, "next iteration", timeline.iteration_s)]
    for rise, label, time_s in marks:
        x = layout.x(time_s)
        svg.add_line("marker", (x, PLOT_TOP - rise - 10), (x, layout.bottom))
        text = f"{label} {layout.seconds(time_s)}"
        if x > CHARACTER * len(text):
            svg.add_text("end", x - 4, PLOT_TOP - rise, text)
        else:
            svg.add_text("", x + 4, PLOT_TOP - rise, text)


def _microbatch_style(microbatch: int) -> str:
    """Style forwards light with dark numbers, backwards dark with white numbers."""
    light, dark = microbatch_colours(microbatch)
    return (
        f".gantt .F.m{microbatch}{{fill:{light}}}"
        f".gantt .B.m{microbatch}{{fill:{dark}}}"
        f".gantt .L.m{microbatch}{{fill:#fff;stroke:{dark}}}"
        f".gantt .T{microbatch}{{stroke:{dark}}}\n"
    )


def _bar(svg: Shape, classes: str, start: float, end: float, row_top: float) -> Shape:
    top = row_top + BAR_TOP
    return svg.add_rect(classes, (start, end), (top, top + BAR), radius=2)
