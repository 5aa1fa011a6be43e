"""Metrics of a run, as the arrays that its page shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.storage.run_dir import RunDir

# Number of last iterations over which a page shows medians of links and idle shares.
RECENT = 100

FIGURES = np.dtype(
    [
        ("step", int),
        ("loss", float),
        ("held_out", float),
        ("seconds", float),
        ("tokens_per_second", float),
        ("compiled", bool),
        ("emulated", bool),
        ("generation", int),
    ]
)
"""Fields of an iteration. A loss is NaN if it was not finite or, for a validation loss, not
computed; the generation is 0 if hosts have none."""


@dataclass(frozen=True, eq=False)
class Metrics:
    """`FIGURES` of every iteration, one record each, and the complete last lines of the metrics."""

    figures: np.ndarray
    recent: Sequence[StepMetrics]

    def of(self, chosen: Sequence[bool]) -> Metrics:
        """Return the metrics of the chosen iterations."""
        lines = zip(self.recent, chosen[len(chosen) - len(self.recent) :], strict=True)
        recent = tuple(line for line, is_chosen in lines if is_chosen)
        return Metrics(self.figures[np.array(chosen, bool)], recent)

    @property
    def settled(self) -> np.ndarray:
        """Iterations that represent the speed of the run: those without compilation, if any."""
        return _settled(self.figures)

    def seconds_of(self, generation: int) -> float | None:
        """Return the median seconds of a generation's settled iterations, if it has any."""
        figures = self.figures[self.figures["generation"] == generation]
        return float(np.median(_settled(figures)["seconds"])) if figures.size else None

    @property
    def predicted_seconds(self) -> float | None:
        """Median of the plan's seconds per iteration, or None."""
        noted = [line.predicted_seconds for line in self.recent]
        seconds = [value for value in noted if value]
        return float(np.median(seconds)) if seconds else None

    def idle_share(self, nodes: int) -> tuple[int, Float[np.ndarray, " nodes"]] | None:
        """Return the number of recent iterations with idle shares, and each node's median."""
        # Skip iterations under another plan, with another number of nodes.
        noted = [line.idle_share for line in self.recent]
        shares = [of_nodes for of_nodes in noted if of_nodes is not None and len(of_nodes) == nodes]
        return (len(shares), np.median(shares, axis=0)) if shares else None


def load_metrics(folder: Path) -> Metrics:
    """Read the metrics of a run; unreadable lines are skipped with a warning.

    Raises:
        InputError: if the file cannot be read.
    """
    lines = RunDir(folder).metrics()
    return Metrics(np.array([_row(line) for line in lines], FIGURES), tuple(lines[-RECENT:]))


def _settled(figures: np.ndarray) -> np.ndarray:
    compiled = figures["compiled"]
    return figures if compiled.all() else figures[~compiled]


def _row(line: StepMetrics) -> tuple[Any, ...]:
    """Return the figures of a step, in the order of `FIGURES`."""
    return (
        line.step,
        math.nan if line.loss is None else line.loss,
        line.validation_loss or math.nan,
        line.seconds_per_iteration,
        line.tokens_per_second,
        line.compilations > 0,
        line.network == "emulate",
        line.generation or 0,
    )
