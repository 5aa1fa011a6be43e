"""A picture of a service that `serve_churn` struck: tokens over time, and perplexities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from skippipe_sched.figures.svg import (
    add_circle,
    add_line,
    add_rect,
    add_text,
    add_tip,
    add_title,
    point,
    round_ticks,
    start_picture,
    svg_text,
)

# Pixels.
WIDTH, PANEL, FIRST, SECOND = 640, 150, 84, 306
LEFT, RIGHT = 56, WIDTH - 24
HEIGHT = SECOND + PANEL + 62
BAR, SPACE = 34, 4
STYLE = """
.served polyline{fill:none;stroke:#2f6db5;stroke-width:1.4;stroke-linejoin:round}
.served .lost{stroke:#b5482f;stroke-dasharray:4 3}.served .back{stroke:#2f8a5b;stroke-dasharray:4 3}
.served .own{fill:#2f6db5}.served .control{fill:#c9a06a}
.served circle.lost{fill:#b5482f;stroke:none}
"""


def picture(report: Mapping[str, Any]) -> str:
    """Draw tokens per second beside the hosts that come and go, and perplexities, as an SVG."""
    svg = start_picture("served", (WIDTH, HEIGHT), "A service that loses hosts", STYLE)
    requests = report["requests"]
    told = f"{requests['sent']} requests, {requests.get('failed', 0)} failed"
    add_title(svg, f"{len(report['faults'])} of {report['hosts']} hosts killed", told)
    _draw_tokens(svg, report)
    _draw_perplexities(svg, report["levels"])
    return svg_text(svg)


def _draw_tokens(svg: Element, report: Mapping[str, Any]) -> None:
    about = "tokens that clients got in a second; hosts are killed (red) and serve again (green)"
    rates = report["tokens_each_second"]
    bottom, end = FIRST + PANEL, max(len(rates), 2)
    add_text(svg, "stage", LEFT, FIRST - 22, about)

    def across(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / end

    height = _scale(svg, FIRST, max(rates, default=1))
    for tick in round_ticks(end):
        add_text(svg, "middle", across(tick), bottom + 16, f"{tick:,.0f}")
    add_text(svg, "middle", (LEFT + RIGHT) / 2, bottom + 32, "seconds, without those of evaluation")
    corners = " ".join(
        f"{point((across(second), height(rate)))} {point((across(second + 1), height(rate)))}"
        for second, rate in enumerate(rates)
    )
    SubElement(svg, "polyline", {"points": corners})
    for fault in report["faults"]:
        x = across(fault["at_s"])
        add_line(svg, "lost", (x, FIRST), (x, bottom))
        stages = " and ".join(map(str, fault["stages"]))
        told = f"host {fault['host']} with stage {stages}"
        add_tip(add_circle(svg, "lost", x, FIRST, 3), told)
    for own in report["back"]:
        add_line(svg, "back", (across(own["at_s"]), FIRST), (across(own["at_s"]), bottom))


def _draw_perplexities(svg: Element, levels: Sequence[Mapping[str, Any]]) -> None:
    kinds = {"own": "perplexity", "control": "control"}
    kinds = {kind: key for kind, key in kinds.items() if key in levels[0]}
    about = "held-out perplexity through the service"
    if "control" in kinds:
        about += " (blue), and of the control (brown)"
    add_text(svg, "stage", LEFT, SECOND - 22, about)
    height = _scale(svg, SECOND, max(level[key] for level in levels for key in kinds.values()))
    for place, level in enumerate(levels):
        middle = LEFT + (RIGHT - LEFT) * (place + 0.5) / len(levels)
        start = middle - (len(kinds) * BAR + (len(kinds) - 1) * SPACE) / 2
        for number, (kind, key) in enumerate(kinds.items()):
            left = start + number * (BAR + SPACE)
            add_rect(svg, kind, (left, left + BAR), (height(level[key]), SECOND + PANEL))
            of_full = level[key] / levels[0][key]
            add_text(
                svg,
                "middle",
                left + BAR / 2,
                height(level[key]) - 4,
                f"{100 * (of_full - 1):+.0f}%",
            )
        stages = " ".join(map(str, level["stages"]))
        add_text(svg, "middle", middle, SECOND + PANEL + 16, f"stages {stages}")
    add_text(svg, "middle", (LEFT + RIGHT) / 2, HEIGHT - 14, "above the bars: beside all stages")


def _scale(svg: Element, top: float, most: float) -> Any:
    """Write what heights of a panel stand for, from 0 on; return where a value is."""
    high = 1.12 * most or 1.0

    def height(value: float) -> float:
        return top + PANEL * (1 - value / high)

    for tick in round_ticks(high, 0.0, 4):
        add_line(svg, "grid", (LEFT, height(tick)), (RIGHT, height(tick)))
        add_text(svg, "end", LEFT - 7, height(tick) + 4, f"{tick:,.10g}")
    return height
