"""The metrics of a run as the arrays that its page shows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from skippipe_sched import fields

from skippipe_jax.storage.run_folder import METRICS, read_metrics

# Of the links and of the idle shares, a page shows the median over so many last iterations.
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
"""Of an iteration. A loss is NaN where it was no finite number or, if held out, not computed; the
generation is 0 where hosts have none."""


@dataclass(frozen=True, eq=False)
class Metrics:
    """The `FIGURES` of every iteration, one record each, and the last lines of metrics whole."""

    figures: np.ndarray
    recent: Sequence[Mapping[str, Any]]

    def of(self, chosen: Sequence[bool]) -> Metrics:
        """The metrics of the chosen iterations alone."""
        lines = zip(self.recent, chosen[len(chosen) - len(self.recent) :], strict=True)
        recent = tuple(line for line, is_chosen in lines if is_chosen)
        return Metrics(self.figures[np.array(chosen, bool)], recent)

    @property
    def settled(self) -> np.ndarray:
        """The iterations that tell how fast the run is: those without compilation, if any."""
        compiled = self.figures["compiled"]
        return self.figures if compiled.all() else self.figures[~compiled]

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
    """Read the metrics of a run; a line that a crash cut short is left out.

    Raises:
        InputError: naming the line that is damaged.
    """
    rows: list[tuple[Any, ...]] = []
    recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
    for number, line in enumerate(read_metrics(folder), start=1):
        rows.append(_row(line, f"{METRICS}, line {number}, "))
        recent.append(line)
    return Metrics(np.array(rows, FIGURES), tuple(recent))


def _row(line: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """The figures of an iteration, in the order of `FIGURES`."""
    seconds, speed = "seconds_per_iteration", "tokens_per_second"
    return (
        fields.integer(line.get("step"), f"{where}step", 0, 2**53),
        # Only null says that the loss was no finite number.
        _number_or_nan(line.get("loss", "nothing"), f"{where}loss"),
        _number_or_nan(line.get("validation_loss"), f"{where}validation_loss"),
        fields.number(line.get(seconds), where + seconds, 0.0, above=True),
        fields.number(line.get(speed), where + speed, 0.0),
        fields.integer(line.get("compilations"), f"{where}compilations", 0) > 0,
        line.get("network") == "emulate",
        fields.integer(line.get("generation") or 0, f"{where}generation", 0, 2**53),
    )


def _number_or_nan(value: Any, field: str) -> float:
    return math.nan if value is None else fields.number(value, field)
