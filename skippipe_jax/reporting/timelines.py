"""Charts of recorded iterations, each with the prediction of its plan above it."""

from __future__ import annotations

import json
from pathlib import Path

from skippipe_sched.figures.gantt import gantt_series
from skippipe_sched.figures.trace import chrome_trace

from skippipe_jax import log
from skippipe_jax.program.schedule import timeline_of
from skippipe_jax.storage.recording import (
    IncompleteRecordingError,
    load_recorded_plan,
    measured_timeline,
    recorded_steps,
    recording_path,
)
from skippipe_jax.storage.run_dir import RunDir


def draw_recorded(run_dir: Path) -> list[Path]:
    """Draw every recorded iteration below the prediction of its plan; return the files written.

    For each step these are `timelines/<step>.svg`, and `timelines/<step>.trace.json` for Perfetto.
    An incompletely recorded step is skipped, with a line on stderr.

    Raises:
        InputError: if the plan or a recording is damaged.
    """
    run = RunDir(run_dir)
    schedule, averaging = run.schedule(), run.config("RUN").averaging
    written = []
    for step in recorded_steps(run_dir):
        plan = load_recorded_plan(run_dir, step) or schedule.plan(step - 1)
        predicted = timeline_of(plan, averaging, step)
        try:
            measured = measured_timeline(run_dir, plan, step)
        except IncompleteRecordingError as error:
            log.info(f"not drawn: {error}")
            continue
        titles = {"predicted": predicted, measured_title(step): measured}
        for ending, content in (
            (".svg", gantt_series(plan, titles)),
            (".trace.json", json.dumps(chrome_trace(plan, predicted, measured)) + "\n"),
        ):
            path = recording_path(run_dir, step, 0).parent.with_suffix(ending)
            path.write_text(content, encoding="utf-8")
            written.append(path)
    return written


def measured_title(step: int) -> str:
    """Return the title of a recorded iteration in charts."""
    return f"measured, step {step}"
