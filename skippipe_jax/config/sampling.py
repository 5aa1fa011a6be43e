"""What a generation is told."""

from __future__ import annotations

from dataclasses import dataclass

from skippipe_sched import fields
from skippipe_sched.errors import InputError

DEFAULT_SLOTS = 16
"""Sequences that are scored or generated together where nothing is said of it."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from the likeliest ones that make up `top_p` of the probability.

    `temperature` divides the logits; 0 always takes the likeliest token.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self):
        """Refuse what draws nothing."""
        fields.number(self.temperature, "--temperature", 0.0)
        fields.integer(self.seed, "--seed", 0, fields.LARGEST_SEED)
        if not 0 < self.top_p <= 1:
            raise InputError(
                "--top-p", self.top_p, "is no share of the probability", "Write one such as 0.95"
            )
