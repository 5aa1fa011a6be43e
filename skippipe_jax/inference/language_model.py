"""Interfaces that evaluation, generation and the harness need from a model or an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float

from skippipe_jax.data.batches import Batch
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.decoding import Decoder


class Scorer(Protocol):
    """A model that says how likely each next token of a text is."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        ...

    @property
    def context(self) -> int:
        """Most tokens in a sequence."""
        ...

    def log_probabilities(self, batch: Batch) -> Float[np.ndarray, "sequence position"]:
        """Return the log-probability of each target in nats; 0 where it is not counted."""
        ...


class PartialScorer(Protocol):
    """A model that says so by all of its stages or by some, in any order that it can run."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        ...

    def log_probabilities(
        self, batch: Batch, order: Sequence[int] | None = None
    ) -> Float[np.ndarray, "sequence position"]:
        """Return the same as a `Scorer`; `order` names the stages, by default the model's own."""
        ...


class LanguageModel(Scorer, Protocol):
    """A model that also goes on with a text, and knows what is the likeliest."""

    def likelihoods(
        self, batch: Batch
    ) -> tuple[Float[np.ndarray, " sequence"], Bool[np.ndarray, " sequence"]]:
        """Log-likelihood in nats of each sequence's targets, and whether each is the likeliest."""
        ...

    def decoder(self, slots: int, length: int) -> Decoder:
        """Return what a `Generator` draws tokens with: `slots` sequences of `length` positions."""
        ...
