"""Validation losses by domain: of one model, and of several, each alone and all together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from skippipe_sched.errors import InputError
from skippipe_sched.figures.tables import aligned

from skippipe_jax.config import DataConfig
from skippipe_jax.config.data import FOR_PRIORS, FOR_SCORES
from skippipe_jax.ensemble import CACHED, DECAY
from skippipe_jax.inference.ensemble import Ensemble
from skippipe_jax.inference.evaluation import MAX_LOSS_NATS
from skippipe_jax.inference.scores import (
    Scorer,
    Scores,
    log_prior_of,
    require_same_text,
    score,
    scores_of_mixture,
)

PRIOR_SEQUENCES = 100
"""Sequences on which the cached prior of a domain is estimated, as in the paper."""


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
        part = "" if self.part == "all" else f" ({self.part})"
        return aligned([[f"domain{part}", "loss", "perplexity", "tokens"], *_rows([self])])


def _rows(losses: Sequence[DomainLosses]) -> list[list[str]]:
    """Return a row for each domain, then for both means: all losses, then figures of the last."""
    last = losses[-1]
    rows = []
    for name, own in last.domains.items():
        each = [f"{of.domains[name].loss:.4f}" for of in losses]
        rows.append([name, *each, f"{own.perplexity:.3f}", f"{own.tokens:,}"])
    tokens = sum(own.tokens for own in last.domains.values())
    for mean, over in (("macro", ""), ("micro", f"{tokens:,}")):
        means = [getattr(of, mean) for of in losses]
        each = [f"{one:.4f}" for one in means]
        rows.append([f"{mean} mean", *each, f"{math.exp(means[-1]):.3f}", over])
    return rows


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


@dataclass(frozen=True)
class EnsembleEvaluation:
    """Losses of the experts, by their names, and of their ensemble, by domain.

    Attributes:
        steps: of each expert's checkpoint, None where it has none.
        prior: which prior was taken.
        weights: by domain, the prior as probabilities; none where it changed from sequence to
            sequence.
    """

    experts: Mapping[str, DomainLosses]
    steps: Sequence[int | None]
    ensemble: DomainLosses
    mix: str
    prior: str
    weights: Mapping[str, Float[np.ndarray, " expert"]]

    def to_json(self) -> dict[str, Any]:
        """Return the losses of each expert and of the ensemble; `prior` is the mean over domains.

        It is what a file that is given as --prior holds, in the order of the experts.
        """
        experts = zip(self.experts.items(), self.steps, strict=True)
        result: dict[str, Any] = {
            "mix": self.mix,
            "kind_of_prior": self.prior,
            "experts": [{"run": name, "step": step} | of.to_json() for (name, of), step in experts],
            "ensemble": self.ensemble.to_json(),
        }
        if self.weights:
            result["prior"] = np.mean([*self.weights.values()], axis=0).tolist()
            result["priors"] = {name: weights.tolist() for name, weights in self.weights.items()}
        return result

    def table(self) -> str:
        """Return a table: a line for each expert's name, then one for each domain and each mean."""
        losses = [*self.experts.values(), self.ensemble]
        lines = [
            f"{number}: {name}" + ("" if step is None else f", step {step}")
            for number, (name, step) in enumerate(zip(self.experts, self.steps, strict=True), 1)
        ]
        lines.append(
            f"validation loss in nats per token of each model, and mixed by {self.mix} "
            f"({self.prior} prior)"
        )
        numbers = map(str, range(1, len(losses)))
        shown = "prior" if self.weights else ""
        rows = _rows(losses)
        if len(self.ensemble.domains) == 1:
            rows = rows[:1]
        for row in rows:
            row.append(" ".join(f"{weight:.3f}" for weight in self.weights.get(row[0], ())))
        titles = ["domain", *numbers, "mixed", "perplexity", "tokens", shown]
        return "\n".join([*lines, aligned([titles, *rows])])


def evaluate_ensemble(
    ensemble: Ensemble,
    steps: Sequence[int | None],
    data: DataConfig,
    sequences: int,
    prior: str,
) -> EnsembleEvaluation:
    """Evaluate models alone and together, on at most so many sequences of the part for scores.

    `prior` is uniform; updated from sequence to sequence of a domain; cached, estimated for each
    domain on its part for priors; or else that of the ensemble.

    Raises:
        InputError: as `score` does, or if a loss is not finite.
    """
    alone: dict[str, dict[str, DomainLoss]] = {name: {} for name in ensemble.names}
    together, weights = {}, {}
    for domain in data.domains():
        log_prior = _log_prior(ensemble, data, domain, prior)
        if log_prior is not None:
            weights[domain] = np.exp(log_prior - np.logaddexp.reduce(log_prior))
        each = _scores(ensemble, data, domain, FOR_SCORES, sequences)
        for name, scores in each.items():
            alone[name][domain] = domain_loss(scores)
        kind = DECAY if log_prior is None else CACHED
        mixed = scores_of_mixture([*each.values()], kind, ensemble.mix, log_prior)
        together[domain] = domain_loss(mixed)
    return EnsembleEvaluation(
        {name: DomainLosses(FOR_SCORES, losses) for name, losses in alone.items()},
        steps,
        DomainLosses(FOR_SCORES, together),
        ensemble.mix,
        prior,
        weights,
    )


def _scores(
    ensemble: Ensemble, data: DataConfig, domain: str, part: str, sequences: int
) -> dict[str, Scores]:
    """Return the scores of each expert."""
    both = zip(ensemble.names, ensemble.experts, strict=True)
    scores = {name: score(expert, data, domain, part, sequences) for name, expert in both}
    require_same_text(scores)
    return scores


def _log_prior(
    ensemble: Ensemble, data: DataConfig, domain: str, prior: str
) -> Float[np.ndarray, " expert"] | None:
    """Return the prior of a domain; None where each sequence has another."""
    if prior == DECAY:
        return None
    if prior != CACHED:
        return ensemble.log_prior
    scores = _scores(ensemble, data, domain, FOR_PRIORS, PRIOR_SEQUENCES)
    return log_prior_of([*scores.values()])
