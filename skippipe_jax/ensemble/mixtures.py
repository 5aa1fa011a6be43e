"""Mixtures of what experts say, each with a weight. All are in logarithms, and normalised."""

from __future__ import annotations

import jax
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


def top_1(
    log_p: Float[Array, "expert *#shape"], log_w: Float[Array, "expert *#shape"]
) -> Float[Array, ...]:
    """Return what the likeliest expert says alone; those that are equally likely are mixed."""
    return arithmetic(log_p, likeliest(log_w))
