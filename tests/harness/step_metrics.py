"""Metrics of a step, of which a test says what it is about."""

from __future__ import annotations

from typing import Any

from skippipe_jax.storage.records import StepMetrics


def metrics_of(step: int, loss: float | None = 2.5, **more: Any) -> StepMetrics:
    """Of an iteration that took a second, without compilation."""
    given = {"tokens_per_second": 100.0, "seconds_per_iteration": 1.0, "compilations": 0} | more
    return StepMetrics(step=step, loss=loss, **given)
