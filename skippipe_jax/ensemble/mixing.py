"""One float per token from each expert, mixed in float64: no vocabulary is needed for that."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float64
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.ensemble import posterior, priors
from skippipe_jax.ensemble.mixtures import arithmetic

LogP = Float[np.ndarray, "expert sequence position"]
Resets = Bool[np.ndarray, "sequence position"]


def weighed(log_p: LogP, log_w: LogP) -> Float64[np.ndarray, "sequence position"]:
    """Return the log-probability of each target under the mixture of experts, in nats.

    `log_p` is as in `posterior.log_weights`; targets that do not count get 0 again.
    """
    return _in_float64(arithmetic, log_p, log_w)


def weights(
    log_p: LogP,
    resets: Resets,
    *,
    prior: str = priors.UNIFORM,
    how: str = posterior.POSTERIOR,
    log_prior: Float[np.ndarray, " expert"] | None = None,
    decay: float = priors.KEPT,
) -> Float64[np.ndarray, "expert sequence position"]:
    """Return the log weights of the experts at each target.

    `log_p` and `resets` are as in `posterior.log_weights`. The prior is uniform, cached in
    `log_prior`, or updated with `decay` from sequence to sequence. `how` is one of
    `posterior.WEIGHTS`.

    Raises:
        InputError: for another prior or way to mix, or a cached prior that is not given.
    """
    fields.text(prior, "prior", priors.PRIORS)
    fields.text(how, "how", posterior.WEIGHTS)
    if prior == priors.CACHED:
        if log_prior is None:
            raise InputError("log_prior", None, "is missing", "Pass the result of cached_log_prior")
        log_priors = log_prior
    elif prior == priors.DECAY:
        log_priors, _ = _in_float64(functools.partial(_decayed_priors, decay=decay), log_p, resets)
    else:
        log_priors = np.zeros(len(log_p))
    return _in_float64(functools.partial(_weights, how), log_p, log_priors, resets)


def cached_log_prior(
    log_p: LogP, resets: Resets, decay: float = priors.KEPT
) -> Float64[np.ndarray, " expert"]:
    """Return the cached log prior that a part of a text gives, which is not then scored with it."""
    _, log_prior = _in_float64(functools.partial(_decayed_priors, decay=decay), log_p, resets)
    return log_prior


@functools.partial(jax.jit, static_argnums=0)
def _weights(how: str, log_p: jax.Array, log_prior: jax.Array, resets: jax.Array) -> jax.Array:
    log_w = posterior.log_weights(log_p, log_prior, resets)
    of_sequences = posterior.spread(log_prior, log_p)[:, :, None]
    return posterior.WEIGHTS[how](log_w, of_sequences)


_decayed_priors = jax.jit(priors.decayed_priors)


def _in_float64(function: Callable, *arrays: np.ndarray) -> np.ndarray:
    """Return what a function of arrays gives, where floats are float64, on whatever device."""
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(array, jnp.float64 if array.dtype.kind == "f" else None) for array in arrays
        ]
        return jax.tree.map(np.asarray, function(*wide))
