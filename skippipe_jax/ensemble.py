"""Posterior and priors over experts, and mixtures of their predictions.

`target_log_weights`, `cached_log_prior` and `weighed` evaluate one float per token in float64;
compiled decoding uses `final_log_weights` in the dtype of its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64
from skippipe_sched import fields
from skippipe_sched.errors import InputError

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

        p(expert | tokens before t)  ~  prior(expert) * product over s < t of p(token s | expert)

    The product is of the tokens of the document so far (Li et al. 2022, Branch-Train-Merge, arXiv
    2208.03306). It is normalised at every token: nothing grows with the length of a text.

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


UNIFORM, DECAY, CACHED = PRIORS = ("uniform", "decay", "cached")
"""Priors at the start of a document, as in Branch-Train-Merge (after Gururangan et al. 2021, arXiv
2108.05036): uniform; an exponential moving average of the posteriors of the sequences so far; that
average after some sequences of a text of their own."""
KEPT = 0.3
"""Share of a prior that is kept from one sequence to the next, in both papers."""


def decayed_priors(
    log_p: Float[Array, "expert sequence position"],
    resets: Bool[Array, "sequence position"],
    decay: float = KEPT,
) -> tuple[Float[Array, "expert sequence"], Float[Array, " expert"]]:
    """Return the updated log prior before each sequence, and the one after all of them.

    The first is uniform. The posterior of a sequence is that after its last target, under its own
    prior. Sequences come in the order in which they are given.

        prior  <-  decay * prior + (1 - decay) * posterior

    That are the papers' weights of past posteriors, decay^i of the one i sequences ago, normalised.
    In logarithms no prior becomes 0, from which no expert comes back: after n sequences each has
    decay^n of its first one at least. So there is no smoothing.
    """
    first = jnp.full(len(log_p), -jnp.log(len(log_p))).astype(log_p.dtype)

    def pass_sequence(log_prior: Array, own: tuple[Array, Array]) -> tuple[Array, Array]:
        log_p, resets = own
        log_final = final_log_weights(log_p[:, None], log_prior, resets[None])[:, 0]
        kept = log_prior + jnp.log(decay)
        return jnp.logaddexp(kept, log_final + jnp.log1p(-decay)), log_prior

    after, priors = jax.lax.scan(pass_sequence, first, (jnp.moveaxis(log_p, 1, 0), resets))
    return priors.T, after


def arithmetic(
    log_p: Float[Array, "expert *#shape"], log_w: Float[Array, "expert *#shape"]
) -> Float[Array, ...]:
    """Return the log of the weighted mean of probabilities, of tokens or of distributions.

    Weights of whole distributions have a last axis of length 1.

        p  =  sum over experts of w * p(expert)

    A sum of distributions is one, so nothing has to be normalised but the weights.
    """
    return jax.nn.logsumexp(log_p + log_w, axis=0)


LogP = Float[np.ndarray, "expert sequence position"]
Resets = Bool[np.ndarray, "sequence position"]


def weighed(log_p: LogP, log_w: LogP) -> Float64[np.ndarray, "sequence position"]:
    """Return the log-probability of each target under the mixture of experts, in nats.

    `log_p` is as in `log_weights`; targets that do not count get 0 again.
    """
    return _in_float64(arithmetic, log_p, log_w)


def target_log_weights(
    log_p: LogP,
    resets: Resets,
    *,
    prior: str = UNIFORM,
    how: str = POSTERIOR,
    log_prior: Float[np.ndarray, " expert"] | None = None,
    decay: float = KEPT,
) -> Float64[np.ndarray, "expert sequence position"]:
    """Return the log weights of the experts at each target.

    `log_p` and `resets` are as in `log_weights`. The prior is uniform, cached in `log_prior`, or
    updated with `decay` from sequence to sequence. `how` is one of `WEIGHTS`.

    Raises:
        InputError: for another prior or way to mix, or a cached prior that is not given.
    """
    fields.text(prior, "prior", PRIORS)
    fields.text(how, "how", WEIGHTS)
    if prior == CACHED:
        if log_prior is None:
            raise InputError("log_prior", None, "is missing", "Pass the result of cached_log_prior")
        log_priors = log_prior
    elif prior == DECAY:
        log_priors, _ = _in_float64(functools.partial(_decayed_priors, decay=decay), log_p, resets)
    else:
        log_priors = np.zeros(len(log_p))
    return _in_float64(functools.partial(_weights, how), log_p, log_priors, resets)


def cached_log_prior(
    log_p: LogP, resets: Resets, decay: float = KEPT
) -> Float64[np.ndarray, " expert"]:
    """Return the cached log prior that a part of a text gives, which is not then scored with it."""
    _, log_prior = _in_float64(functools.partial(_decayed_priors, decay=decay), log_p, resets)
    return log_prior


@functools.partial(jax.jit, static_argnums=0)
def _weights(how: str, log_p: jax.Array, log_prior: jax.Array, resets: jax.Array) -> jax.Array:
    log_w = log_weights(log_p, log_prior, resets)
    of_sequences = spread(log_prior, log_p)[:, :, None]
    return WEIGHTS[how](log_w, of_sequences)


_decayed_priors = jax.jit(decayed_priors)


def _in_float64(function: Callable, *arrays: np.ndarray) -> np.ndarray:
    """Return what a function of arrays gives, where floats are float64, on whatever device."""
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(array, jnp.float64 if array.dtype.kind == "f" else None) for array in arrays
        ]
        return jax.tree.map(np.asarray, function(*wide))
