"""The validation loss of a model by domain, and the means over domains and over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from skippipe_sched.errors import InputError
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config import DataConfig
from skippipe_jax.inference.evaluation import MAX_LOSS_NATS
from skippipe_jax.inference.language_model import Scorer
from skippipe_jax.inference.scores import Scores, score


@dataclass(frozen=True)
class DomainLoss:
    """Mean cross-entropy in nats per token, its exponential, and over how many target tokens."""

    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class DomainLosses:
    """The loss of each domain, on one of `HELD_OUT_PARTS`."""

    part: str
    domains: Mapping[str, DomainLoss]

    @property
    def macro(self) -> float:
        """The mean of the domains' losses, each of which counts the same."""
        return float(np.mean([one.loss for one in self.domains.values()]))

    @property
    def micro(self) -> float:
        """The mean loss of all tokens of the domains."""
        each = self.domains.values()
        return float(np.average([one.loss for one in each], weights=[one.tokens for one in each]))

    def to_json(self) -> dict[str, Any]:
        """Return the figures of each domain, and the two means in nats per token."""
        return {
            "part": self.part,
            "domains": {name: asdict(figures) for name, figures in self.domains.items()},
            "macro": self.macro,
            "micro": self.micro,
        }

    def table(self) -> str:
        """Return a table: a line for each domain and each mean."""
        tokens = sum(figures.tokens for figures in self.domains.values())
        rows = [
            [name, f"{figures.loss:.4f}", f"{figures.perplexity:.3f}", f"{figures.tokens:,}"]
            for name, figures in self.domains.items()
        ]
        for name, loss, over in (("macro", self.macro, ""), ("micro", self.micro, f"{tokens:,}")):
            rows.append([f"{name} mean", f"{loss:.4f}", f"{math.exp(loss):.3f}", over])
        part = "" if self.part == "all" else f" ({self.part})"
        return aligned([[f"domain{part}", "loss", "perplexity", "tokens"], *rows])


def evaluate_domains(model: Scorer, data: DataConfig, part: str, sequences: int) -> DomainLosses:
    """Return the loss of each domain, on at most so many held-out sequences of a part of it.

    Raises:
        InputError: as `score` does, or if a loss is not finite.
    """
    return DomainLosses(
        part,
        {name: domain_loss(score(model, data, name, part, sequences)) for name in data.domains()},
    )


def domain_loss(scores: Scores) -> DomainLoss:
    """Return the mean loss of scores.

    Raises:
        InputError: if it is not finite.
    """
    if not scores.loss < MAX_LOSS_NATS:
        raise InputError(
            "domain",
            scores.domain,
            f"the loss is {scores.loss}: training had diverged",
            "Choose an earlier step, or train again with a lower optimizer.learning_rate",
        )
    return DomainLoss(scores.loss, math.exp(scores.loss), scores.tokens)
