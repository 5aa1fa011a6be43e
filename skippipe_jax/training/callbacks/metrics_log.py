"""What every run writes as it trains: metrics, held-out losses, pictures."""

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

# Iterations end one after another, and each is written soon after: more are never missing, beyond
# those by which hosts are apart.
LINES_KEPT = 8


class MetricsLog(Callback):
    """Adds a line to metrics.jsonl after every step, and one to validation.jsonl when it is time.

    Both go on as long as no other host leads: a leader that was stopped adds to files that are no
    longer those of the run.
    """

    def __init__(self, folder: Path):
        """Write into the folder of a run."""
        self._folder = folder
        self._metrics = retry(folder, lambda: RecordWriter(folder / METRICS))
        self._losses = retry(folder, lambda: RecordWriter(folder / VALIDATION))

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Add the line of a step."""
        retry(self._folder, lambda: self._metrics.append(metrics))

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Add a held-out loss."""
        line = ValidationMetrics(step=step, validation_loss=finite(loss))
        retry(self._folder, lambda: self._losses.append(line))

    def close(self) -> None:
        """Add no more lines."""
        self._metrics.close()
        self._losses.close()


class MetricsTail(Callback):
    """The last lines of metrics, on every host: the first may be lost before it has written one."""

    def __init__(self, apart: int = 1):
        """Begin with none; hosts are so many iterations `apart` at most."""
        self.lines: deque[StepMetrics] = deque(maxlen=LINES_KEPT + apart)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Keep the line."""
        self.lines.append(metrics)

    @property
    def last_loss(self) -> float | None:
        """Return the loss of the last line; None if there is none, or it is not finite."""
        return self.lines[-1].loss if self.lines else None

    def drop_after(self, step: int) -> None:
        """Forget the lines of later steps, which come again."""
        counting = [line for line in self.lines if line.step <= step]
        self.lines = deque(counting, maxlen=self.lines.maxlen)

    def snapshot(self) -> list[Mapping[str, Any]]:
        """Copy the lines, as others adopt them."""
        return msgspec.to_builtins([*self.lines])

    def adopt(self, snapshots: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Go on with the lines of whoever is furthest."""
        most = max(snapshots, key=lambda lines: lines[-1]["step"] if lines else 0)
        self.lines = deque(msgspec.convert(most, list[StepMetrics]), maxlen=self.lines.maxlen)

    def flush_to(self, folder: Path) -> None:
        """Add those to metrics.jsonl that a host which was lost has not written."""
        written = retry(folder, lambda: RunDir(folder).last_step())
        for line in (line for line in self.lines if line.step > written):
            retry(folder, lambda line=line: append_record(folder / METRICS, line))


class TimelinePlotter(Callback):
    """Draws the iterations that all hosts have recorded, at the end of a run.

    A host writes what it has recorded of a step before its part of the last checkpoint, which is
    whole by then.
    """

    def on_train_end(self, run: RunView) -> None:
        """Draw on host 0."""
        if run.group.index == 0:
            draw_recorded(run.run_dir)
