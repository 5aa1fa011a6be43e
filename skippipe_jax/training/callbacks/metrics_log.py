"""Output of every run during training: metrics, validation losses, pictures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from skippipe_jax.reporting.timelines import draw_recorded
from skippipe_jax.storage.files import retry
from skippipe_jax.storage.records import (
    RecordWriter,
    StepMetrics,
    ValidationMetrics,
    append_record,
    finite,
)
from skippipe_jax.storage.run_dir import METRICS, VALIDATION, RunDir
from skippipe_jax.training.callbacks.base import Callback, RunView

# Lines are written soon after their iteration ends, so a lost leader leaves at most this many
# unwritten, besides the lag between hosts.
LINES_KEPT = 8


class MetricsLog(Callback):
    """Writer of a line to metrics.jsonl after every step, and to validation.jsonl if validated.

    A new leader replaces both files, so a former leader that was suspended appends to files that no
    longer belong to the run.
    """

    def __init__(self, folder: Path):
        """Open the files in the folder of a run."""
        self._folder = folder
        self._metrics = retry(folder, lambda: RecordWriter(folder / METRICS))
        self._losses = retry(folder, lambda: RecordWriter(folder / VALIDATION))

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Append the line of a step."""
        retry(self._folder, lambda: self._metrics.append(metrics))

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Append a validation loss."""
        line = ValidationMetrics(step=step, validation_loss=finite(loss))
        retry(self._folder, lambda: self._losses.append(line))

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._losses.close()


class MetricsTail(Callback):
    """Last lines of metrics, kept on every host as the leader may be lost before it writes them."""

    def __init__(self, max_lag: int = 1):
        """Start without lines; hosts differ by at most `max_lag` iterations."""
        self.lines: deque[StepMetrics] = deque(maxlen=LINES_KEPT + max_lag)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Keep the line."""
        self.lines.append(metrics)

    @property
    def last_loss(self) -> float | None:
        """Loss of the last line; None if there is no line, or it is not finite."""
        return self.lines[-1].loss if self.lines else None

    def drop_after(self, step: int) -> None:
        """Drop the lines of steps after `step`, which are repeated."""
        committed = [line for line in self.lines if line.step <= step]
        self.lines = deque(committed, maxlen=self.lines.maxlen)

    def snapshot(self) -> list[Mapping[str, Any]]:
        """Return a copy of the lines, in the form that `adopt` takes."""
        return msgspec.to_builtins([*self.lines])

    def adopt(self, snapshots: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Replace the lines by the snapshot with the latest step."""
        latest = max(snapshots, key=lambda lines: lines[-1]["step"] if lines else 0)
        self.lines = deque(msgspec.convert(latest, list[StepMetrics]), maxlen=self.lines.maxlen)

    def flush_to(self, folder: Path) -> None:
        """Append to metrics.jsonl the lines that a lost leader has not written."""
        written = retry(folder, lambda: RunDir(folder).last_step())
        for line in (line for line in self.lines if line.step > written):
            retry(folder, lambda line=line: append_record(folder / METRICS, line))


class TimelinePlotter(Callback):
    """Plotter of the iterations that all hosts have recorded, at the end of a run.

    A host writes its recordings before its part of the last checkpoint, which is complete by then.
    """

    def on_train_end(self, run: RunView) -> None:
        """Draw the timelines on host 0."""
        if run.group.index == 0:
            draw_recorded(run.run_dir)
