"""Mixtures of what experts say, each with a weight. All are in logarithms, and normalised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from skippipe_jax.ensemble.posterior import likeliest


def arithmetic(
    log_p: Float[Array, "expert *#shape"], log_w: Float[Array, "expert *#shape"]
) -> Float[Array, ...]:
    """The log of the weighted mean of probabilities, of single tokens or of whole distributions.

    Weights of whole distributions have a last axis of length 1.

        p  =  sum over experts of w * p(expert)

    A sum of distributions is one, so nothing has to be normalised but the weights.
    """
    return jax.nn.logsumexp(log_p + log_w, axis=0)


def geometric(
    log_distributions: Float[Array, "expert *shape vocabulary"],
    log_w: Float[Array, " expert *shape"],
) -> Float[Array, "*shape vocabulary"]:
    """The weighted mean of log-probabilities, normalised over the vocabulary.

        p  ~  product over experts of p(expert)^w

    What it is divided by needs whole distributions: the mean alone is no distribution. What is
    impossible to an expert is so to the mixture, unless the expert has no weight at all.
    """
    w = jnp.exp(log_w)[..., None]
    logs = jnp.where(w > 0, w * log_distributions, 0.0)
    return jax.nn.log_softmax(jnp.sum(logs, axis=0))


def top_1(
    log_p: Float[Array, "expert *#shape"], log_w: Float[Array, "expert *#shape"]
) -> Float[Array, ...]:
    """What the likeliest expert says alone; those that are equally likely are mixed."""
    return arithmetic(log_p, likeliest(log_w))


ARITHMETIC, GEOMETRIC = "arithmetic", "geometric"
AVERAGES: Mapping[str, Callable[[Array, Array], Array]] = {
    ARITHMETIC: lambda log_distributions, log_w: arithmetic(log_distributions, log_w[..., None]),
    GEOMETRIC: geometric,
}
"""Log mixtures [... vocabulary] of log distributions [expert ... vocabulary] with log weights
[expert ...]."""
