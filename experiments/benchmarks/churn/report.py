"""What `churn` shows of faults: a line for each, a table of all, and a picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from skippipe_sched.figures.svg import (
    add_circle,
    add_text,
    add_tip,
    add_title,
    round_ticks,
    start_picture,
    svg_text,
)
from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.churn.faults import KINDS, PHASES
from experiments.benchmarks.churn.records import most_resident_bytes
from experiments.benchmarks.harness.panels import Panel

# Pixels.
WIDTH, PANEL, GAP, FIRST = 640, 130, 46, 76
LEFT, RIGHT = 56, WIDTH - 24
STYLE = """
.struck polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
.struck .one{stroke:#2f6db5}.struck .other{stroke:#b5482f}
.struck circle.one{fill:#2f6db5;stroke:none}.struck circle.other{fill:#b5482f;stroke:none}
.struck .most{stroke:#999;stroke-dasharray:4 3}
"""


def table(results: Sequence[dict[str, Any]]) -> str:
    """How many faults of each kind there were at each phase, and how quickly they were mended."""
    cells: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for result in results:
        cells[result["kind"], result["phase"]].append(result["recovered_s"])
    kinds = [kind for kind in KINDS if any(result["kind"] == kind for result in results)]
    phases = list(dict.fromkeys([*PHASES, *(result["phase"] for result in results)]))
    rows = [["faults, median s", *phases]]
    rows += [[kind, *(_cell(cells[kind, phase]) for phase in phases)] for kind in kinds]
    return aligned(rows, [0])


def _cell(recovered: Sequence[float | None]) -> str:
    if not recovered:
        return "-"
    noticed = [seconds for seconds in recovered if seconds is not None]
    seconds = f"{statistics.median(noticed):.1f} s" if noticed else "unnoticed"
    return f"{len(recovered)}, {seconds}"


def told(result: dict[str, Any], of: int) -> str:
    """The line of a fault."""
    who = ", ".join(map(str, result["struck"])) + (" (leads)" if result["hit_leader"] else "")
    if result["second"] is not None:
        who += f", and host {result['second']}"
    line = f"{result['number'] + 1}/{of} {result['kind']} {result['edge']} {result['phase']} of "
    line += f"step {result['step']}, host {who}: "
    if result["detected_s"] is None:
        line += "no failure detected"
    else:
        line += f"detected after {result['detected_s']:.1f} s"
        if result["recovered_s"] is not None:
            line += f", a step committed {result['recovered_s']:.1f} s later"
    by = f" by {', '.join(result['came_by'])}" if result["came_by"] else ""
    return f"{line}; all hosts back{by} after {result['all_back_s']:.1f} s"


def summary(report: dict[str, Any]) -> str:
    """The table, how quick it was, and what was wrong."""
    quickness = report["recovered_s"]
    lines = [table(report["faults"])]
    if quickness["median"] is not None:
        lines.append(
            f"first step committed {quickness['median']:.2f} s after a failure was detected "
            f"(median; 95th percentile {quickness['percentile_95']:.2f} s)"
        )
    wrong = report["failures"]
    lines += [f"WRONG: {failure}" for failure in wrong] or [
        f"{report['steps']} steps, {len(report['faults'])} faults: all checks passed"
    ]
    return "\n".join(lines)


def picture(report: Mapping[str, Any]) -> str:
    """Draw what the report of a run that was struck at moments shows, as the text of an SVG."""
    spared, faults = report["spared"], report["faults"]
    series = spared["after_each_fault"]
    size = WIDTH, FIRST + 3 * (PANEL + GAP) - 10
    svg = start_picture("struck", size, "What churn leaves in a host that is never struck", STYLE)
    figures = f"goodput {report['goodput']:.2f}"
    if "restarted" in report:
        figures += f", restarting {report['restarted']['goodput']:.2f}"
    add_title(svg, f"{len(faults)} faults", figures)

    def panel_of(number: int, about: str, values: Sequence[float]) -> Panel:
        """Add one of the panels below each other; faults go from 1 on."""
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 1.0
        top = FIRST + number * (PANEL + GAP)
        scale = low - margin if low else 0.0, high + margin
        most = max(1, len(faults) - 1)
        panel = Panel(svg, (LEFT, RIGHT), (top, top + PANEL), (0, most), scale)
        add_text(svg, "stage", LEFT, top - 10, about)
        panel.label_x(round_ticks(max(2, len(faults)), 1, 10), -1)
        panel.label_y()
        return panel

    resident = [own["resident_bytes"] / 1e6 for own in series]
    most = most_resident_bytes(series)
    held_to = [] if most is None else [most / 1e6]
    about = f"resident memory of host {spared['host']}, MB"
    panel = panel_of(0, about, [*resident, *held_to])
    panel.curve("one", enumerate(resident))
    for level in held_to:
        panel.across("most", level)
    descriptors, threads = ([own[key] for own in series] for key in ("descriptors", "threads"))
    about = "its descriptors (blue) and threads (red)"
    panel = panel_of(1, about, [0.0, *descriptors, *threads])
    panel.curve("one", enumerate(descriptors))
    panel.curve("other", enumerate(threads))
    about = "seconds until a step counted again (blue) and all hosts were there (red)"
    panel = panel_of(2, about, [0.0, *(fault["all_back_s"] for fault in faults)])
    for place, fault in enumerate(faults):
        tip = f"{fault['kind']} {fault['edge']} {fault['phase']}"
        dots = {"other": fault["all_back_s"]}
        if fault["recovered_s"] is not None:
            dots = {"one": fault["detected_s"] + fault["recovered_s"]} | dots
        for classes, seconds in dots.items():
            add_tip(add_circle(svg, classes, panel.x(place), panel.y(seconds), 2.5), tip)
    add_text(svg, "middle", (LEFT + RIGHT) / 2, size[1] - 9, "fault")
    return svg_text(svg)
