"""What several models say together of next tokens, as programs over whole distributions.

A model may have more tokens than another, where its vocabulary is padded beyond the tokenizer:
those that it does not have are impossible to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.batches import NOT_COUNTED
from skippipe_jax.ensemble.mixtures import arithmetic
from skippipe_jax.ensemble.posterior import WEIGHTS, final_log_weights, normalised
from skippipe_jax.inference.decoding import (
    Cache,
    empty_caches,
    length_for,
    logits_behind,
    one_by_one,
    run_stages,
    sample,
)
from skippipe_jax.models.head_chunks import tokens_of_chunk

if TYPE_CHECKING:
    from skippipe_jax.inference.ensemble import Ensemble

LogW = Float[Array, "expert batch"]


def generate_mixed(
    ensemble: Ensemble, prompt: Sequence[int], count: int, sampling: Sampling, end: int | None
) -> Iterator[int]:
    """Return what `LanguageModel.tokens_after` says, with caches of each expert.

    The posterior is updated with every token of the prompt, and with each that is drawn.
    """
    models = ensemble.experts
    length = length_for(prompt, count, ensemble.context)
    structures = tuple(tuple(model.structures[s] for s in model.along) for model in models)
    parameters = [[model.parameters[s] for s in model.along] for model in models]
    caches = [empty_caches(model, model.along, 1, length) for model in models]
    log_prior = normalised(jnp.asarray(ensemble.log_prior, jnp.float32))[:, None]
    log_w = log_prior
    key = jax.random.key(sampling.seed)

    def next_of(tokens: Array, start: int, last: int) -> Array:
        nonlocal caches, log_w
        tokens, caches, log_w = _next_token(
            (structures, ensemble.mix),
            parameters,
            caches,
            (log_prior, log_w),
            tokens,
            (start, last, ensemble.tokenizer.begin),
            key,
            float(sampling.temperature),
            sampling.top_p,
        )
        return tokens

    yield from one_by_one(next_of, prompt, count, length, end)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _next_token(
    static: tuple[tuple[tuple[Any, ...], ...], str],
    parameters: Sequence[Sequence[Any]],
    caches: Sequence[Sequence[Cache]],
    prior_and_posterior: tuple[LogW, LogW],
    tokens: Int[Array, "batch time"],
    places: tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
) -> tuple[Int[Array, "batch 1"], list[list[Cache]], LogW]:
    """The token drawn after `tokens[:, last]`, the caches, and the posterior that knows of it.

    `places` are `start` and `last`, as in `decoding.advance`, and the begin mark, at which the
    posterior is the prior.
    """
    structures, mix = static
    (log_prior, log_w), (start, last, begin) = prior_and_posterior, places
    is_given = jnp.arange(tokens.shape[1]) < last
    targets = jnp.where(is_given, jnp.roll(tokens, -1, axis=1), NOT_COUNTED)
    filled, nats, logits = [], [], []
    for of_expert in zip(structures, parameters, caches, strict=True):
        data_stage, x, own = run_stages(*of_expert, tokens, start)
        filled.append(own)
        # One token has no target: the head is needed once, for the logits behind it.
        is_prompt = tokens.shape[1] > 1
        nats.append(data_stage.scores(x, targets)[0] if is_prompt else jnp.zeros(tokens.shape))
        logits.append(logits_behind(data_stage, x, last))
    # Only a prompt, before which there is nothing but the prior, has more than one token.
    log_w = jnp.where(tokens[:, 0] == begin, log_prior, log_w)
    begins = (tokens == begin) & (jnp.arange(tokens.shape[1]) <= last)
    log_w = final_log_weights(-jnp.stack(nats), log_w, begins)
    each = _distributions(logits)
    mixed = arithmetic(each, WEIGHTS[mix](log_w, log_prior)[..., None])
    drawn = sample(mixed, jax.random.fold_in(key, start + last), temperature, top_p)
    said = jnp.take_along_axis(each, drawn[None, :, None], axis=-1)[..., 0]
    return drawn[:, None], filled, normalised(log_w + said)


@functools.partial(jax.jit, static_argnums=0)
def mixed_scores(
    structures: tuple[Any, ...],
    parameters: Sequence[Any],
    streams: Sequence[Float[Array, "sequence position _"]],
    targets: Int[Array, "sequence position"],
    log_w: Float[Array, "expert sequence position"],
) -> tuple[Float[Array, "sequence position"], Bool[Array, "sequence position"]]:
    """The log-probability of each target under the mixture, and whether it is the likeliest token.

    `structures` and `parameters` are those of the experts' data stages, and `streams` what they
    get behind their last stages. A negative target has 0 nats, and counts as the likeliest. Only
    distributions of some tokens are there at any time.
    """
    stages = [nnx.merge(*pair) for pair in zip(structures, parameters, strict=True)]

    def of_token(own: tuple[Sequence[Array], Array, Array]) -> tuple[Array, Array]:
        streams, target, log_w = own
        logits = [
            stage.logits(x[None, None])[0, 0] for stage, x in zip(stages, streams, strict=True)
        ]
        mixed = arithmetic(_distributions(logits), log_w[..., None])
        said = jnp.where(target >= 0, mixed[jnp.maximum(target, 0)], 0.0)
        return said, (jnp.argmax(mixed) == target) | (target < 0)

    vocabulary = max(stage.config.vocabulary_size for stage in stages)
    chunk = tokens_of_chunk(targets.size, vocabulary * len(stages))
    flat = [x.reshape(targets.size, -1) for x in streams]
    each = flat, targets.ravel(), log_w.reshape(len(stages), -1).T
    said, greedy = jax.lax.map(of_token, each, batch_size=chunk)
    return said.reshape(targets.shape), greedy.reshape(targets.shape)


def _distributions(
    logits: Sequence[Float[Array, "*batch _"]],
) -> Float[Array, "expert *batch vocabulary"]:
    """Log distributions of experts over the greatest of their vocabularies."""
    most = max(own.shape[-1] for own in logits)

    def padded(own: Array) -> Array:
        missing = [(0, 0)] * (own.ndim - 1) + [(0, most - own.shape[-1])]
        return jnp.pad(own, missing, constant_values=-np.inf)

    return jnp.stack([jax.nn.log_softmax(padded(own), axis=-1) for own in logits])
