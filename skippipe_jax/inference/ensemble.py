"""Several models that answer together, each weighed by how well it foretold the text so far."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.pretrained import SHAPES
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.batches import IGNORED_TARGET, Batch, document_starts
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.ensemble import mixing, posterior, priors
from skippipe_jax.inference.decoding import continued, generate_tokens
from skippipe_jax.inference.mixture_executor import MixtureExecutor, mixed_scores
from skippipe_jax.inference.staged_model import StagedModel


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Models with one tokenizer, which may differ in size, as one model.

    Attributes:
        experts: the models.
        given_prior: logarithms of how likely each is where a document begins, which need not be
            normalised; None for all alike.
        mix: by what they are weighed, one of `posterior.WEIGHTS`.
        names: what each is called; by default "expert 0" and so on.

    Raises `InputError` if there is none, their tokenizers differ, or the prior is not of so many.
    A model whose vocabulary is larger than another's has more tokens that the tokenizer never
    makes: these are impossible to those that lack them.
    """

    experts: Sequence[StagedModel]
    given_prior: Float[np.ndarray, " expert"] | None = None
    mix: str = posterior.POSTERIOR
    names: Sequence[str] = ()

    def __post_init__(self):
        """Check that they can be mixed."""
        fields.sequence(self.experts, "experts")
        fields.text(self.mix, "--mix", posterior.WEIGHTS)
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
        """Return what `LanguageModel.log_probabilities` says.

        The posterior of a token knows of the targets before it that count, since its document
        began in the sequence.
        """
        log_p = np.stack([expert.log_probabilities(batch) for expert in self.experts])
        log_w = self._log_weights(log_p, batch)
        return mixing.weighed(log_p, log_w)

    def likelihoods(
        self, batch: Batch
    ) -> tuple[Float[np.ndarray, " sequence"], Bool[np.ndarray, " sequence"]]:
        """Return what `LanguageModel.likelihoods` says; the posterior uses all tokens given.

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
        log_p, greedy = self._mixed(streams, targets, log_w)
        return log_p.sum(axis=1), np.logical_and.reduce(greedy, axis=1)

    def decoder(self, slots: int, length: int) -> MixtureExecutor:
        """Return what `LanguageModel.decoder` says; what is drawn is drawn from the mixture."""
        return MixtureExecutor(self, slots, length)

    @overload
    def generate(self, prompt: str, max_new_tokens: int = ..., sampling: Sampling = ...) -> str: ...

    @overload
    def generate(
        self, prompt: Sequence[int], max_new_tokens: int = ..., sampling: Sampling = ...
    ) -> list[int]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 100,
        sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
    ) -> str | list[int]:
        """Go on from a text by a text, or from tokens by tokens, as `StagedModel.generate`."""
        end = self.tokenizer.end
        return continued(
            self.tokenizer,
            prompt,
            lambda tokens: generate_tokens(self, tokens, max_new_tokens, sampling, end),
        )

    def _log_weights(
        self, log_p: Float[np.ndarray, "expert sequence position"], batch: Batch
    ) -> Float[np.ndarray, "expert sequence position"]:
        resets = document_starts(batch, self.tokenizer.begin)
        return mixing.weights(
            log_p, resets, prior=priors.CACHED, how=self.mix, log_prior=self.log_prior
        )

    def _mixed(
        self, streams: Sequence[jax.Array], targets: np.ndarray, log_w: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what `mixed_scores` says of what experts have behind their last stages."""
        return jax.device_get(
            mixed_scores(
                tuple(expert.structures[0] for expert in self.experts),
                [expert.parameters[0] for expert in self.experts],
                streams,
                jnp.asarray(targets),
                jnp.asarray(log_w, jnp.float32),
            )
        )


AVERAGED_SHAPES = tuple(key for key in SHAPES if key != "context")
"""Settings in which models must agree for their parameters to be averaged."""


def averaged(models: Sequence[StagedModel]) -> StagedModel:
    """One model whose parameters are the means of those of several, added up in float32.

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
