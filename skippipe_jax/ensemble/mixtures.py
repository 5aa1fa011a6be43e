"""Mixtures of what experts say, each with a weight. All are in logarithms, and normalised."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float


def arithmetic(
    log_p: Float[Array, "expert *#shape"], log_w: Float[Array, "expert *#shape"]
) -> Float[Array, ...]:
    """Return the log of the weighted mean of probabilities, of tokens or of distributions.

    Weights of whole distributions have a last axis of length 1.

        p  =  sum over experts of w * p(expert)

    A sum of distributions is one, so nothing has to be normalised but the weights.
    """
    return jax.nn.logsumexp(log_p + log_w, axis=0)
