"""Table and SVG picture of a division."""

from __future__ import annotations

from collections import Counter

from skippipe_sched.division.lanes import Division, Part
from skippipe_sched.figures.amounts import duration_text, seconds_text
from skippipe_sched.figures.colours import GOLDEN_ANGLE, oklch
from skippipe_sched.figures.svg import CHARACTER, MARGIN, WIDTH, round_ticks, start_picture
from skippipe_sched.figures.tables import aligned

HEADINGS = ("lane", "nodes", "stages", "iteration", "done", "where")

# Pixels.
PLOT_TOP = 60.0
ROW = 24.0
BAR_TOP = 4.0
BAR = 16.0
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


def table(division: Division) -> str:
    """Format a division as aligned text: a line for each lane."""
    lines: list[tuple[str, ...]] = [HEADINGS]
    for part in division.parts:
        stages = dict.fromkeys(" ".join(map(str, plan.case.stages)) for plan in part.plans)
        iterations = dict.fromkeys(f"{seconds:.2f} s" for seconds in part.iteration_s)
        cuts, seconds, done = ", ".join(stages), ", ".join(iterations), duration_text(part.seconds)
        nodes = str(len(part.nodes))
        lines.append((part.lane.name, nodes, cuts, seconds, done, locations(part)))
    return aligned(lines, (0, 2, 5))


def picture(division: Division, name: str) -> str:
    """Draw a division and return the text of an SVG.

    Each lane has a bar, with a part for each expert as long as it trains; a mark shows when the
    last expert is done.
    """
    lanes = [part.lane for part in division.parts]
    left = MARGIN + CHARACTER * max(len(lane.name) for lane in lanes) + 14
    scale = (WIDTH - MARGIN - FIGURES - left) / division.seconds
    bottom = PLOT_TOP + ROW * len(lanes)
    about = f"Nodes of {name} divided among lanes of experts"
    colours = "".join(
        f".division .expert-{number}{{fill:{oklch(0.72, 0.1, 250 + GOLDEN_ANGLE * number)}}}\n"
        for number in range(max(len(lane.trainings) for lane in lanes))
    )
    svg = start_picture("division", (WIDTH, bottom + AXIS), about, STYLE + colours)
    done = f"hours until each expert is done, by lane; all done: {duration_text(division.seconds)}"
    svg.add_title(name, done)
    ticks = {left + scale * HOUR_S * h: f"{h:g}" for h in round_ticks(division.seconds / HOUR_S)}
    svg.add_ticks(ticks, PLOT_TOP, bottom)
    for number, part in enumerate(division.parts):
        down = PLOT_TOP + ROW * number + BAR_TOP
        svg.add_text("", MARGIN, down + 12, part.lane.name)
        begin = left
        for kind, (training, seconds, iteration_s) in enumerate(
            zip(part.lane.trainings, part.training_s, part.iteration_s, strict=True)
        ):
            group = svg.add("g")
            end = begin + scale * seconds
            group.add_rect(f"expert-{kind}", (begin, end), (down, down + BAR), radius=2)
            about = f"{training.name}: {training.steps} iterations of"
            group.add_tip(f"{about} {seconds_text(iteration_s)}; {locations(part)}")
            begin = end
        nodes = f"{len(part.nodes)} nodes in {len(part.plans[0].stages)} stages"
        svg.add_text("", begin + 8, down + 12, f"{duration_text(part.seconds)} · {nodes}")
    last = left + scale * division.seconds
    svg.add_line("end-of-last", (last, PLOT_TOP), (last, bottom))
    return svg.to_text()
