"""Page about a run: this module computes its content, `page.html` is its template."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from jinja2 import Environment, PackageLoader, StrictUndefined
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.figures.amounts import seconds_text, size_text
from skippipe_sched.figures.flows import flows_map
from skippipe_sched.figures.gantt import gantt_series
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.timeline import Timeline
from skippipe_sched.timing.traffic import Flow, link_name, link_traffic

from skippipe_jax.config import Config
from skippipe_jax.config.parsing import CONFIG
from skippipe_jax.models.footprint import bytes_per_link, stage_parameters
from skippipe_jax.program.schedule import OWN, timeline_of
from skippipe_jax.reporting.line_chart import line_chart
from skippipe_jax.reporting.timelines import measured_title
from skippipe_jax.storage.recording import (
    IncompleteRecordingError,
    load_recorded_plan,
    measured_timeline,
    recorded_steps,
)
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.storage.run_dir import RunDir

REPORT = "report.html"
"""File name of the page, in the run directory."""
BUSIEST_LINKS = 12
# Number of last iterations over which medians of predictions and idle shares are shown.
RECENT = 100
# Maximum number of operations in the recordings shown; the newest is always shown.
MOST_OPERATIONS = 2_000


def report(folder: Path) -> str:
    """Return the page about a run, as HTML that is well-formed XML too.

    In a run with several plans, everything except the curves is about the plan of the newest step.

    Raises:
        InputError: if the folder does not hold a run, or a file in it is damaged.
    """
    run = RunDir(folder)
    config, schedule, lines = run.config("RUN"), run.schedule(), run.metrics()
    name, last = (schedule.name(lines[-1].step - 1), lines[-1].step) if lines else (OWN, 1)
    plan = schedule.plans[name]
    own = [line for line in lines if schedule.name(line.step - 1) == name]
    recent = [line for line in lines[-RECENT:] if schedule.name(line.step - 1) == name]
    predicted, sent = timeline_of(plan, config.averaging, last), bytes_per_link(config, plan, last)
    recorded = recorded_steps(folder)
    shown = [
        step
        for step in recorded
        if schedule.name(step - 1) == name and load_recorded_plan(folder, step) is None
    ]
    measured, notes = load_timelines(folder, plan, shown)
    if len(shown) < len(recorded):
        notes.append(f"{len(recorded) - len(shown)} recorded iterations used other plans.")
    newest, *others = sorted(measured, reverse=True) or [None]
    newest_timeline = None if newest is None else measured[newest]
    timeline = newest_timeline or predicted
    links, num_hidden = _busiest_links(plan, timeline)
    return _template().render(
        name=folder.resolve().name,
        evaluate=f"skippipe evaluate --run {shlex.quote(str(folder))}",
        config=config,
        conversations=conversations(run, config),
        configuration=fields.read_text(folder / CONFIG, CONFIG),
        parameters=_count_text(
            stage_parameters(config.model, config.model.layers, is_data_stage=True)
        ),
        plan=plan,
        generations=run.generations(),
        measured_seconds=_seconds_by_generation(lines),
        recoveries=run.recoveries(),
        locations=len({node.location for node in plan.case.nodes}),
        visited=sorted({len(path) for path in plan.microbatches}),
        lines=own,
        settled=_settled(own),
        emulated=sum(line.network == "emulate" for line in own),
        predicted_seconds=_predicted_seconds(recent),
        held_out=_held_out(lines),
        curves=[*curves(lines).values()] if lines else [],
        newest=newest,
        timelines=gantt_series(plan, {"predicted": predicted} | _titled(measured, newest)),
        others=len(others),
        other_timelines=gantt_series(plan, _titled(measured, *others)) if others else "",
        notes=notes,
        flows=flows_map(plan, predicted),
        iteration_s=timeline.iteration_s,
        links=[
            (link_name(plan.case, flow), flow, sent.get((flow.source, flow.target), 0))
            for flow in links
        ],
        num_hidden=num_hidden,
        idle=_idle_shares(newest_timeline, recent, predicted.nodes),
        expected_idle=_idle_of(predicted),
    )


def conversations(run: RunDir, config: Config) -> str:
    """Return the number of conversations in training, their trained tokens, and the template.

    The text is "" for a run without conversations. Counts are left out if the text is not here.
    """
    if not {"chat", "tokens"} & {source.kind for source in config.data.sources()}:
        return ""
    # These imports load JAX, which a page about other text does not need.
    from skippipe_jax.data.batches import load_corpora, tokenizer_of
    from skippipe_jax.data.chat import trains_on_answers
    from skippipe_jax.data.tokenizer import load_tokenizer

    data = run.located(run.with_tokenizer(config.data))
    if not trains_on_answers(data):
        return ""
    try:
        tokenizer = load_tokenizer(tokenizer_of(data))
        corpora = load_corpora(data)
    except InputError:  # On another machine, or deleted.
        return "text not found"
    count = tokens = trained = 0
    for documents in (corpus.training for corpus in corpora):
        if documents.learnt is not None:
            count, tokens = count + len(documents.ends), tokens + documents.tokens.size
            trained += int((documents.learnt.ends - documents.learnt.starts).sum())
    counts = (
        f"{count:,} for training, {tokens:,} tokens; trained on the {trained:,} "
        f"({trained / tokens:.0%}) tokens of the assistant"
    )
    if all(source.kind == "tokens" for source in data.sources()):
        return counts  # `skippipe tokenize` applied the template.
    by_tokenizer = "none" if tokenizer.chat_template is None else "of the tokenizer"
    return f"{counts}; chat template: {config.data.chat_template or by_tokenizer}"


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader(__package__ or "", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "change": lambda share: f"{share:+.0%}",
        "grouped": lambda number: f"{number:,.0f}",
        "loss": lambda loss: "unknown" if loss is None else f"{loss:.4f}",
        "median": np.median,
        "percent": lambda share: f"{share:.0%}",
        "seconds": seconds_text,
        "size": size_text,
    }
    return environment.get_template("page.html")


def load_timelines(
    folder: Path, plan: Plan, steps: Sequence[int]
) -> tuple[dict[int, Timeline], list[str]]:
    """Read iterations of this plan recorded at `steps`: the newest, and others spread evenly.

    Also returns notes on recordings that are not shown.
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


def curves(lines: Sequence[StepMetrics]) -> dict[str, str]:
    """Draw the loss, the validation loss if there is one, and seconds per iteration, as SVGs.

    There must be at least one iteration. Losses that are not finite are left out.
    """
    steps = np.array([line.step for line in lines])
    predicted = _predicted_seconds(lines[-RECENT:])
    # Compiling iterations are much slower; do not scale the axis to them.
    settled = [line.seconds_per_iteration for line in _settled(lines)]
    top = float(np.quantile(settled, 0.99)) * 1.25
    mark = None
    if predicted is not None:
        top = max(top, 1.15 * predicted)
        mark = (f"predicted {seconds_text(predicted)}", predicted)
    losses = {
        "loss": ("Loss", [line.loss for line in lines]),
        "validation_loss": ("Validation loss", [line.validation_loss for line in lines]),
    }
    charts: dict[str, str] = {}
    for name, (title, found) in losses.items():
        values = np.array(found, float)  # None becomes NaN.
        known = np.isfinite(values)
        if known.any():
            charts[name] = _loss_curve(title, steps[known], values[known])
    seconds = np.array([line.seconds_per_iteration for line in lines])
    charts["seconds"] = line_chart("Seconds per iteration", "", steps, seconds, (0.0, top), mark)
    return charts


def _loss_curve(title: str, steps: Int[np.ndarray, " n"], values: Float[np.ndarray, " n"]) -> str:
    low, high = float(values.min()), float(values.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return line_chart(title, "nats per token", steps, values, (low - margin, high + margin))


def _busiest_links(plan: Plan, timeline: Timeline) -> tuple[Sequence[Flow[int]], int]:
    """Return the busiest links between locations, and the number of other links.

    If all nodes are in one location, its inner links are used.
    """
    nodes, links = plan.case.nodes, link_traffic(plan, timeline)
    between = [flow for flow in links if nodes[flow.source].location != nodes[flow.target].location]
    shown = between or links
    return shown[:BUSIEST_LINKS], len(links) - len(shown)


def _held_out(lines: Sequence[StepMetrics]) -> tuple[int, float, float] | None:
    """Return the step and value of the lowest validation loss, and the last one, or None."""
    found = [(line.validation_loss, line.step) for line in lines]
    losses = [(loss, step) for loss, step in found if isinstance(loss, float)]
    return (min(losses)[1], min(losses)[0], losses[-1][0]) if losses else None


def _settled(lines: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """Return the iterations that represent the speed: those without compilation, if any."""
    return [line for line in lines if not line.compilations] or lines


def _seconds_by_generation(lines: Sequence[StepMetrics]) -> dict[int | None, float]:
    """Return the median seconds of the settled iterations of each generation of hosts."""
    of: dict[int | None, list[StepMetrics]] = {}
    for line in lines:
        of.setdefault(line.generation, []).append(line)
    return {
        generation: float(np.median([line.seconds_per_iteration for line in _settled(own)]))
        for generation, own in of.items()
    }


def _predicted_seconds(lines: Sequence[StepMetrics]) -> float | None:
    """Return the median of the plan's seconds per iteration, or None."""
    seconds = [line.predicted_seconds for line in lines if line.predicted_seconds]
    return float(np.median(seconds)) if seconds else None


def _titled(measured: Mapping[int, Timeline], *steps: int | None) -> dict[str, Timeline]:
    return {measured_title(step): measured[step] for step in steps if step is not None}


def _idle_shares(
    newest: Timeline | None, recent: Sequence[StepMetrics], nodes: int
) -> tuple[str, Float[np.ndarray, " nodes"]] | None:
    """Return the source of the idle times, and the share of an iteration that each node idles."""
    # Skip iterations under another plan, with another number of nodes.
    shares = [n.idle_share for n in recent if n.idle_share and len(n.idle_share) == nodes]
    if shares:
        return f"median of the last {len(shares)} iterations", np.median(shares, axis=0)
    return None if newest is None else ("newest recorded iteration", _idle_of(newest))


def _idle_of(timeline: Timeline) -> Float[np.ndarray, " nodes"]:
    return 1.0 - np.array(timeline.busy_s) / timeline.iteration_s


def _count_text(count: int) -> str:
    """Return a count in millions or billions, with three digits."""
    for size, word in ((10**9, " billion"), (10**6, " million")):
        if count >= size:
            return f"{count / size:.3g}{word}"
    return f"{count:,}"
