"""Requests to a decoder, and its results, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.inference.partial import StageOrder

MAX_TOP_TOKENS = 20
"""Largest number of likeliest tokens that a request may ask for at each position."""


@dataclass(frozen=True)
class DecodeRequest:
    """A sequence that is asked for.

    Attributes:
        prompt: at least one token.
        max_new_tokens: how many may come after it; with 0 the prompt is only scored.
        sampling: how these are drawn.
        ends: tokens behind which none is drawn.
        stages: those that run, increasing, the data stage first; None is all of them.
        likeliest: how many of the likeliest tokens come with each; None asks for no probabilities.
        scores_prompt: whether the tokens of the prompt but the first are scored too.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    ends: frozenset[int] = frozenset()
    stages: StageOrder | None = None
    likeliest: int | None = None
    scores_prompt: bool = False


class ScoredToken(NamedTuple):
    """A token with its log-probability in nats, and the likeliest tokens in its place with theirs.

    They are those of the model, before temperature and penalties; None was not asked for.
    """

    token: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Decoded(NamedTuple):
    """Result of a step for a request: a drawn token, the scores of its prompt, or both.

    Attributes:
        request: its number.
        is_last: whether nothing more comes; a token of `ends` is drawn too.
        drawn: the token.
        prompt: the tokens of the prompt but the first, where scores were asked for.
        stages: those that have run for all tokens so far; None if several models ran.
    """

    request: int
    is_last: bool
    drawn: ScoredToken | None = None
    prompt: tuple[ScoredToken, ...] = ()
    stages: StageOrder | None = None
