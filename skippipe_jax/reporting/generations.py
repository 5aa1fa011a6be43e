"""The generations of a run, each with what its plan predicts beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from skippipe_sched import fields

from skippipe_jax.reporting.metrics import Metrics
from skippipe_jax.storage.run_folder import MEMBERSHIP


class Iterations(NamedTuple):
    """How long the iterations of a generation take [s]; None where nobody has noted it.

    Attributes:
        predicted_s: by its plan.
        measured_s: the median over those that compiled nothing, if any.
    """

    predicted_s: float | None
    measured_s: float | None

    @property
    def difference(self) -> str:
        """By what share longer they take than the plan says."""
        if not self.predicted_s or self.measured_s is None:
            return ""
        return f"{self.measured_s / self.predicted_s - 1.0:+.0%}"


def iterations(generation: Mapping[str, Any], metrics: Metrics) -> Iterations:
    """How long the iterations of a line of membership.jsonl take."""
    field = f"{MEMBERSHIP}, predicted_seconds"
    noted = generation.get("predicted_seconds")
    predicted_s = None if noted is None else fields.number(noted, field, 0.0)
    own = metrics.figures["generation"] == generation["generation"]
    settled = own & ~metrics.figures["compiled"]
    seconds = metrics.figures["seconds"][settled if settled.any() else own]
    return Iterations(predicted_s, float(np.median(seconds)) if len(seconds) else None)


def with_iterations(
    generations: Sequence[Mapping[str, Any]], metrics: Metrics
) -> list[tuple[Mapping[str, Any], Iterations]]:
    """Each line of membership.jsonl, and how long its iterations take."""
    return [(generation, iterations(generation, metrics)) for generation in generations]
