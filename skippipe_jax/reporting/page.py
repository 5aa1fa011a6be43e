"""`python -m skippipe_jax.report RUN`: one HTML page that shows a run, with nothing beside it."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from skippipe_sched import fields
from skippipe_sched.errors import InputError, run_command
from skippipe_sched.figures.flows import (
    Flow,
    flows_map,
    link_name,
    link_traffic,
    seconds_text,
    size_text,
)
from skippipe_sched.figures.gantt import gantt_series
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import Timeline

from skippipe_jax.config import Config
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.program.schedule import OWN, timeline_of
from skippipe_jax.reporting.curves import curve
from skippipe_jax.storage.recording import (
    IncompleteRecordingError,
    measured_timeline,
    measured_title,
    recorded_steps,
)
from skippipe_jax.storage.run_folder import CONFIG, METRICS, saved_config, saved_schedule

# Of the links and of the idle shares, the page shows the median over so many last iterations.
RECENT = 100
BUSIEST_LINKS = 12
# The recordings shown hold so many operations at most, but the newest is always shown.
MOST_OPERATIONS = 2_000


def main() -> int:
    """Parse the command line and write the page; returns the exit code."""
    arguments = _parser().parse_args()
    # A page needs no accelerator, and the run may be using this machine's.
    jax.config.update("jax_platforms", "cpu")

    def command() -> int:
        output = arguments.output or arguments.run / "report.html"
        page = report(arguments.run)
        try:
            output.write_text(page, encoding="utf-8")
        except OSError as error:
            raise InputError(
                "--output", str(output), f"cannot be written: {error.strerror}", "Name another file"
            ) from error
        print(f"report written to {output}")
        return 0

    return run_command(command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_jax.report",
        description="One HTML page of a run: curves, timelines, links, idle nodes.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("-o", "--output", type=Path, help="default: report.html in that folder")
    return parser


@dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics of a run: figures of every iteration, and the last lines whole.

    A loss is NaN where it was no finite number, and a held-out loss where none was computed.
    """

    step: Int[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]
    held_out: Float[np.ndarray, " n"]
    seconds: Float[np.ndarray, " n"]
    tokens_per_second: Float[np.ndarray, " n"]
    compiled: Bool[np.ndarray, " n"]
    emulated: Bool[np.ndarray, " n"]
    recent: Sequence[Mapping[str, Any]]

    @property
    def settled(self) -> Bool[np.ndarray, " n"]:
        """Which iterations tell how fast the run is: those without compilation, if any."""
        return ~self.compiled if not self.compiled.all() else self.compiled

    def of(self, chosen: Sequence[bool]) -> Metrics:
        """The metrics of the chosen iterations alone."""
        kept = np.array(chosen, bool)
        lines = zip(self.recent, chosen[len(chosen) - len(self.recent) :], strict=True)
        return Metrics(
            step=self.step[kept],
            loss=self.loss[kept],
            held_out=self.held_out[kept],
            seconds=self.seconds[kept],
            tokens_per_second=self.tokens_per_second[kept],
            compiled=self.compiled[kept],
            emulated=self.emulated[kept],
            recent=tuple(line for line, is_chosen in lines if is_chosen),
        )

    @property
    def seconds_per_iteration(self) -> float:
        """The median of the settled iterations."""
        return float(np.median(self.seconds[self.settled]))

    @property
    def predicted_seconds(self) -> float | None:
        """What the plan says of an iteration, in the median, if the run has noted it."""
        field = f"{METRICS}, predicted_seconds"
        noted = [line.get("predicted_seconds") for line in self.recent]
        seconds = [fields.number(n, field, 0.0, above=True) for n in noted if n is not None]
        return float(np.median(seconds)) if seconds else None

    @property
    def bytes_per_link(self) -> Mapping[str, Any] | None:
        """What went over each link, "source-target", in the last iteration, if noted."""
        noted = self.recent[-1].get("bytes_per_link") if self.recent else None
        return None if noted is None else fields.mapping(noted, f"{METRICS}, bytes_per_link", noted)

    def idle_share(self, nodes: int) -> tuple[int, Float[np.ndarray, " nodes"]] | None:
        """Of how many recent iterations on so many nodes it was noted, and each one's median."""
        field = f"{METRICS}, idle_share"
        noted = [
            [
                fields.number(share, field, 0.0)
                for share in fields.sequence(line["idle_share"], field)
            ]
            for line in self.recent
            if line.get("idle_share") is not None
        ]
        # The run may have gone on under another plan, with other nodes.
        noted = [shares for shares in noted if len(shares) == nodes]
        return (len(noted), np.median(noted, axis=0)) if noted else None


def load_metrics(folder: Path) -> Metrics:
    """Read the metrics of a run line by line; a line that a crash cut short is left out.

    Raises:
        InputError: naming the line that is damaged.
    """
    rows: list[tuple[float, ...]] = []
    recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
    try:
        with (folder / METRICS).open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith("\n"):
                    line = _metrics_line(text, f"{METRICS}, line {number}")
                    rows.append(_row(line, f"{METRICS}, line {number}, "))
                    recent.append(line)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            METRICS, str(folder / METRICS), f"cannot be read: {error}", "Name the folder of a run"
        ) from error
    table = np.array(rows, float).reshape(-1, 7)
    return Metrics(
        step=table[:, 0].astype(int),
        loss=table[:, 1],
        held_out=table[:, 2],
        seconds=table[:, 3],
        tokens_per_second=table[:, 4],
        compiled=table[:, 5] > 0,
        emulated=table[:, 6] > 0,
        recent=tuple(recent),
    )


def _metrics_line(text: str, field: str) -> Mapping[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            field, text.strip(), f"not valid JSON: {error}", "Remove this line"
        ) from error
    if not isinstance(line, dict):
        raise InputError(field, line, "must be a JSON object", "Remove this line")
    return line


def _row(line: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """The figures of an iteration, in the order of the fields of `Metrics`."""
    seconds, speed = "seconds_per_iteration", "tokens_per_second"
    return (
        fields.integer(line.get("step"), f"{where}step", 0, 2**53),
        # Only null says that the loss was no finite number.
        _number_or_nan(line.get("loss", "nothing"), f"{where}loss"),
        _number_or_nan(line.get("validation_loss"), f"{where}validation_loss"),
        fields.number(line.get(seconds), where + seconds, 0.0, above=True),
        fields.number(line.get(speed), where + speed, 0.0),
        fields.integer(line.get("compilations"), f"{where}compilations", 0),
        line.get("network") == "emulate",
    )


def _number_or_nan(value: Any, field: str) -> float:
    return math.nan if value is None else fields.number(value, field)


def report(folder: Path) -> str:
    """The page of a run, as HTML that is well-formed XML too.

    Where iterations take several plans, all but the curves is about the plan of the newest one.

    Raises:
        InputError: if the folder holds no run, or something in it is damaged.
    """
    config, schedule = saved_config(folder, "RUN"), saved_schedule(folder)
    whole = load_metrics(folder)
    steps = whole.step.tolist()
    plans = [schedule.name(step - 1) for step in steps]
    name = plans[-1] if plans else OWN
    plan, metrics = schedule.plans[name], whole.of([other == name for other in plans])
    predicted = timeline_of(plan, config.recipe.averaged(steps[-1] if steps else 0))
    recorded = recorded_steps(folder)
    shown = [step for step in recorded if schedule.name(step - 1) == name]
    measured, notes = load_timelines(folder, plan, shown)
    if len(shown) < len(recorded):
        notes.append(f"{len(recorded) - len(shown)} recorded iterations had other plans.")
    newest = measured[max(measured)] if measured else None
    body = [_summary(folder, config, plan, metrics)]
    if len(whole.step):
        body.append(_section("Curves", _tag_of("div", curves(whole), "curves")))
    body.append(_timelines(plan, predicted, measured, notes))
    body.append(_links(plan, predicted, newest, metrics))
    body.append(_idle_shares(plan, predicted, newest, metrics))
    text = fields.read_text(folder / CONFIG, CONFIG)
    body.append(f"<details><summary>Configuration in full</summary>{_tag('pre', text)}</details>")
    return PAGE.format(title=escape(_name(folder)), style=STYLE, body="\n".join(body))


def load_timelines(
    folder: Path, plan: Plan, steps: Sequence[int]
) -> tuple[dict[int, Timeline], list[str]]:
    """Iterations recorded at `steps`, which took this plan: the newest, and others spread evenly.

    With them come notes on what is not shown.
    """
    shown = MOST_OPERATIONS // sum(map(len, plan.order))
    chosen = steps
    if len(steps) > shown:
        chosen = [steps[round(i)] for i in np.linspace(len(steps) - 1, 0, max(1, shown))]
    timelines, notes = {}, []
    for step in sorted(set(chosen)):
        try:
            timelines[step] = measured_timeline(folder, plan, step)
        except IncompleteRecordingError as error:
            notes.append(f"Not shown: {error}")
    if len(steps) > len(chosen):
        notes.append(f"{len(chosen)} of {len(steps)} recorded iterations are shown.")
    return timelines, notes


def _summary(folder: Path, config: Config, plan: Plan, metrics: Metrics) -> str:
    """What the run is, and its figures."""
    parts = [_tag("h1", _name(folder))]
    if metrics.emulated.any():
        count = f"{metrics.emulated.sum():,} of {len(metrics.step):,} iterations"
        of = "" if metrics.emulated.all() else f" in {count}"
        parts.append(
            _tag(
                "p",
                f"Emulated network{of}: transfers and averaging were delayed as the plan's links "
                "say; their times were not measured on a network.",
                "notice",
            )
        )
    if len(metrics.step):
        parts.append(_figures(config, metrics))
    else:
        parts.append(_tag("p", "No iteration has ended yet.", "notice"))
    network = metrics.recent[-1].get("network") if metrics.recent else None
    parts.append(_facts(folder, config, plan, network))
    return _tag_of("header", parts)


def _figures(config: Config, metrics: Metrics) -> str:
    seconds = metrics.seconds_per_iteration
    tokens_per_second = np.median(metrics.tokens_per_second[metrics.settled])
    figures = [
        ("steps", f"{metrics.step[-1]:,}", f"of {config.train.steps:,}"),
        ("loss", f"{metrics.loss[-1]:.3f}", "nats per token, of the last step"),
        ("tokens per second", f"{tokens_per_second:,.0f}", "median"),
        ("per iteration", seconds_text(seconds), "median"),
    ]
    predicted = metrics.predicted_seconds
    if predicted is not None:
        ratio = f"measured is {seconds / predicted:.2f} times that"
        figures.append(("predicted", seconds_text(predicted), ratio))
    return _tag_of(
        "dl",
        (
            f"<div>{_tag('dt', name)}<dd><b>{escape(value)}</b> {escape(unit)}</dd></div>"
            for name, value, unit in figures
        ),
        "figures",
    )


def _facts(folder: Path, config: Config, plan: Plan, network: str | None) -> str:
    model, case = config.model, plan.case
    parameters = sum(map(parameter_count, stage_shapes(model, len(plan.stages))))
    locations = len({node.location for node in case.nodes})
    visited = sorted({len(path) for path in plan.microbatches})
    lengths = str(visited[0]) if len(visited) == 1 else f"{visited[0]} to {visited[-1]}"
    replicas = ", ".join(str(len(nodes)) for nodes in plan.stages)
    facts = {
        "Model": f"{model.preset or 'LLaMA'}, {_count_text(parameters)} parameters: "
        f"{model.layers} layers of width {model.width}, context {model.context}",
        "Plan": f"{plan.method}; {len(plan.microbatches)} microbatches per iteration, each visits "
        f"{lengths} of {len(plan.stages)} stages",
        "Nodes": f"{len(case.nodes)} in {locations} location{'s' * (locations > 1)}; nodes per "
        f"stage: {replicas}",
    }
    if network is not None:
        facts["Network"] = "emulated" if network == "emulate" else "real"
    rows = "".join(
        f"<div>{_tag('dt', name)}{_tag('dd', fact)}</div>" for name, fact in facts.items()
    )
    command = _tag("code", f"python -m skippipe_jax.evaluate --run {shlex.quote(str(folder))}")
    held_out = f"<div><dt>Held-out loss</dt><dd>of the full model: {command}</dd></div>"
    return f'<dl class="facts">{rows}{held_out}</dl>'


def curves(metrics: Metrics) -> list[str]:
    """Loss, held-out loss where there is any, and seconds per iteration, each as an SVG.

    There must be one iteration at least.
    """
    seconds, predicted = metrics.seconds, metrics.predicted_seconds
    # The first iterations compile, and would leave the others no room.
    top = float(np.quantile(seconds[metrics.settled], 0.99)) * 1.25
    mark = None
    if predicted is not None:
        top = max(top, 1.15 * predicted)
        mark = (f"predicted {seconds_text(predicted)}", predicted)
    losses = {"Loss": metrics.loss, "Held-out loss": metrics.held_out}
    pictures = [
        _loss_curve(title, metrics.step[known], values[known])
        for title, values in losses.items()
        if (known := np.isfinite(values)).any()
    ]
    pictures.append(curve("Seconds per iteration", "", metrics.step, seconds, (0.0, top), mark))
    return pictures


def _loss_curve(title: str, steps: Int[np.ndarray, " n"], values: Float[np.ndarray, " n"]) -> str:
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return curve(title, "nats per token", steps, values, (low - margin, high + margin))


def _timelines(
    plan: Plan, predicted: Timeline, measured: Mapping[int, Timeline], notes: Sequence[str]
) -> str:
    """The newest recording below the prediction, and the others folded in."""
    steps = sorted(measured, reverse=True)
    titles = {measured_title(step): measured[step] for step in steps}
    newest = dict(list(titles.items())[:1])
    others = dict(list(titles.items())[1:])
    parts = [_scrolled(gantt_series(plan, {"predicted": predicted} | newest))]
    if others:
        summary = f"<summary>Other recorded iterations ({len(others)})</summary>"
        parts.append(f"<details>{summary}{_scrolled(gantt_series(plan, others))}</details>")
    if not measured:
        notes = [*notes, "No iteration was recorded. trace: every 10 records every tenth."]
    parts += [_tag("p", note, "note") for note in notes]
    return _section("One iteration", *parts)


def _links(plan: Plan, predicted: Timeline, newest: Timeline | None, metrics: Metrics) -> str:
    """A map of what the links carry by the plan, and a table of the busiest as measured."""
    timeline = newest or predicted
    sent = metrics.bytes_per_link
    rows = [
        [
            link_name(plan.case, flow),
            flow.use,
            size_text(flow.bytes),
            *([size_text(_bytes_on(sent, flow))] if sent is not None else []),
            seconds_text(flow.busy_s),
            f"{flow.busy_s / timeline.iteration_s:.0%}",
        ]
        for flow in link_traffic(plan, timeline)[:BUSIEST_LINKS]
    ]
    heading = ["link", "carries", "planned", *(["sent"] if sent is not None else [])]
    parts = [_tag("p", "What the plan sends in an iteration:", "note")]
    parts.append(_scrolled(flows_map(plan, predicted)))
    if rows:
        source = "as predicted" if newest is None else "in the newest recorded iteration"
        parts.append(_tag("h3", f"Busiest links, {source}"))
        parts.append(_scrolled(_table([*heading, "busy", "of iteration"], rows)))
    return _section("Links", *parts)


def _bytes_on(sent: Mapping[str, Any], flow: Flow[int]) -> float:
    link = f"{flow.source}-{flow.target}"
    return fields.number(sent.get(link, 0), f"{METRICS}, bytes_per_link.{link}", 0.0)


def _idle_shares(plan: Plan, predicted: Timeline, newest: Timeline | None, metrics: Metrics) -> str:
    """A bar for every node: how much of an iteration it does not compute."""
    noted = metrics.idle_share(predicted.nodes)
    if noted is not None:
        count, shares = noted
        source = f"median of the last {count} iterations"
    elif newest is not None:
        shares, source = _idle_of(newest), "newest recorded iteration"
    else:
        return ""
    expected = _idle_of(predicted)
    parts = [_tag("p", f"Share of an iteration, {source}; the mark is the prediction.", "note")]
    for stage, nodes in enumerate(plan.stages):
        rows = "".join(
            "<tr>"
            + _tag("td", f"node {node} · {plan.case.nodes[node].location}")
            + f'<td class="bar"><i style="width:{100 * shares[node]:.1f}%"></i>'
            f'<b style="left:{100 * expected[node]:.1f}%"></b></td>'
            + _tag("td", f"{shares[node]:.0%}", "number")
            + "</tr>"
            for node in nodes
        )
        name = f"Stage {stage}" + " · data" * (stage == 0)
        parts.append(f'<table class="idle">{_tag("caption", name)}{rows}</table>')
    return _section("Idle nodes", *parts)


def _idle_of(timeline: Timeline) -> Float[np.ndarray, " nodes"]:
    return 1.0 - np.array(timeline.busy_s) / timeline.iteration_s


def _name(folder: Path) -> str:
    return folder.resolve().name


def _count_text(count: int) -> str:
    """A count in millions or billions, with three digits."""
    for size, word in ((10**9, " billion"), (10**6, " million")):
        if count >= size:
            return f"{count / size:.3g}{word}"
    return f"{count:,}"


def _tag(name: str, text: str, classes: str = "") -> str:
    """An element that holds a text."""
    return _tag_of(name, [escape(text)], classes)


def _tag_of(name: str, parts: Iterable[str], classes: str = "") -> str:
    """An element that holds other elements."""
    attribute = f' class="{classes}"' if classes else ""
    return f"<{name}{attribute}>{''.join(parts)}</{name}>"


def _section(title: str, *parts: str) -> str:
    return _tag_of("section", [_tag("h2", title), *parts])


def _scrolled(content: str) -> str:
    """What may be wider than a phone."""
    return _tag_of("div", [content], "wide")


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in the first two columns, figures in the others."""
    classes = ["", "", *["number"] * (len(heading) - 2)]
    lines = [
        _tag_of("tr", map(_tag, [name] * len(cells), cells, classes))
        for name, cells in [("th", heading), *(("td", row) for row in rows)]
    ]
    return _tag_of("table", lines)


STYLE = """
:root{color-scheme:light dark;--paper:#fff;--text:#2a303a;--strong:#171b22;--weak:#5d6675;
--rule:#d5d9e0;--panel:#f4f6f9;--notice:#fdf0d5;--bar:#5b8fc7;--mark:#b5482f}
@media screen and (prefers-color-scheme:dark){
:root{--paper:#14171c;--text:#c9ced8;--strong:#eef1f6;--weak:#98a1b0;--rule:#343b47;
--panel:#1d222a;--notice:#47391a;--bar:#5b8fc7;--mark:#e58a6d}
svg{filter:invert(.91) hue-rotate(180deg)}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 16px 48px;max-width:932px;background:var(--paper);
color:var(--text);font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1,h2,h3,b,summary,caption{color:var(--strong)}
h1{font-size:26px;line-height:1.2;margin:0 0 12px;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 12px}
h3{font-size:15px;margin:20px 0 6px}
dl,dd{margin:0}
dt,.note{color:var(--weak)}
.note{font-size:14px}
.notice{background:var(--notice);padding:8px 14px;border-radius:8px;margin:0 0 16px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:10px}
.figures div{background:var(--panel);border-radius:8px;padding:10px 14px;font-size:13px}
.figures b{display:block;font-size:22px;line-height:1.3;font-variant-numeric:tabular-nums}
.facts{margin-top:20px}
.facts div{display:grid;grid-template-columns:110px 1fr;padding:5px 0;
border-top:1px solid var(--rule)}
code,pre{font:13px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{overflow-wrap:anywhere}
pre{background:var(--panel);border-radius:8px;padding:14px;overflow-x:auto}
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:20px}
svg{display:block;max-width:100%;height:auto}
.curves svg{width:100%}
.wide{overflow-x:auto}
details{margin-top:20px}
summary{cursor:pointer;font-weight:600;padding:4px 0 12px}
table{border-collapse:collapse;font-size:14px;width:100%}
th{text-align:left;font-weight:600;color:var(--weak)}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--rule);white-space:nowrap}
.number{text-align:right;font-variant-numeric:tabular-nums}
.idle{table-layout:fixed;margin-bottom:16px}
.idle caption{text-align:left;font-weight:600}
.idle td{border:0;padding:2px 12px 2px 0;overflow:hidden;text-overflow:ellipsis}
.idle td:first-child{width:200px}
.idle .number{width:52px;padding-right:0}
.idle .bar{position:relative;padding:0;background:var(--panel);background-clip:content-box;
overflow:visible;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.bar i{display:block;height:14px;background:var(--bar);border-radius:2px}
.bar b{position:absolute;top:3px;bottom:3px;width:2px;background:var(--mark)}
@media screen and (max-width:640px){
.wide svg{max-width:none}
.facts div{grid-template-columns:1fr}
.idle td:first-child{width:150px}}
@media print{
body{max-width:none;padding:0}
svg,table,.figures div{break-inside:avoid}
.figures{grid-template-columns:repeat(5,1fr)}
.curves{grid-template-columns:1fr 1fr}
.figures div,pre,.notice{border:1px solid var(--rule)}
h2{break-after:avoid}}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


if __name__ == "__main__":
    sys.exit(main())
