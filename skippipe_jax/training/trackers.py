"""Where the metrics of a run go besides metrics.jsonl: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, LogConfig, to_tree
from skippipe_jax.training.callback import Callback

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer

TENSORBOARD, WANDB_ID = "tensorboard", "wandb_id"


class Tracker(Callback, ABC):
    """Gets the metrics of a run."""

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Take the metrics."""
        self.write(metrics)

    @abstractmethod
    def write(self, line: Mapping[str, Any]) -> None:
        """Take the metrics of one iteration, as they stand in metrics.jsonl."""

    @abstractmethod
    def close(self) -> None:
        """Bring what was taken to where it belongs."""


def require_trackers(config: LogConfig) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        InputError: that says how to install them.
    """
    for name, value, package in (
        ("tensorboard", config.tensorboard, "tensorboardX"),
        ("wandb", config.wandb, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise InputError(
                f"log.{name}",
                value,
                f"needs the package {package}",
                f'Install it, in a clone of the repository: pip install -e ".[{name}]"',
            )


def open_trackers(config: Config, folder: Path, step: int) -> list[Tracker]:
    """The trackers that `config.log` asks for, of a run in `folder` that goes on after `step`.

    Raises:
        InputError: if Weights & Biases does not take the run.
    """
    trackers: list[Tracker] = []
    if config.log.tensorboard:
        trackers.append(TensorBoard(folder / TENSORBOARD, step))
    if config.log.wandb is not None:
        trackers.append(WeightsAndBiases(config.log.wandb, config, folder))
    return trackers


class TensorBoard(Tracker):
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, step: int):
        """Write into `folder`; what is there of later steps than `step` no longer counts."""
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a scalar for every number of the line."""
        for name, value in numbers(line):
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write what is held back."""
        self.writer.close()


class WeightsAndBiases(Tracker):
    """A run on Weights & Biases. With WANDB_MODE=offline it is kept in the run folder."""

    def __init__(self, project: str, config: Config, folder: Path):
        """Begin a run there, or go on with that of this run folder.

        Steps that it has seen already are left out there: a run that is resumed repeats them.
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
                f"Weights & Biases does not take the run: {error}",
                "Log in with `wandb login`, or set WANDB_MODE=offline",
            ) from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Log every number of the line."""
        self.run.log(dict(numbers(line)), step=line["step"])

    def close(self) -> None:
        """Send what is held back."""
        self.run.finish()


def numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every number of a line by its name; those of a list or mapping by `name/place`."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers({f"{name}/{key}": entry for key, entry in value.items()})
        elif isinstance(value, list):
            yield from numbers({f"{name}/{place}": entry for place, entry in enumerate(value)})
        elif isinstance(value, int | float):
            yield name, value
