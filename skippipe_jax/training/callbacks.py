"""The project's own callbacks: what every run writes and shows, and what its configuration adds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.reporting.timelines import draw_recorded
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import saved_steps
from skippipe_jax.storage.writer import CheckpointWriter
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.progress import ProgressBar
from skippipe_jax.training.trackers import open_trackers

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer


def own_callbacks(
    trainer: Trainer, writer: CheckpointWriter, skipped_updates: int
) -> list[Callback]:
    """What every run has, and what its configuration asks for; most of it on host 0 alone.

    `writer` is that of checkpoints, and so many updates have been skipped before.
    """
    config, folder, step = trainer.config, trainer.folder, trainer.steps_done
    recordings = [] if config.trace == "never" else [RecordingsDrawn()]
    if trainer.host.index != 0:
        return [*recordings]
    return [
        MetricsFile(folder),
        *open_trackers(config, folder, step),
        ProgressBar(config, step, skipped_updates),
        BestCheckpoint(writer, folder),
        *recordings,
    ]


class MetricsFile(Callback):
    """Adds a line to metrics.jsonl after every step."""

    def __init__(self, folder: Path):
        """Write into the folder of a run."""
        self.folder = folder

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Add the line."""
        run_folder.append_metrics(self.folder, dict(metrics))


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
        # A run that goes on from an earlier step takes later ones anew.
        (folder / run_folder.BEST).unlink(missing_ok=True)
        saved = saved_steps(folder)
        for line in run_folder.read_metrics(folder):
            if line["step"] in saved:
                self.consider(line["step"], line.get("validation_loss"))

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
            run_folder.write_best(self.folder, step, loss)


class RecordingsDrawn(Callback):
    """Draws the iterations that all hosts have recorded, at the end of a run; on every host."""

    def end(self, trainer: Trainer) -> None:
        """Draw on host 0, when the others have written what they recorded."""
        host = trainer.host
        barrier(host, "recordings", trainer.config.cluster.connect_timeout_s)
        if host.index == 0:
            draw_recorded(trainer.folder)
