"""How sure a mean over seeds is: its 95% interval.

What is compared is paired by seed: an arm's loss minus its control's of the same seed, which begins
with the same weights as far as the model is the same. The interval is Student's, of the mean of
these differences. Two seeds say next to nothing of how far differences scatter, so arms with fewer
than `OWN_SEEDS` get the deviation pooled over all arms that stand beside them: those are taken to
scatter alike. They share the runs of their control, so pooling knows a little less than it counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

LEVEL = 0.95
# So many seeds have a deviation of their own.
OWN_SEEDS = 3
DIGITS = 5
Losses = dict[str, list[float]]
"""Held-out losses of the seeds of each arm [nats per byte]."""
HOW = (
    f"mean over seeds with its {LEVEL:.0%} interval by Student's t; differences are paired by "
    f"seed; pooled: of fewer than {OWN_SEEDS} seeds, so by the deviation pooled over all arms "
    "that are compared with the same control"
)


def paired(arm: Sequence[float], control: Sequence[float]) -> list[float]:
    """The differences of an arm from its control over the first seeds, which both have."""
    return [own - other for own, other in zip(arm, control, strict=False)]


def figures(arms: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Compute the interval of each arm's mean, from its value for each seed, as it is written.

    An interval has the `mean`; its ends `low` and `high`, None where no arm has more than one seed;
    how many `seeds` there are; and whether the deviation is `pooled`, that of all arms together.
    """
    squares = {arm: float(np.var(values)) * len(values) for arm, values in arms.items()}
    degrees = {arm: len(values) - 1 for arm, values in arms.items()}

    def interval(arm: str, values: Sequence[float]) -> dict[str, Any]:
        pooled = len(values) < OWN_SEEDS
        beside = arms if pooled else [arm]
        freedom = sum(degrees[name] for name in beside)
        mean, low, high = float(np.mean(values)), None, None
        if freedom:
            deviation = math.sqrt(sum(squares[name] for name in beside) / freedom)
            quantile = float(student.ppf((1 + LEVEL) / 2, freedom))
            half = quantile * deviation / math.sqrt(len(values))
            low, high = round(mean - half, DIGITS), round(mean + half, DIGITS)
        ends = {"mean": round(mean, DIGITS), "low": low, "high": high}
        return ends | {"seeds": len(values), "pooled": pooled}

    return {arm: interval(arm, values) for arm, values in arms.items()}


def minus(arms: Mapping[str, Sequence[float]], control: Sequence[float]) -> dict[str, Any]:
    """The intervals of arms minus one control, paired by seed, as they are written."""
    return figures({arm: paired(own, control) for arm, own in arms.items()})


def by_seed(differences: Sequence[float]) -> str:
    """Differences as a table shows them, seed after seed."""
    return " ".join(f"{own:+.4f}" for own in differences)


def with_ends(found: Mapping[str, Any]) -> str:
    """A mean as a table shows it, with the ends of its interval if it has one, from `figures`."""
    ends = "" if found["low"] is None else f" ({found['low']:+.4f} to {found['high']:+.4f})"
    return f"{found['mean']:+.4f}{ends}"


def line(
    name: str, arm: Sequence[float], control: Sequence[float], found: Mapping[str, Any]
) -> str:
    """Write the line of an arm in a table: its differences from a control, and their interval."""
    return f"{name:8s} {by_seed(paired(arm, control))}: {with_ends(found)}"
