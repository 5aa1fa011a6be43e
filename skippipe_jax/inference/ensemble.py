"""Several models that answer together, each weighed by how well it foretold the text so far.

A model may have more tokens than another, where its vocabulary is padded beyond the tokenizer:
those that it does not have are impossible to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.pretrained import SHAPES
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, document_starts
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.ensemble import (
    CACHED,
    POSTERIOR,
    PRIORS,
    WEIGHTS,
    arithmetic,
    final_log_weights,
    normalised,
    target_log_weights,
    weighed,
)
from skippipe_jax.inference.decoding import Decoder, Prompt, Step, continuation
from skippipe_jax.inference.model_source import ModelSource, require_same_split
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.footprint import tokens_of_chunk
from skippipe_jax.models.llama import StageStructure
from skippipe_jax.storage.run_dir import RunDir


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Models with one tokenizer, which may differ in size, as one model.

    Attributes:
        experts: the models.
        given_prior: logarithms of how likely each is where a document begins, which need not be
            normalised; None for all alike.
        mix: by what they are weighed, one of `skippipe_jax.ensemble.WEIGHTS`.
        names: what each is called; by default "expert 0" and so on.

    Raises `InputError` if there is none, their tokenizers differ, or the prior is not of so many.
    """

    experts: Sequence[StagedModel]
    given_prior: Float[np.ndarray, " expert"] | None = None
    mix: str = POSTERIOR
    names: Sequence[str] = ()

    def __post_init__(self):
        """Check that they can be mixed."""
        fields.sequence(self.experts, "experts")
        fields.text(self.mix, "--mix", WEIGHTS)
        if not self.names:
            names = [f"expert {number}" for number in range(len(self.experts))]
            object.__setattr__(self, "names", names)
        for name, expert in zip(self.names, self.experts, strict=True):
            tokenizer, first = expert.tokenizer, self.tokenizer
            if tokenizer.digest != first.digest:
                raise InputError(
                    "--run",
                    name,
                    f"its tokenizer ({tokenizer.digest}) differs from that of {self.names[0]} "
                    f"({first.digest})",
                    "Choose models with the same tokenizer",
                )
        if len(self.log_prior) != len(self.experts):
            problem = f"has {len(self.log_prior)} weights for {len(self.experts)} experts"
            raise InputError(
                "--prior", self.log_prior.tolist(), problem, "Give one weight for each expert"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all of them."""
        return self.experts[0].tokenizer

    @property
    def context(self) -> int:
        """Most tokens in a sequence of any of them."""
        return min(expert.context for expert in self.experts)

    @property
    def log_prior(self) -> Float[np.ndarray, " expert"]:
        """The prior, as logarithms."""
        return np.zeros(len(self.experts)) if self.given_prior is None else self.given_prior

    def log_probabilities(self, batch: Batch) -> Float[np.ndarray, "sequence position"]:
        """Return what `StagedModel.log_probabilities` says, of the mixture.

        The posterior of a token knows of the targets before it that count, since its document
        began in the sequence.
        """
        log_p = np.stack([expert.log_probabilities(batch) for expert in self.experts])
        log_w = self._log_weights(log_p, batch)
        return weighed(log_p, log_w)

    def likelihoods(
        self, batch: Batch
    ) -> tuple[Float[np.ndarray, " sequence"], Bool[np.ndarray, " sequence"]]:
        """Return what `StagedModel.likelihoods` says; the posterior uses all tokens given.

        They are those of the mixture, whose likeliest token need not be that of any expert.
        """
        tokens, targets = batch["tokens"], batch["targets"]
        after_last = np.full_like(tokens[:, :1], IGNORED_TARGET)
        next_tokens = np.concatenate([tokens[:, 1:], after_last], axis=1)
        next_tokens = np.where(targets == IGNORED_TARGET, next_tokens, targets)
        streams = [expert.run(expert.default_order, batch) for expert in self.experts]
        nats = [
            expert.scores(x, jnp.asarray(next_tokens))[0]
            for expert, x in zip(self.experts, streams, strict=True)
        ]
        log_w = self._log_weights(-np.stack(jax.device_get(nats)), batch)
        log_p, greedy = jax.device_get(
            mixed_scores(
                tuple(expert.structures[0] for expert in self.experts),
                [expert.parameters[0] for expert in self.experts],
                streams,
                jnp.asarray(targets),
                jnp.asarray(log_w, jnp.float32),
            )
        )
        return log_p.sum(axis=1), np.logical_and.reduce(greedy, axis=1)

    def decoder(self, slots: int, length: int) -> MixtureExecutor:
        """Return what `StagedModel.decoder` says; what is drawn is drawn from the mixture."""
        return MixtureExecutor(self, slots, length)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 100,
        sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
    ) -> Prompt:
        """Go on from a text by a text, or from tokens by tokens, as `StagedModel.generate`."""
        return continuation(self, self.tokenizer, prompt, max_new_tokens, sampling)

    def _log_weights(
        self, log_p: Float[np.ndarray, "expert sequence position"], batch: Batch
    ) -> Float[np.ndarray, "expert sequence position"]:
        resets = document_starts(batch, self.tokenizer.begin)
        return target_log_weights(
            log_p, resets, prior=CACHED, how=self.mix, log_prior=self.log_prior
        )


def read_ensemble(
    sources: Sequence[ModelSource],
    mix: str | None = None,
    prior: str = "uniform",
    allowed: Collection[str] = ("uniform",),
) -> tuple[Ensemble, str]:
    """Read several models as one ensemble; return it and which prior is meant.

    That is one of those `allowed`, or "file".

    Raises:
        InputError: if one of them cannot be read, they cannot be mixed, there is no such prior, or
            the first holds out text that another run has trained on.
    """
    kind, log_prior = parse_prior(prior, len(sources), allowed)
    for source in sources[1:]:
        if source.step is not None:
            run = RunDir(source.folder)
            require_same_split(sources[0].config.data, run.located(run.config("--run").data))
    models = [source.model() for source in sources]
    names = [str(source.folder) for source in sources]
    return Ensemble(models, log_prior, mix or POSTERIOR, names), kind


def parse_prior(
    value: str, experts: int, allowed: Collection[str]
) -> tuple[str, Float[np.ndarray, " expert"] | None]:
    """Parse `--prior`: the name of a prior, or the probabilities in a file.

    Raises:
        InputError: if it is not allowed, or no file with such weights.
    """
    if not value.endswith(".json"):
        if value in PRIORS and value not in allowed:
            problem = "is estimated on text, which this command does not read"
            remedy = "Write uniform, or a FILE.json from evaluate --json"
            raise InputError("--prior", value, problem, remedy)
        if value not in allowed:
            remedy = f"Write {', '.join(allowed)}, or a FILE.json from evaluate --json"
            raise InputError("--prior", value, "is not a prior", remedy)
        return value, None
    content = fields.load_json(Path(value), "--prior")
    field = f"prior of {value}"
    weights = content.get("prior") if isinstance(content, dict) else None
    if not isinstance(weights, list) or len(weights) != experts:
        problem = f"is not a list of {experts} weights, one per model in the order of the options"
        raise InputError(field, weights, problem, "Evaluate these models with --json")
    # A weight of 0 would stay so, whatever the expert foretells.
    weights = [fields.number(one, field, 0.0, above=True) for one in weights]
    if not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
        raise InputError(field, weights, "does not add up to 1", "Evaluate these models again")
    return "file", np.log(weights)


AVERAGED_SHAPES = tuple(key for key in SHAPES if key != "context")
"""Settings in which models must agree for their parameters to be averaged."""


def averaged(models: Sequence[StagedModel]) -> StagedModel:
    """Return a model whose parameters are the means of those of several, added up in float32.

    Raises:
        InputError: if they are not of one shape, or not cut alike.
    """
    first, *others = models
    for other in others:
        for key in AVERAGED_SHAPES:
            value, of_first = getattr(other.config, key), getattr(first.config, key)
            if value != of_first:
                problem = f"the first model to average has {of_first}"
                raise InputError(f"model.{key}", value, problem, "Average models of the same shape")
        if other.cut != first.cut:
            problem = f"the first model to average has {first.cut}"
            raise InputError(
                "model.stage_layers", other.cut, problem, "Average models of the same stage_layers"
            )

    def mean(*arrays: jax.Array) -> jax.Array:
        total = functools.reduce(jnp.add, (array.astype(jnp.float32) for array in arrays))
        return (total / len(arrays)).astype(arrays[0].dtype)

    parameters = [
        jax.tree.map(mean, *leaves) for leaves in zip(*(m.parameters for m in models), strict=True)
    ]
    return replace(first, parameters=parameters)


class MixtureState(NamedTuple):
    """State of each slot: the posterior, and each expert's distribution of the next token."""

    log_w: Float[Array, "expert slot"]
    log_p: Float[Array, "expert slot vocabulary"]


class MixtureExecutor(Decoder):
    """The `Decoder` of several models: those of each, and the posterior over them.

    The posterior is updated with every token of a prompt, and with each that is drawn, when it
    comes back to be run. A step at position 0 begins with the prior.
    """

    is_single_model = False

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
