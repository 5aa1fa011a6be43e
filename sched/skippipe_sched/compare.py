"""Comparison of all methods on one case: figures, table and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skippipe_sched.errors import InputError
from skippipe_sched.figures.amounts import seconds_text, size_text
from skippipe_sched.figures.svg import (
    CHARACTER,
    MARGIN,
    WIDTH,
    Shape,
    round_ticks,
    shortened,
    start_picture,
)
from skippipe_sched.figures.tables import aligned
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline
from skippipe_sched.timing.traffic import link_name, link_traffic, wide_area_bytes

# Reference of the other methods' ratios.
BASELINE = "full"


@dataclass(frozen=True)
class Row:
    """Figures of one method's plan for the case. Times in seconds.

    `averaging_s` is the longest averaging of one stage, `ratio_to_full` iteration_s over that of
    `full` (None if `full` has no figures), `wide_area_bytes` the traffic between locations in an
    iteration, `busiest_link_s` the time in use of the busiest link, `idle_share` the share of
    pipeline_s in which nodes do not compute, `lower_bound_s` the bound for paths of this length,
    and `gap` the excess of iteration_s over it as a share. In outer mode, iteration_s and
    pipeline_s are means of the steady state, and `late_s` is the most by which a ring exceeds its
    delay; otherwise it is None.
    """

    method: str
    iteration_s: float
    pipeline_s: float
    averaging_s: float
    ratio_to_full: float | None
    wide_area_bytes: float
    busiest_link: str | None
    busiest_link_s: float
    idle_share: float
    search_s: float
    lower_bound_s: float
    gap: float
    late_s: float | None = None


@dataclass(frozen=True)
class PlanningFailure:
    """Reason why a method has no plan for the case."""

    method: str
    reason: str


def compare(
    case: Case, methods: Iterable[str], search_of: Callable[[str], Search]
) -> list[Row | PlanningFailure]:
    """Plan `case` with each of the methods, each with its own search from `search_of`.

    A method that refuses the case is replaced by its reason. Ctrl-C ends the search of the current
    method, which then has the best plan that it found so far.
    """
    outcomes = [_outcome(case, method, search_of(method)) for method in methods]
    baseline_s = next(
        (row.iteration_s for row in outcomes if isinstance(row, Row) and row.method == BASELINE),
        None,
    )
    if baseline_s is None:
        return outcomes
    return [
        replace(row, ratio_to_full=row.iteration_s / baseline_s) if isinstance(row, Row) else row
        for row in outcomes
    ]


def _outcome(case: Case, method: str, search: Search) -> Row | PlanningFailure:
    try:
        with search.interruptible():
            plan = make_plan(case, method, search)
    except InputError as error:
        return PlanningFailure(method, str(error))
    return row_of(plan, simulate_plan(plan), search.elapsed_s)


def row_of(plan: Plan, timeline: Timeline, search_s: float) -> Row:
    """Compute the figures of one plan, without its ratio to another."""
    links = link_traffic(plan, timeline)
    bound_s = plan.predicted.lower_bound_s
    assert bound_s is not None, "of a plan by a method"
    return Row(
        method=plan.method,
        iteration_s=timeline.iteration_s,
        pipeline_s=timeline.pipeline_s,
        averaging_s=timeline.averaging_s,
        ratio_to_full=None,
        wide_area_bytes=wide_area_bytes(plan.case, links),
        busiest_link=link_name(plan.case, links[0]) if links else None,
        busiest_link_s=links[0].busy_s if links else 0.0,
        idle_share=timeline.idle_share,
        search_s=search_s,
        lower_bound_s=bound_s,
        gap=timeline.iteration_s / bound_s - 1.0,
        late_s=timeline.late_s if plan.case.averaging.is_outer else None,
    )


def to_json(rows: Sequence[Row | PlanningFailure]) -> list[dict[str, Any]]:
    """Convert the rows to JSON objects; a refusal has only its method and its reason.

    `late_s` is omitted if it is None.
    """
    return [
        {key: value for key, value in asdict(row).items() if (key, value) != ("late_s", None)}
        for row in rows
    ]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.method,
    "iteration": lambda row: f"{row.iteration_s:.2f} s",
    "pipeline": lambda row: f"{row.pipeline_s:.2f} s",
    "averaging": lambda row: f"{row.averaging_s:.2f} s",
    "of full": lambda row: "-" if row.ratio_to_full is None else f"{row.ratio_to_full:.3f}",
    "wide area": lambda row: size_text(row.wide_area_bytes),
    "link busy": lambda row: f"{row.busiest_link_s:.2f} s",
    "idle": lambda row: f"{row.idle_share:z.0%}",
    "search": lambda row: f"{row.search_s:.1f} s",
    "gap": lambda row: f"{row.gap:z.1%}",
    "busiest link": lambda row: row.busiest_link or "-",
}


def table(rows: Sequence[Row | PlanningFailure]) -> str:
    """Format the rows as aligned text, a line each, followed by late rings and refusals."""
    planned = [row for row in rows if isinstance(row, Row)]
    refused = [f"{row.method}: {row.reason}" for row in rows if isinstance(row, PlanningFailure)]
    late = [
        f"{row.method}: a ring exceeds its delay by {row.late_s:.2f} s"
        for row in planned
        if row.late_s
    ]
    lines = [[*COLUMNS], *([cell(row) for cell in COLUMNS.values()] for row in planned)]
    return "\n".join([aligned(lines, (0, len(COLUMNS) - 1)), *late, *refused])


# Pixels.
LEGEND_Y = 56.0
PLOT_TOP = 72.0
ROW = 30.0
BAR_TOP = 7.0
BAR = 16.0
AXIS = 32.0
FIGURES = 230.0

STYLE = """
.compare .pipeline{fill:#5b8fc7}
.compare .rest{fill:#d9dde5;stroke:#a3abb8;stroke-width:.8}
.compare .bound{stroke:#171b22;stroke-width:1.4;stroke-dasharray:4 3}
.compare .refused{fill:#8a3b12}
"""


def picture(rows: Sequence[Row | PlanningFailure], case_name: str) -> str:
    """Draw the rows as the text of an SVG: a bar for every method, as long as its iteration.

    The bar begins with the pipeline; the rest is averaging that the pipeline does not hide. A mark
    shows the lower bound for paths of the method's length.
    """
    left = MARGIN + CHARACTER * max(len(row.method) for row in rows) + 12
    longest_s = max((row.iteration_s for row in rows if isinstance(row, Row)), default=0.0)
    scale = (WIDTH - MARGIN - FIGURES - left) / (longest_s or 1.0)
    bottom = PLOT_TOP + ROW * len(rows)
    svg = start_picture(
        "compare", (WIDTH, bottom + AXIS), f"Methods compared on {case_name}", STYLE
    )
    svg.add_title(case_name, "seconds of one iteration, by method")
    _draw_legend(svg)
    ticks = round_ticks(longest_s) if longest_s else []
    svg.add_ticks({left + scale * s: f"{s:g}" for s in ticks}, PLOT_TOP, bottom)
    for index, row in enumerate(rows):
        top = PLOT_TOP + ROW * index
        svg.add_text("stage", MARGIN, top + BAR_TOP + 12, row.method)
        if isinstance(row, Row):
            _draw_row(svg, row, left, top, scale)
        else:
            characters = int((WIDTH - MARGIN - left) / CHARACTER)
            reason = shortened(row.reason, characters)
            svg.add_text("refused", left, top + BAR_TOP + 12, reason).add_tip(row.reason)
    return svg.to_text()


def _draw_legend(svg: Shape) -> None:
    x = float(MARGIN)
    for sample, label, width in (
        ("pipeline", "pipeline", 84),
        ("rest", "averaging after it", 138),
        ("bound", "lower bound; gap: the excess over it", 0),
    ):
        if sample == "bound":
            svg.add_line(sample, (x + 10, LEGEND_Y - 12), (x + 10, LEGEND_Y + 4))
        else:
            svg.add_rect(sample, (x, x + 20), (LEGEND_Y - 10, LEGEND_Y), radius=2)
        svg.add_text("", x + 26, LEGEND_Y, label)
        x += width


def _draw_row(svg: Shape, row: Row, left: float, top: float, scale: float) -> None:
    group = svg.add("g")
    down = (top + BAR_TOP, top + BAR_TOP + BAR)
    pipeline, end = left + scale * row.pipeline_s, left + scale * row.iteration_s
    group.add_rect("pipeline", (left, pipeline), down)
    if end > pipeline:
        group.add_rect("rest", (pipeline, end), down)
    bound = left + scale * row.lower_bound_s
    group.add_line("bound", (bound, top), (bound, top + ROW))
    group.add_tip(
        f"{row.method}: iteration {row.iteration_s:.2f} s, pipeline {row.pipeline_s:.2f} s, "
        f"longest averaging {row.averaging_s:.2f} s, lower bound {row.lower_bound_s:.2f} s, "
        f"{size_text(row.wide_area_bytes)} between locations, nodes idle {row.idle_share:z.0%}, "
        f"searched for {row.search_s:.1f} s",
    )
    ratio = "" if row.ratio_to_full is None else f" · {row.ratio_to_full:.3f} of full"
    figures = f"{seconds_text(row.iteration_s)}{ratio} · gap {row.gap:z.1%}"
    svg.add_text("", end + 8, top + BAR_TOP + 12, figures)
