"""Trained model for evaluation and generation: all stages on one device, run in any order.

Programs are compiled once for each shape of a stage, so no choice of stages compiles anew. Texts
are padded to lengths that many share.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int
from skippipe_sched.errors import InputError

from skippipe_jax.config.data import BYTES
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.batches import (
    IGNORED_TARGET,
    Batch,
    check_vocabulary,
)
from skippipe_jax.data.tokenizer import Tokenizer, load_tokenizer
from skippipe_jax.inference.decoding import Prompt, StageExecutor, continuation, padded_length
from skippipe_jax.inference.partial import StageOrder, checked_order, full, kept
from skippipe_jax.inference.stage_set import StageSet
from skippipe_jax.models.branch_scales import BranchScales, ScaleTable
from skippipe_jax.models.document_mask import marked_tokens
from skippipe_jax.models.llama import StageStructure

CPU_TOKENS = 256
"""Tokens that a CPU scores together: activations of more do not fit into its caches."""

Tokens = Sequence[int] | Sequence[Sequence[int]] | Int[np.ndarray, "*sequence position"]
"""A sequence of tokens, or several of one length."""


@dataclass(frozen=True, eq=False)
class StagedModel(StageSet):
    """A model cut into stages, which run in any order.

    Attributes:
        tokenizer_name: what makes its tokens, as `load_tokenizer` takes it.
        order: the stages that run where none are named, the data stage first; None is all of them.
    """

    tokenizer_name: str = BYTES
    order: StageOrder | None = None

    def __repr__(self) -> str:
        """Tell its shapes, and how it is cut."""
        model, layers = self.config, tuple(self.cut)
        return f"Model(width={model.width}, layers={model.layers}, stages={layers})"

    @property
    def default_order(self) -> StageOrder:
        """The stages that run where none are named."""
        return self.order or full(self.stages)

    @property
    def context(self) -> int:
        """Most tokens in a sequence."""
        return self.config.context

    def scaled(self, scales: BranchScales) -> StagedModel:
        """Return the model with these branch scales folded into its weights."""
        parameters = [
            scales.folded(own, self.cut, stage) for stage, own in enumerate(self.parameters)
        ]
        return replace(self, parameters=parameters)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model's tokens come from.

        Raises:
            InputError: if the model has too few tokens for it.
        """
        tokenizer = load_tokenizer(self.tokenizer_name)
        check_vocabulary(self.config.vocabulary_size, tokenizer)
        return tokenizer

    def orders(self, keep: float, most: int = 10, seed: int = 0) -> list[StageOrder]:
        """Return all orders that keep a share of the stages, or `most` of them, drawn by the seed.

        The number of stages is rounded to the nearest, and the data stage is always one of them.
        """
        return [variant.stages for variant in kept(self.stages, keep, most, seed).variants]

    def loss(self, inputs: str | Tokens | Batch, order: Sequence[int] | None = None) -> float:
        """Return the mean cross-entropy in nats per token of a text, of tokens, or of a batch.

        In a text or tokens, each token is predicted from those before it. `order` names the stages
        that run, the data stage first: those of the model by default.

        Raises:
            InputError: if a sequence is longer than the model's context, or the order is none.
        """
        batch = inputs if isinstance(inputs, dict) else self._batch(self._tokens(inputs))
        x = self.run(self._order(order), batch)
        nats, tokens = self.sum_of_losses(x, jnp.asarray(batch["targets"])).tolist()
        return nats / tokens

    def log_probabilities(
        self, batch: Batch, order: Sequence[int] | None = None
    ) -> Float32[np.ndarray, "sequence position"]:
        """Return the log-probability of each target of a batch in nats; 0 where it is not counted.

        That is one number for each token: nothing of the vocabulary's size leaves the data stage,
        which holds logits of a chunk of tokens at a time. Documents of one sequence do not see each
        other where the batch says where they begin. `order` is as in `loss`.
        """
        x = self.run(self._order(order), batch)
        nats, _ = self.scores(x, jnp.asarray(batch["targets"]))
        return 0.0 - np.asarray(nats)  # And not -0.0, where there is no target.

    def logits(
        self, inputs: str | Tokens, order: Sequence[int] | None = None
    ) -> Float[np.ndarray, "*sequence position vocabulary"]:
        """Return the logits of the next token at each position of a text or of token sequences.

        A text is taken with the tokenizer's begin mark, so it has one position more than tokens.
        `order` is as in `loss`, and so are errors.
        """
        tokens = self._tokens(inputs)
        x = self.run(self._order(order), self._batch(tokens, predicted=0))
        logits = np.asarray(_logits(self.structures[0], self.parameters[0], x))
        shown = logits[:, : tokens.shape[-1]]
        return shown if tokens.ndim > 1 else shown[0]

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 100,
        order: Sequence[int] | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 (it is frozen)
    ) -> Prompt:
        """Go on from a text by a text, or from tokens by tokens: at most `max_new_tokens`.

        They are drawn as `sampling` says, by all stages or those of `order`, until the end mark.

        Raises:
            InputError: if prompt and tokens are longer than the model's context.
        """
        chosen = replace(self, order=self._order(order))
        return continuation(chosen, self.tokenizer, prompt, max_new_tokens, sampling)

    def decoder(self, slots: int, length: int, scales: ScaleTable | None = None) -> StageExecutor:
        """Return what a `Generator` draws tokens with: `slots` sequences of `length` positions.

        `scales` are as `StageExecutor` takes them.
        """
        return StageExecutor(self, self.default_order, slots, length, scales=scales)

    def likelihoods(
        self, batch: Batch
    ) -> tuple[Float[np.ndarray, " sequence"], Bool[np.ndarray, " sequence"]]:
        """Log-likelihood in nats of each sequence's targets, and whether each is the likeliest."""
        sequences, longest = batch["targets"].shape
        counted = batch["targets"] != IGNORED_TARGET
        lengths = (counted * np.arange(1, longest + 1)).max(axis=1)
        nats, greedy = np.zeros(sequences, np.float32), np.ones(sequences, bool)
        start, is_cpu = 0, jax.default_backend() == "cpu"
        while lengths[start:].any():
            length = padded_length(int(lengths[start:].max()), longest)
            at_once = min(max(1, CPU_TOKENS // length), sequences) if is_cpu else sequences
            rows = slice(start, min(start + at_once, sequences))
            missing = (0, at_once - (rows.stop - start)), (0, 0)  # So that few shapes are compiled.
            part: Any = {k: np.pad(own[rows, :length], missing) for k, own in {**batch}.items()}
            x = self.run(self.default_order, part)
            losses, are_greedy = self.scores(x, jnp.asarray(part["targets"]))
            count = rows.stop - start
            nats[rows] = -np.asarray(losses).sum(axis=1)[:count]
            greedy[rows] = np.logical_and.reduce(are_greedy, axis=1)[:count]
            start = rows.stop
        return nats, greedy

    def _tokens(self, inputs: str | Tokens) -> Int[np.ndarray, "*sequence position"]:
        if isinstance(inputs, str):
            return np.array([self.tokenizer.begin, *self.tokenizer.encode(inputs)], np.int32)
        return np.asarray(inputs, np.int32)

    def _order(self, order: Sequence[int] | None) -> StageOrder:
        if order is None:
            return self.default_order
        return checked_order(order, self.stages, "order", order)

    def _batch(self, tokens: Int[np.ndarray, "*sequence position"], predicted: int = 1) -> Batch:
        """Sequences to run, padded; in each, the last so many tokens are only predicted."""
        rows, context = np.atleast_2d(tokens), self.config.context
        length = rows.shape[1] - predicted
        if not 0 < length <= context:
            raise InputError(
                "tokens",
                rows.shape[1],
                f"the model accepts sequences of {1 + predicted} to {context + predicted} tokens",
                "Shorten the sequences" if length > 0 else "Give longer sequences",
            )
        shape = len(rows), padded_length(length, context)
        inputs, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED_TARGET, np.int32)
        inputs[:, :length] = rows[:, :length]
        targets[:, : rows.shape[1] - 1] = rows[:, 1:]
        return {"tokens": inputs, "targets": targets}

    def embed(self, batch: Batch) -> Float[Array, "sequence position width"]:
        """Return the residual stream after the data stage, with which every order begins."""
        return _apply(self.structures[0], self.parameters[0], marked_tokens(batch))

    def apply(
        self, stage: int, x: Float[Array, "batch time width"]
    ) -> Float[Array, "batch time width"]:
        """Return the residual stream after one of the other stages."""
        return _apply(self.structures[stage], self.parameters[stage], x)

    def run(self, order: Sequence[int], batch: Batch) -> Float[Array, "sequence position width"]:
        """Return the residual stream after stages in an order that begins with the data stage."""
        return functools.reduce(lambda x, stage: self.apply(stage, x), order[1:], self.embed(batch))

    def sum_of_losses(
        self, x: Float[Array, "batch time width"], targets: Int[Array, "batch time"]
    ) -> Float[Array, 2]:
        """Return the sum of the losses in nats, and the number of targets."""
        return _loss(self.structures[0], self.parameters[0], x, targets)

    def scores(
        self, x: Float[Array, "batch time channels"], targets: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time"], Bool[Array, "batch time"]]:
        """Return the cross-entropy [nats] of each target, and whether it is the likeliest token."""
        return _scores(self.structures[0], self.parameters[0], x, targets)


@functools.partial(jax.jit, static_argnums=0)
def _apply(structure: StageStructure, parameters: Any, inputs: Array) -> Array:
    return structure.merge(parameters)(inputs)


@functools.partial(jax.jit, static_argnums=0)
def _loss(structure: StageStructure, parameters: Any, x: Array, targets: Array) -> Array:
    return jnp.stack(structure.merge(parameters).loss(x, targets))


@functools.partial(jax.jit, static_argnums=0)
def _scores(
    structure: StageStructure, parameters: Any, x: Array, targets: Array
) -> tuple[Array, Array]:
    return structure.merge(parameters).scores(x, targets)


@functools.partial(jax.jit, static_argnums=0)
def _logits(structure: StageStructure, parameters: Any, x: Array) -> Array:
    return structure.merge(parameters).logits(x)
