"""Tables and SVG pictures of divisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from xml.etree.ElementTree import SubElement

from skippipe_sched.division.lanes import Division, Part
from skippipe_sched.figures.amounts import duration_text, seconds_text
from skippipe_sched.figures.colours import GOLDEN_ANGLE, oklch
from skippipe_sched.figures.svg import (
    CHARACTER,
    MARGIN,
    WIDTH,
    add_line,
    add_rect,
    add_text,
    add_ticks,
    add_tip,
    add_title,
    round_ticks,
    start_picture,
    svg_text,
)
from skippipe_sched.figures.tables import aligned

HEADINGS = ("", "lane", "nodes", "stages", "iteration", "done", "where")

# Pixels.
PLOT_TOP = 60.0
ROW = 24.0
BAR_TOP = 4.0
BAR = 16.0
BETWEEN = 14.0
AXIS = 40.0
FIGURES = 230.0
HOUR_S = 3600.0

STYLE = """
.division .end-of-last{stroke:#171b22;stroke-width:1.4;stroke-dasharray:4 3}
"""


def locations(part: Part) -> str:
    """Return the locations of a lane's nodes, such as 2 Iowa, 1 Oregon."""
    counts = Counter(node.location for node in part.plans[0].case.nodes)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def table(divisions: Mapping[str, Division]) -> str:
    """Format divisions by name as aligned text: a line for each lane."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for name, division in divisions.items():
        for number, part in enumerate(division.parts):
            stages = dict.fromkeys(" ".join(map(str, plan.case.stages)) for plan in part.plans)
            iterations = dict.fromkeys(f"{seconds:.2f} s" for seconds in part.iteration_s)
            first = "" if number else name, part.lane.name, str(len(part.nodes))
            cuts, seconds = ", ".join(stages), ", ".join(iterations)
            lines.append((*first, cuts, seconds, duration_text(part.seconds), locations(part)))
    return aligned(lines, (0, 1, 3, 6))


def picture(divisions: Mapping[str, Division], case_name: str) -> str:
    """Draw divisions by name and return the text of an SVG.

    Each lane has a bar, with a part for each expert as long as it trains; a mark shows when the
    last expert of a division is done.
    """
    lanes = [part.lane for part in next(iter(divisions.values())).parts]
    names = [*(lane.name for lane in lanes), *divisions]
    left = MARGIN + CHARACTER * max(map(len, names)) + 14
    longest_s = max(division.seconds for division in divisions.values())
    scale = (WIDTH - MARGIN - FIGURES - left) / longest_s
    block = ROW * (len(lanes) + 1) + BETWEEN
    bottom = PLOT_TOP + block * len(divisions) - BETWEEN
    about = f"Nodes of {case_name} divided among lanes of experts"
    colours = "".join(
        f".division .expert-{number}{{fill:{oklch(0.72, 0.1, 250 + GOLDEN_ANGLE * number)}}}\n"
        for number in range(max(len(lane.trainings) for lane in lanes))
    )
    svg = start_picture("division", (WIDTH, bottom + AXIS), about, STYLE + colours)
    add_title(svg, case_name, "hours until each expert is done, by lane")
    ticks = {left + scale * HOUR_S * h: f"{h:g}" for h in round_ticks(longest_s / HOUR_S)}
    add_ticks(svg, ticks, PLOT_TOP, bottom)
    for place, (name, division) in enumerate(divisions.items()):
        top = PLOT_TOP + block * place
        last = left + scale * division.seconds
        add_text(svg, "stage", MARGIN, top + BAR_TOP + 12, name)
        add_text(svg, "", left, top + BAR_TOP + 12, f"all done: {duration_text(division.seconds)}")
        for number, part in enumerate(division.parts, start=1):
            down = top + ROW * number + BAR_TOP
            add_text(svg, "", MARGIN, down + 12, part.lane.name)
            begin = left
            for kind, (training, seconds, iteration_s) in enumerate(
                zip(part.lane.trainings, part.training_s, part.iteration_s, strict=True)
            ):
                group = SubElement(svg, "g")
                end = begin + scale * seconds
                add_rect(group, f"expert-{kind}", (begin, end), (down, down + BAR), radius=2)
                about = f"{training.name}: {training.steps} iterations of"
                add_tip(group, f"{about} {seconds_text(iteration_s)}; {locations(part)}")
                begin = end
            nodes = f"{len(part.nodes)} nodes in {len(part.plans[0].stages)} stages"
            figures = f"{duration_text(part.seconds)} · {nodes}"
            add_text(svg, "", begin + 8, down + 12, figures)
        add_line(svg, "end-of-last", (last, top + ROW), (last, top + ROW * (len(lanes) + 1)))
    return svg_text(svg)
