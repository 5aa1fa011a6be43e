"""Next-token distributions of several models together, as programs.

A model may have more tokens than another, where its vocabulary is padded beyond the tokenizer:
those that it does not have are impossible to it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from skippipe_jax.data.batches import IGNORED_TARGET
from skippipe_jax.ensemble.mixtures import arithmetic
from skippipe_jax.ensemble.posterior import WEIGHTS, final_log_weights, normalised
from skippipe_jax.inference.decoding import Step
from skippipe_jax.inference.partial import Order
from skippipe_jax.models.footprint import tokens_of_chunk
from skippipe_jax.models.llama import StageStructure

if TYPE_CHECKING:
    from skippipe_jax.inference.ensemble import Ensemble


class MixtureState(NamedTuple):
    """State of each slot: the posterior, and each expert's distribution of the next token."""

    log_w: Float[Array, "expert slot"]
    log_p: Float[Array, "expert slot vocabulary"]


class MixtureExecutor:
    """The `Decoder` of several models: those of each, and the posterior over them.

    The posterior is updated with every token of a prompt, and with each that is drawn, when it
    comes back to be run.
    """

    def __init__(self, ensemble: Ensemble, slots: int, length: int):
        """Make room for so many sequences of so many positions in each expert."""
        self.ensemble, self.slots, self.length = ensemble, slots, length
        experts = ensemble.experts
        self._executors = [expert.decoder(slots, length) for expert in experts]
        self._structures = tuple(expert.structures[0] for expert in experts)
        self._parameters = [expert.parameters[0] for expert in experts]
        self._log_prior = normalised(jnp.asarray(ensemble.log_prior, jnp.float32))[:, None]
        self.vocabulary_size = max(expert.config.vocabulary_size for expert in experts)
        shape = len(experts), slots
        self._state = MixtureState(jnp.zeros(shape), jnp.zeros((*shape, self.vocabulary_size)))

    @property
    def is_single_model(self) -> bool:
        """Return what `Decoder.is_single_model` says."""
        return False

    @property
    def waits(self) -> bool:
        """Return what `Decoder.waits` says."""
        return False

    def begin(self, slot: int, stages: Order | None) -> None:
        """Begin with the prior, which a step at position 0 does by itself."""

    def end(self, slot: int) -> None:
        """Forget nothing: a step at position 0 does so."""

    def close(self) -> None:
        """Do what `Decoder.close` says: nothing is waited for."""

    def stages_of(self, slot: int) -> Order | None:
        """Return None, as there are several models."""
        return None

    def prefill(self, step: Step, targets: Int[np.ndarray, "1 time"] | None = None) -> None:
        """Do what `Decoder.prefill` says; nobody asks several models for scores."""
        assert targets is None, "refused by the generator"
        self.next_logits(step)

    def next_logits(self, step: Step) -> Float[Array, "row vocabulary"]:
        """Return what `Decoder.next_logits` says: log-probabilities under the mixture."""
        logits, self._state = _next_logits(
            (self._structures, self.ensemble.mix, self.length),
            self._parameters,
            self._state,
            [executor.run(step) for executor in self._executors],
            step,
            self._log_prior,
            self.ensemble.tokenizer.begin,
        )
        return logits


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _next_logits(
    static: tuple[tuple[StageStructure, ...], str, int],
    parameters: Sequence[Any],
    state: MixtureState,
    streams: Sequence[Float[Array, "row time _"]],
    step: Step,
    log_prior: Float[Array, "expert 1"],
    begin: Int[Array, ""],
) -> tuple[Float[Array, "row vocabulary"], MixtureState]:
    """Return the mixture after the last token of each row, and the new state.

    `static` are structures, by what experts are weighed, and the length of the caches, which is the
    position of padding. `parameters` are those of the experts' data stages, and `streams` what they
    get behind their last stages. At the begin mark `begin` the posterior is the prior.
    """
    structures, mix, length = static
    (tokens, positions, slot), is_token = step, step.positions < length
    stages = [own.merge(given) for own, given in zip(structures, parameters, strict=True)]
    local = state if slot is None else jax.tree.map(lambda each: each[:, slot][:, None], state)

    # The first token of the step is judged by what was said before it.
    log_p = jnp.take_along_axis(local.log_p, tokens[None, :, :1], axis=-1)[..., 0]
    is_new = (positions[:, 0] == 0) | (tokens[:, 0] == begin)
    log_w = jnp.where(is_new, log_prior, normalised(local.log_w + log_p))
    if tokens.shape[1] > 1:
        is_judged = is_token & jnp.roll(is_token, -1, axis=1).at[:, -1].set(False)
        targets = jnp.where(is_judged, jnp.roll(tokens, -1, axis=1), IGNORED_TARGET)
        pairs = zip(stages, streams, strict=True)
        nats = jnp.stack([stage.scores(x, targets)[0] for stage, x in pairs])
        begins = ((tokens == begin) & is_token).at[:, 0].set(False)
        log_w = final_log_weights(-nats, log_prior[:, 0], begins, log_w)

    last = jnp.maximum(is_token.sum(axis=1) - 1, 0)[:, None, None]
    last_outputs = [jnp.take_along_axis(x, last, axis=1) for x in streams]
    pairs = zip(stages, last_outputs, strict=True)
    new_state = MixtureState(log_w, _distributions([stage.logits(x)[:, 0] for stage, x in pairs]))
    mixed = arithmetic(new_state.log_p, WEIGHTS[mix](log_w, log_prior)[..., None])
    if slot is None:
        # Of a slot that takes no part, nothing new is known.
        taken = is_token[:, 0]
        log_w = jnp.where(taken, new_state.log_w, state.log_w)
        return mixed, MixtureState(log_w, jnp.where(taken[:, None], new_state.log_p, state.log_p))
    return mixed, jax.tree.map(lambda all, new: all.at[:, slot].set(new[:, 0]), state, new_state)


@functools.partial(jax.jit, static_argnums=0)
def mixed_scores(
    structures: tuple[StageStructure, ...],
    parameters: Sequence[Any],
    streams: Sequence[Float[Array, "sequence position _"]],
    targets: Int[Array, "sequence position"],
    log_w: Float[Array, "expert sequence position"],
) -> tuple[Float[Array, "sequence position"], Bool[Array, "sequence position"]]:
    """Return the mixture's log-probability of each target, and whether it is the likeliest.

    `structures` and `parameters` are those of the experts' data stages, and `streams` what they
    get behind their last stages. A negative target has 0 nats, and counts as the likeliest. Only
    distributions of some tokens are there at any time.
    """
    stages = [own.merge(given) for own, given in zip(structures, parameters, strict=True)]

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
    most = max(of_expert.shape[-1] for of_expert in logits)

    def padded(of_expert: Array) -> Array:
        missing = [(0, 0)] * (of_expert.ndim - 1) + [(0, most - of_expert.shape[-1])]
        return jnp.pad(of_expert, missing, constant_values=-np.inf)

    return jnp.stack([jax.nn.log_softmax(padded(of_expert), axis=-1) for of_expert in logits])
