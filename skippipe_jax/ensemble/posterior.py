"""Posterior of the experts at every token, given the tokens before it.

    p(expert | tokens before t)  ~  prior(expert) * product over s < t of p(token s | expert)

The product is of the tokens of the document so far (Li et al. 2022, Branch-Train-Merge, arXiv
2208.03306). It is normalised at every token: nothing grows with the length of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

PerExpert = Float[Array, " expert"] | Float[Array, "expert sequence"]
"""Logarithms of a prior: the same for all sequences, or one for each."""


def normalised(log_w: Float[Array, "expert ..."]) -> Float[Array, "expert ..."]:
    """Log weights whose exponentials add up to 1 over the experts."""
    return jax.nn.log_softmax(log_w, axis=0)


def log_weights(
    log_p: Float[Array, "expert sequence position"],
    log_prior: PerExpert,
    resets: Bool[Array, "sequence position"],
) -> Float[Array, "expert sequence position"]:
    """Log posterior over experts at each position, before its target is seen.

    `log_p` is each expert's log-probability of each target, 0 of those that do not count, which so
    change nothing. At a sequence's first position and where `resets` is true, a document begins
    and the posterior is the prior; from there on it is multiplied by the probability of each target
    that has passed. The prior need not be normalised.
    """
    return _scanned(log_p, log_prior, resets)[1]


def final_log_weights(
    log_p: Float[Array, "expert sequence position"],
    log_prior: PerExpert,
    resets: Bool[Array, "sequence position"],
    log_w: Float[Array, "expert sequence"] | None = None,
) -> Float[Array, "expert sequence"]:
    """Return the same after the last target of each sequence, for the last document in it.

    A sequence that goes on from another begins with the normalised posterior `log_w` of that.
    """
    return _scanned(log_p, log_prior, resets, log_w)[0]


def likeliest(log_w: Float[Array, "expert ..."]) -> Float[Array, "expert ..."]:
    """Log weights of which the greatest has all: 0 of the likeliest expert, -inf of others.

    Experts that are equally likely, as all are under a uniform prior, have equal parts: which of
    them comes first must not matter.
    """
    is_likeliest = log_w == jnp.max(log_w, axis=0)
    return normalised(jnp.where(is_likeliest, jnp.zeros_like(log_w), -jnp.inf))


POSTERIOR, PRIOR, TOP_1 = "posterior", "prior", "top-1"
WEIGHTS: Mapping[str, Callable[[Array, Array], Array]] = {
    POSTERIOR: lambda log_w, log_prior: log_w,
    PRIOR: lambda log_w, log_prior: jnp.broadcast_to(log_prior, log_w.shape),
    TOP_1: lambda log_w, log_prior: likeliest(log_w),
}
"""Log weights of experts, from log posterior and normalized log prior [expert ...]: the
posterior, the prior, or all weight on the likeliest expert."""


def spread(
    log_prior: PerExpert, log_p: Float[Array, "expert sequence position"]
) -> Float[Array, "expert sequence"]:
    """Return a normalized prior for each sequence, in the dtype of `log_p`."""
    log_prior = log_prior.astype(log_p.dtype)
    if log_prior.ndim == 1:
        log_prior = log_prior[:, None]
    return jnp.broadcast_to(normalised(log_prior), log_p.shape[:2])


def _scanned(
    log_p: Array, log_prior: Array, resets: Array, log_w: Array | None = None
) -> tuple[Array, Array]:
    """Return what comes after the last target, and before each."""
    prior = spread(log_prior, log_p)

    def pass_target(log_w: Array, own: tuple[Array, Array]) -> tuple[Array, Array]:
        log_p, resets = own
        before = jnp.where(resets, prior, log_w)
        return normalised(before + log_p), before

    final, before = jax.lax.scan(
        pass_target, prior if log_w is None else log_w, (jnp.moveaxis(log_p, -1, 0), resets.T)
    )
    return final, jnp.moveaxis(before, 0, -1)
