"""The project's own callbacks: what every run writes and shows, and what its configuration adds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import Config
from skippipe_jax.reporting.timelines import draw_recorded
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import saved_steps
from skippipe_jax.storage.retrying import retried
from skippipe_jax.storage.writer import CheckpointWriter
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.messages import say_meanwhile
from skippipe_jax.training.progress import ProgressBar
from skippipe_jax.training.trackers import Tracker, open_trackers, require_trackers

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer

# Iterations end one after another, and each is written soon after: more are never missing, beyond
# those by which hosts are apart.
LINES_KEPT = 8


def own_callbacks(
    trainer: Trainer, host: Membership | Team, writer: CheckpointWriter, skipped_updates: int
) -> list[Callback]:
    """What every run has, and what its configuration asks for; most of it on the first host alone.

    `host` is this one, `writer` that of checkpoints, and so many updates have been skipped before.
    """
    config, folder, step = trainer.config, trainer.folder, trainer.steps_done
    recordings = [] if config.trace == "never" else [RecordingsDrawn()]
    is_new = isinstance(host, Team) and host.generation.number > 1
    if host.index != 0:
        return [*recordings]
    return [
        MetricsFile(folder),
        *trackers_of(config, folder, step, is_new=is_new),
        ProgressBar(config, step, skipped_updates),
        BestCheckpoint(writer, folder),
        *recordings,
    ]


def trackers_of(config: Config, folder: Path, step: int, *, is_new: bool) -> list[Tracker]:
    """Those that are asked for; where who leads `is_new` and cannot have them, the run has none."""
    try:
        require_trackers(config.log)
        return open_trackers(config, folder, step)
    except InputError as error:
        if not is_new:
            raise
        say_meanwhile(f"warning: {error}; this host tells no tracker")
        return []


class MetricsFile(Callback):
    """Adds a line to metrics.jsonl after every step."""

    def __init__(self, folder: Path):
        """Write into the folder of a run."""
        self.folder = folder
        self.metrics = retried(folder, lambda: run_folder.MetricsWriter(folder))

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Add the line."""
        retried(self.folder, lambda: self.metrics.append(dict(metrics)))

    def close(self) -> None:
        """Add no more lines."""
        self.metrics.close()


class KeptLines(Callback):
    """The last lines of metrics, on every host: the first may be lost before it has written one.

    Attributes:
        awaiting: the line after these, of which callbacks are told once its step is validated.
    """

    def __init__(self, apart: int = 1):
        """Begin with none; hosts are so many iterations `apart` at most."""
        self.awaiting: Mapping[str, Any] | None = None
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=LINES_KEPT + apart)

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Keep the line."""
        self.lines.append(metrics)

    @property
    def last_loss(self) -> float | None:
        """That of the last line; None if there is none, or it is no finite number."""
        last = self.awaiting or (self.lines[-1] if self.lines else None)
        return None if last is None else last["loss"]

    def forget(self, after: int) -> None:
        """Forget what was told of the steps after one, which come again."""
        counting = [line for line in self.lines if line["step"] <= after]
        self.lines = deque(counting, maxlen=self.lines.maxlen)
        if self.awaiting is not None and self.awaiting["step"] > after:
            self.awaiting = None

    def told(self) -> list[Mapping[str, Any]]:
        """The lines, as others hear them."""
        return [*self.lines] if self.awaiting is None else [*self.lines, self.awaiting]

    def hear(self, told: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Go on with the lines of whoever is furthest."""
        most = max(told, key=lambda lines: lines[-1]["step"] if lines else 0)
        self.lines, self.awaiting = deque(most, maxlen=self.lines.maxlen), None

    def write_the_missing(self, folder: Path) -> None:
        """Add those that a host which was lost has not written."""
        written = retried(folder, lambda: run_folder.last_step(folder))
        for line in (dict(line) for line in self.lines if line["step"] > written):
            retried(folder, lambda line=line: run_folder.append_metrics(folder, line))
        if self.awaiting is not None and self.awaiting["step"] <= written:
            self.awaiting = None  # The host that was lost has validated the step.


class BestCheckpoint(Callback):
    """Of the checkpoints of a run, the one with the lowest held-out loss, which is not removed.

    Its step and loss are in best.json. Only a step that is validated and saved can be the best.
    """

    def __init__(self, writer: CheckpointWriter, folder: Path):
        """Find the best of those that are there in the folder of a run."""
        self.writer = writer
        self.folder = folder
        self.loss = math.inf
        self.validated: tuple[int, float | None] | None = None
        for step, loss in retried(folder, self._saved):
            self.consider(step, loss)

    def _saved(self) -> list[tuple[int, float | None]]:
        """The steps that have a checkpoint and metrics, and the losses of those that have one."""
        # A run that goes on from an earlier step takes later ones anew.
        (self.folder / run_folder.BEST).unlink(missing_ok=True)
        lines = {
            step: run_folder.metrics_of(self.folder, step) for step in saved_steps(self.folder)
        }
        return [(step, line.get("validation_loss")) for step, line in lines.items() if line]

    def after_validation(self, trainer: Trainer, step: int, loss: float | None) -> None:
        """Note the loss, should the step be saved."""
        self.validated = step, loss

    def after_save(self, trainer: Trainer, step: int) -> None:
        """Consider a step that was validated."""
        if self.validated is not None and self.validated[0] == step:
            self.consider(*self.validated)

    def consider(self, step: int, loss: float | None) -> None:
        """Hold on to the checkpoint of `step` if its loss, where one is known, is the lowest."""
        if loss is not None and loss < self.loss:
            self.loss = loss
            self.writer.protect(step)
            retried(self.folder, lambda: run_folder.write_best(self.folder, step, loss))


class RecordingsDrawn(Callback):
    """Draws the iterations that all hosts have recorded, at the end of a run; on every host."""

    def end(self, trainer: Trainer) -> None:
        """Draw on host 0, when the others have written what they recorded."""
        host = trainer.host
        barrier(host, "recordings", trainer.config.cluster.connect_timeout_s)
        if host.index == 0:
            draw_recorded(trainer.folder)
