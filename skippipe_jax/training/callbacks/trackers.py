"""Experiment trackers: TensorBoard, Weights & Biases."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from skippipe_sched.errors import InputError

from skippipe_jax import log
from skippipe_jax.config import Config, LogConfig, to_tree
from skippipe_jax.config.extras import require_extra
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView

TENSORBOARD, WANDB_ID = "tensorboard", "wandb_id"


class Tracker(Callback, ABC):
    """Abstract tracker of the metrics and validation losses of a run."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Log every number of a step."""
        self.log(metrics.step, dict(flatten_scalars(msgspec.to_builtins(metrics))))

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Log a validation loss."""
        if loss is not None:
            self.log(step, {"validation_loss": loss})

    @abstractmethod
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log numbers of a step by name."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close the tracker."""


def require_trackers(config: LogConfig) -> None:
    """Check that the packages of the configured trackers are installed.

    Raises:
        InputError: if one is not installed, with the command that installs it.
    """
    for name, value, package in (
        ("tensorboard", config.tensorboard, "tensorboardX"),
        ("wandb", config.wandb, "wandb"),
    ):
        if value:
            require_extra(package, name, f"log.{name}", value)


def trackers_of_leader(config: Config, folder: Path, step: int, *, is_new: bool) -> list[Tracker]:
    """Open the trackers that `config.log` names, for a run in `folder` that continues after `step`.

    Warns and returns [] if a leader that `is_new` cannot open them.

    Raises:
        InputError: if the first leader cannot open them.
    """
    trackers: list[Tracker] = []
    try:
        require_trackers(config.log)
        if config.log.tensorboard:
            trackers.append(TensorBoard(folder / TENSORBOARD, step))
        if config.log.wandb is not None:
            trackers.append(WeightsAndBiases(config.log.wandb, config, folder))
        return trackers
    except InputError as error:
        if not is_new:
            raise
        log.warning(f"{error}; metrics are not sent to trackers")
        return []


class TensorBoard(Tracker):
    """Tracker that writes event files for TensorBoard."""

    def __init__(self, folder: Path, step: int):
        """Open event files in `folder`, and discard events of steps after `step`."""
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write a scalar for every number."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self.writer.close()


class WeightsAndBiases(Tracker):
    """Tracker on Weights & Biases. With WANDB_MODE=offline it writes to the run folder."""

    def __init__(self, project: str, config: Config, folder: Path):
        """Start a run on Weights & Biases, or continue the one of this run folder.

        Weights & Biases ignores steps that it has already received, which a resumed run repeats.
        """
        import wandb
        from wandb.errors import Error

        path = folder / WANDB_ID
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:12])
        try:
            self.run = wandb.init(
                project=project,
                id=path.read_text(),
                resume="allow",
                name=folder.resolve().name,
                dir=folder,
                config=to_tree(config),
            )
        except Error as error:
            raise InputError(
                "log.wandb",
                project,
                f"Weights & Biases rejected the run: {error}",
                "Log in with `wandb login`, or set WANDB_MODE=offline",
            ) from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log every number."""
        self.run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Send pending data and end the run."""
        self.run.finish()


def flatten_scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every number of a line by name; an entry of a list or mapping is named `name/entry`."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from flatten_scalars({f"{name}/{key}": entry for key, entry in value.items()})
        elif isinstance(value, list):
            yield from flatten_scalars({f"{name}/{at}": entry for at, entry in enumerate(value)})
        elif isinstance(value, int | float):
            yield name, value
