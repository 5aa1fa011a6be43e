"""Settings of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skippipe_jax.config.choices import (
    NonNegative,
    Positive,
    Real,
    Seed,
    Whole,
    bounds_of,
    require_within,
)

Penalty = Annotated[float, Real(-2.0, most=2.0)]
OPTIONS = ("temperature", "top_p", "seed")
"""Keys that are options of commands, by which errors name them."""
DEFAULT_SLOTS = 16
"""Default number of sequences that are scored or generated together."""


@dataclass(frozen=True)
class Sampling:
    """Rule for drawing a token from the most likely ones that make up `top_p`.

    Attributes:
        temperature: divisor of the logits; 0 always selects the most likely token.
        top_p: cumulative probability of the most likely tokens to draw from, after `top_k` and
            `min_p`.
        seed: seed of all draws.
        top_k: number of most likely tokens to draw from; 0 is all.
        min_p: minimum probability of a token, relative to that of the most likely one.
        presence_penalty: subtracted from the logits of tokens that were drawn before.
        frequency_penalty: subtracted once for each time that a token was drawn.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens
            that are in the prompt or were drawn.
    """

    temperature: NonNegative = 0.8
    top_p: Annotated[float, Real(above=True, most=1.0)] = 0.95
    seed: Seed = 0
    top_k: Annotated[int, Whole(0)] = 0
    min_p: Annotated[float, Real(most=1.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Positive = 1.0

    def __post_init__(self):
        """Reject values that leave nothing to draw."""
        for key, bounds in bounds_of(Sampling).items():
            name = f"--{key.replace('_', '-')}" if key in OPTIONS else key
            require_within(getattr(self, key), name, bounds)

    @property
    def has_penalties(self) -> bool:
        """True if a draw depends on earlier tokens in other ways than by the model."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)
