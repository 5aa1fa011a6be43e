"""Priors of the experts at the start of a document.

Three priors of Branch-Train-Merge (Li et al. 2022, arXiv 2208.03306, after Gururangan et al. 2021,
arXiv 2108.05036): uniform; updating, an exponential moving average of the posteriors of the
sequences so far; cached, the updating prior after some sequences of a text of their own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from skippipe_jax.ensemble.posterior import final_log_weights

UNIFORM, DECAY, CACHED = PRIORS = ("uniform", "decay", "cached")
KEPT = 0.3
"""Share of a prior that is kept from one sequence to the next, in both papers."""


def uniform_prior(experts: int) -> Float[Array, " expert"]:
    """Log prior of experts that are equally likely."""
    return jnp.full(experts, -jnp.log(experts))


def updated_prior(
    log_prior: Float[Array, " expert"], log_final: Float[Array, " expert"], decay: float = KEPT
) -> Float[Array, " expert"]:
    """Return the log prior after one more sequence, whose posterior at its end is `log_final`.

        prior  <-  decay * prior + (1 - decay) * posterior

    From a uniform prior on, that are the papers' weights of past posteriors, decay^i of the one i
    sequences ago, normalised. In logarithms no prior becomes 0, from which no expert comes back:
    after n sequences each has decay^n of its first one at least. So there is no smoothing.
    """
    return jnp.logaddexp(log_prior + jnp.log(decay), log_final + jnp.log1p(-decay))


def decayed_priors(
    log_p: Float[Array, "expert sequence position"],
    resets: Bool[Array, "sequence position"],
    decay: float = KEPT,
) -> tuple[Float[Array, "expert sequence"], Float[Array, " expert"]]:
    """Return the updated log prior before each sequence, and the one after all of them.

    The first is uniform. The posterior of a sequence is that after its last target, under its own
    prior. Sequences come in the order in which they are given.
    """
    first = uniform_prior(len(log_p)).astype(log_p.dtype)

    def pass_sequence(log_prior: Array, own: tuple[Array, Array]) -> tuple[Array, Array]:
        log_p, resets = own
        log_final = final_log_weights(log_p[:, None], log_prior, resets[None])[:, 0]
        return updated_prior(log_prior, log_final, decay), log_prior

    after, priors = jax.lax.scan(pass_sequence, first, (jnp.moveaxis(log_p, 1, 0), resets))
    return priors.T, after
