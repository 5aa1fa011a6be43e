"""A picture of a service that `churn` struck: tokens over time, and perplexities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from skippipe_sched.figures.svg import (
    add_circle,
    add_rect,
    add_text,
    add_tip,
    add_title,
    round_ticks,
    start_picture,
    svg_text,
)

from experiments.benchmarks.harness.panels import Panel

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
    end = max(len(rates), 2)
    panel = _panel(svg, FIRST, about, end, max(rates, default=1))
    panel.label_x(round_ticks(end))
    middle, under = (LEFT + RIGHT) / 2, panel.bottom + 32
    add_text(svg, "middle", middle, under, "seconds, without those of evaluation")
    panel.curve("", ((second + side, rate) for second, rate in enumerate(rates) for side in (0, 1)))
    for fault in report["faults"]:
        panel.down("lost", fault["at_s"])
        stages = " and ".join(map(str, fault["stages"]))
        circle = add_circle(svg, "lost", panel.x(fault["at_s"]), FIRST, 3)
        add_tip(circle, f"host {fault['host']} with stage {stages}")
    for own in report["back"]:
        panel.down("back", own["at_s"])


def _draw_perplexities(svg: Element, levels: Sequence[Mapping[str, Any]]) -> None:
    kinds = {"own": "perplexity", "control": "control"}
    kinds = {kind: key for kind, key in kinds.items() if key in levels[0]}
    about = "held-out perplexity through the service"
    if "control" in kinds:
        about += " (blue), and of the control (brown)"
    most = max(level[key] for level in levels for key in kinds.values())
    panel = _panel(svg, SECOND, about, len(levels), most)
    for place, level in enumerate(levels):
        middle = panel.x(place + 0.5)
        start = middle - (len(kinds) * BAR + (len(kinds) - 1) * SPACE) / 2
        for number, (kind, key) in enumerate(kinds.items()):
            left = start + number * (BAR + SPACE)
            top = panel.y(level[key])
            add_rect(svg, kind, (left, left + BAR), (top, panel.bottom))
            more = 100 * (level[key] / levels[0][key] - 1)
            add_text(svg, "middle", left + BAR / 2, top - 4, f"{more:+.0f}%")
        stages = " ".join(map(str, level["stages"]))
        add_text(svg, "middle", middle, panel.bottom + 16, f"stages {stages}")
    add_text(svg, "middle", (LEFT + RIGHT) / 2, HEIGHT - 14, "above the bars: beside all stages")


def _panel(svg: Element, top: float, about: str, end: float, most: float) -> Panel:
    """Add a panel with values from 0 to a little above the greatest."""
    scale = 0.0, 1.12 * most or 1.0
    panel = Panel(svg, (LEFT, RIGHT), (top, top + PANEL), (0.0, end), scale)
    add_text(svg, "stage", LEFT, top - 22, about)
    panel.label_y()
    return panel
