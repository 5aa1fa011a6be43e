"""Settings of generation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippipe_sched import fields
from skippipe_sched.errors import InputError

MOST_PENALTY = 2.0
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

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        """Reject values that leave nothing to draw."""
        fields.number(self.temperature, "--temperature", 0.0)
        fields.integer(self.seed, "--seed", 0, fields.MAX_SEED)
        if not 0 < self.top_p <= 1:
            problem, remedy = "must be greater than 0 and at most 1", "Write a number such as 0.95"
            raise InputError("--top-p", self.top_p, problem, remedy)
        fields.integer(self.top_k, "top_k", 0)
        if not 0 <= self.min_p <= 1:
            problem, remedy = "must be from 0 to 1", "Write a number such as 0.05"
            raise InputError("min_p", self.min_p, problem, remedy)
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(value := getattr(self, name)) <= MOST_PENALTY:
                raise InputError(
                    name, value, "must be from -2 to 2", "Write a number in this range"
                )
        if not 0 < self.repetition_penalty < math.inf:
            problem, remedy = "must be greater than 0", "Write a finite number; 1 has no effect"
            raise InputError("repetition_penalty", self.repetition_penalty, problem, remedy)

    @property
    def has_penalties(self) -> bool:
        """True if a draw depends on earlier tokens in other ways than by the model."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)
