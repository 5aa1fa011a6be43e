"""A picture of a run that `churn` struck at moments: what a host that was spared had open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from skippipe_sched.figures.svg import (
    add_circle,
    add_line,
    add_text,
    add_tip,
    add_title,
    point,
    round_ticks,
    start_picture,
    svg_text,
)

from experiments.benchmarks.churn_measures import most_resident_bytes

# Pixels.
WIDTH, PANEL, GAP, FIRST = 640, 130, 46, 76
LEFT, RIGHT = 56, WIDTH - 24
STYLE = """
.struck polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
.struck .one{stroke:#2f6db5}.struck .other{stroke:#b5482f}
.struck circle.one{fill:#2f6db5;stroke:none}.struck circle.other{fill:#b5482f;stroke:none}
.struck .most{stroke:#999;stroke-dasharray:4 3}
"""


def picture(report: Mapping[str, Any]) -> str:
    """What the report of a run that was struck at moments shows, as the text of an SVG."""
    spared, faults = report["spared"], report["faults"]
    series = spared["after_each_fault"]
    size = WIDTH, FIRST + 3 * (PANEL + GAP) - 10
    svg = start_picture("struck", size, "What churn leaves in a host that is never struck", STYLE)
    figures = f"goodput {report['goodput']:.2f}"
    if "restarted" in report:
        figures += f", restarting {report['restarted']['goodput']:.2f}"
    add_title(svg, f"{len(faults)} faults", figures)
    resident = [own["resident_bytes"] / 1e6 for own in series]
    most = most_resident_bytes(series)
    panel = _Panel(svg, 0, f"resident memory of host {spared['host']}, MB", len(faults))
    panel.scale([*resident, *([] if most is None else [most / 1e6])])
    panel.line("one", resident)
    if most is not None:
        panel.level("most", most / 1e6)
    panel = _Panel(svg, 1, "its descriptors (blue) and threads (red)", len(faults))
    descriptors, threads = ([own[key] for own in series] for key in ("descriptors", "threads"))
    panel.scale([0.0, *descriptors, *threads])
    panel.line("one", descriptors)
    panel.line("other", threads)
    about = "seconds until a step counted again (blue) and all hosts were there (red)"
    panel = _Panel(svg, 2, about, len(faults))
    panel.scale([0.0, *(fault["all_back_s"] for fault in faults)])
    for place, fault in enumerate(faults):
        told = f"{fault['kind']} {fault['edge']} {fault['phase']}"
        if fault["recovered_s"] is not None:
            panel.dot("one", place, fault["detected_s"] + fault["recovered_s"], told)
        panel.dot("other", place, fault["all_back_s"], told)
    add_text(svg, "middle", (LEFT + RIGHT) / 2, size[1] - 9, "fault")
    return svg_text(svg)


class _Panel:
    """One of the panels below each other, with a scale of its own; faults go from 1 on."""

    def __init__(self, svg: Element, number: int, about: str, faults: int):
        self._svg, self._faults = svg, faults
        self._top = FIRST + number * (PANEL + GAP)
        add_text(svg, "stage", LEFT, self._top - 10, about)
        for tick in round_ticks(max(2, faults), 1, 10):
            add_text(svg, "middle", self._x(tick - 1), self._top + PANEL + 16, f"{tick:,.0f}")

    def scale(self, values: Sequence[float]) -> None:
        """Make room for all of these values, and write what heights stand for."""
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 1.0
        self._low, self._high = (low - margin if low else 0.0), high + margin
        for tick in round_ticks(self._high, self._low, 4):
            height = self._y(tick)
            add_line(self._svg, "grid", (LEFT, height), (RIGHT, height))
            add_text(self._svg, "end", LEFT - 7, height + 4, f"{tick:,.10g}")

    def line(self, classes: str, values: Sequence[float]) -> None:
        """A value for each fault."""
        corners = (point((self._x(place), self._y(value))) for place, value in enumerate(values))
        SubElement(self._svg, "polyline", {"class": classes, "points": " ".join(corners)})

    def level(self, classes: str, value: float) -> None:
        """What values are held to."""
        add_line(self._svg, classes, (LEFT, self._y(value)), (RIGHT, self._y(value)))

    def dot(self, classes: str, place: int, value: float, told: str) -> None:
        """A value of one fault."""
        add_tip(add_circle(self._svg, classes, self._x(place), self._y(value), 2.5), told)

    def _x(self, place: float) -> float:
        return LEFT + (RIGHT - LEFT) * place / max(1, self._faults - 1)

    def _y(self, value: float) -> float:
        return self._top + PANEL * (self._high - value) / (self._high - self._low)
