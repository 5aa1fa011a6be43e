"""What a generation is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippipe_sched import fields
from skippipe_sched.errors import InputError

MOST_PENALTY = 2.0
DEFAULT_SLOTS = 16
"""Sequences that are scored or generated together where nothing is said of it."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: from the likeliest ones that make up `top_p` of the probability.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_p: the share of the probability that the likeliest tokens make up, of those that
            `top_k` and `min_p` leave.
        seed: of all draws.
        top_k: only so many of the likeliest tokens are drawn; 0 is all.
        min_p: only tokens are drawn that have at least this share of the likeliest one's
            probability.
        presence_penalty: is subtracted from the logits of tokens that were drawn before.
        frequency_penalty: is subtracted once for each time that they were drawn.
        repetition_penalty: divides the logits above 0 of tokens that the prompt has, or that were
            drawn, and multiplies those below 0.
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
        """Refuse what draws nothing."""
        fields.number(self.temperature, "--temperature", 0.0)
        fields.integer(self.seed, "--seed", 0, fields.LARGEST_SEED)
        if not 0 < self.top_p <= 1:
            raise InputError(
                "--top-p", self.top_p, "is no share of the probability", "Write one such as 0.95"
            )
        fields.integer(self.top_k, "top_k", 0)
        if not 0 <= self.min_p <= 1:
            raise InputError("min_p", self.min_p, "is no share", "Write one such as 0.05")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(value := getattr(self, name)) <= MOST_PENALTY:
                raise InputError(name, value, "is out of range", "Write one from -2 to 2")
        if not 0 < self.repetition_penalty < math.inf:
            remedy = "Write a number above 0; 1 changes nothing"
            raise InputError("repetition_penalty", self.repetition_penalty, "divides", remedy)

    @property
    def has_penalties(self) -> bool:
        """Tell whether a draw depends on the tokens before it other than by the model."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)
