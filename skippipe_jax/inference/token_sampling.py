"""Tokens are drawn from logits, a row for each slot, and scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped, UInt

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.inference.decode_requests import MAX_TOP_TOKENS, ScoredToken

# Below this every draw is the likeliest token, and the logits over it would not stay finite.
LEAST_TEMPERATURE = 1e-6


class SamplingRows(NamedTuple):
    """Sampling parameters of each slot, as in `Sampling`; set in place."""

    keys: UInt[np.ndarray, "slot _"]
    temperatures: Float[np.ndarray, " slot"]
    top_p: Float[np.ndarray, " slot"]
    top_k: Int[np.ndarray, " slot"]
    min_p: Float[np.ndarray, " slot"]

    @classmethod
    def empty(cls, slots: int) -> SamplingRows:
        """Return rows that always take the likeliest token."""
        zeros = np.zeros(slots, np.float32)
        keys, top_k = np.stack([_key_data(0)] * slots), np.zeros(slots, np.int32)
        return cls(keys, zeros, np.ones(slots, np.float32), top_k, zeros.copy())

    def set(self, slot: int, sampling: Sampling) -> None:
        """Draw the tokens of a slot so from now on."""
        self.keys[slot] = _key_data(sampling.seed)
        self.temperatures[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot], self.min_p[slot] = min(sampling.top_k, _MOST_TOKENS), sampling.min_p


_MOST_TOKENS = np.iinfo(np.int32).max


def _key_data(seed: int) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


class Penalties(NamedTuple):
    """Token counts and penalties of each slot; set in place."""

    counts: Int[np.ndarray, "slot vocabulary"]
    in_prompt: Bool[np.ndarray, "slot vocabulary"]
    presence: Float[np.ndarray, " slot"]
    frequency: Float[np.ndarray, " slot"]
    repetition: Float[np.ndarray, " slot"]

    @classmethod
    def empty(cls, slots: int, vocabulary_size: int) -> Penalties:
        """Return rows that punish nothing."""
        shape, zeros = (slots, vocabulary_size), np.zeros(slots, np.float32)
        ones = np.ones(slots, np.float32)
        return cls(np.zeros(shape, np.int32), np.zeros(shape, bool), zeros, zeros.copy(), ones)

    def set(self, slot: int, sampling: Sampling, prompt: Sequence[int]) -> None:
        """Begin a sequence in a slot."""
        self.counts[slot], self.in_prompt[slot] = 0, False
        self.in_prompt[slot, np.asarray(prompt)] = True
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty


@jax.jit
def penalized(
    logits: Float[Array, "slot vocabulary"],
    counts: Int[Array, "slot vocabulary"],
    in_prompt: Bool[Array, "slot vocabulary"],
    presence: Float[Array, " slot"],
    frequency: Float[Array, " slot"],
    repetition: Float[Array, " slot"],
) -> Float[Array, "slot vocabulary"]:
    """Return the logits with what `Penalties` says taken from them."""
    factor = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(in_prompt | (counts > 0), repeated, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


@jax.jit
def sample_tokens(
    logits: Float[Array, "slot vocabulary"],
    positions: Int[Array, " slot"],
    keys: UInt[Array, "slot _"],
    temperatures: Float[Array, " slot"],
    top_p: Float[Array, " slot"],
    top_k: Int[Array, " slot"],
    min_p: Float[Array, " slot"],
) -> Int[Array, " slot"]:
    """Draw one token of each slot, by the key of its seed and the position of the token before."""

    def drawn() -> Array:
        row_keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), positions)
        return sample(logits, row_keys, temperatures, top_p, top_k, min_p)

    # Most often the likeliest tokens are asked for, and nothing need be sorted.
    likeliest = lambda: jnp.argmax(logits, axis=-1)  # noqa: E731
    return jax.lax.cond(jnp.any(temperatures > 0), drawn, likeliest)


def sample(
    logits: Float[Array, "batch vocabulary"],
    keys: Shaped[PRNGKeyArray, " batch"],
    temperatures: Float[Array, " batch"],
    top_p: Float[Array, " batch"],
    top_k: Int[Array, " batch"],
    min_p: Float[Array, " batch"],
) -> Int[Array, " batch"]:
    """Draw one token of each row as `Sampling` says."""
    scaled = logits / jnp.maximum(temperatures, LEAST_TEMPERATURE)[:, None]
    descending = jnp.sort(scaled, axis=-1, descending=True)
    chances = jax.nn.softmax(descending, axis=-1)
    limit = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None]
    is_candidate = jnp.arange(logits.shape[-1]) < limit
    is_candidate &= chances >= min_p[:, None] * chances[:, :1]
    chances = jnp.where(is_candidate, chances, 0.0)
    chances /= chances.sum(axis=-1, keepdims=True)
    is_needed = (jnp.cumsum(chances, axis=-1) - chances < top_p[:, None]) & is_candidate
    # By rounding, even the likeliest may seem not to be needed for a tiny `top_p`.
    least = jnp.min(jnp.where(is_needed, descending, descending[:, :1]), axis=-1, keepdims=True)
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(scaled >= least, scaled, -jnp.inf))
    return jnp.where(temperatures > 0, drawn, jnp.argmax(logits, axis=-1))


class TokenScores(NamedTuple):
    """Log-probabilities in nats: of tokens, and of the likeliest in their places, with these."""

    of_tokens: Float[Array, "*place"]
    of_likeliest: Float[Array, "*place likeliest"]
    likeliest: Int[Array, "*place likeliest"]

    def tokens(
        self, own: Sequence[int] | np.ndarray, counts: Sequence[int | None]
    ) -> list[ScoredToken]:
        """Return the tokens of a row of places with so many of the likeliest ones for each."""
        of_tokens, of_likeliest, likeliest = (np.asarray(part) for part in self)
        return [
            ScoredToken(int(token))
            if count is None
            else ScoredToken(
                int(token),
                float(of_tokens[place]),
                tuple(
                    zip(
                        likeliest[place, :count].tolist(),
                        of_likeliest[place, :count].tolist(),
                        strict=True,
                    )
                ),
            )
            for place, (token, count) in enumerate(zip(own, counts, strict=True))
        ]


@jax.jit
def score_tokens(
    logits: Float[Array, "*place vocabulary"], tokens: Int[Array, "*place"]
) -> TokenScores:
    """Score tokens, and the likeliest ones in their places."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_p = jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
    return TokenScores(log_p, *jax.lax.top_k(logs, min(MAX_TOP_TOKENS, logs.shape[-1])))
