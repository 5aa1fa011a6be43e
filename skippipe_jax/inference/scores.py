"""The scores of a model: the log-probability of every target of a held-out text, in a file.

That is all that experts need to be mixed, so each may stay where it has been trained.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from skippipe_sched.errors import InputError
from tqdm import tqdm

from skippipe_jax.config import DataConfig
from skippipe_jax.data.batches import (
    IGNORED_TARGET,
    Batch,
    document_starts,
    held_out_batches,
    tokenizer_of,
)
from skippipe_jax.data.tokenizer import load_tokenizer
from skippipe_jax.ensemble import KEPT, cached_log_prior, target_log_weights, weighed
from skippipe_jax.inference.ensemble import Ensemble
from skippipe_jax.inference.remote_model import RemoteModel
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.storage.files import atomic_write

Scorer = StagedModel | Ensemble | RemoteModel
"""Models that give the log-probability of each target of a batch."""

_ARRAYS = ("log_probabilities", "counted", "resets")
_TEXTS = ("text", "tokenizer", "domain", "part")


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of a model on the held-out text of a domain.

    Attributes:
        log_probabilities: of each target, in nats; 0 where there is none that counts.
        counted: which positions have a target that counts.
        resets: where a document starts, so that nothing is known of those before.
        text: digest of tokens, targets and starts of documents.
        tokenizer: digest of the tokenizer.
        domain: which source of a mixture it is.
        part: which of `HELD_OUT_PARTS`.
    """

    log_probabilities: Float[np.ndarray, "row position"]
    counted: Bool[np.ndarray, "row position"]
    resets: Bool[np.ndarray, "row position"]
    text: str
    tokenizer: str
    domain: str
    part: str

    @property
    def tokens(self) -> int:
        """Number of targets that count."""
        return int(self.counted.sum())

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return -float(self.log_probabilities.sum(dtype=np.float64)) / self.tokens

    def save(self, path: Path) -> None:
        """Write a file that is there whole or not at all."""
        content = io.BytesIO()
        np.savez(content, **{name: getattr(self, name) for name in (*_ARRAYS, *_TEXTS)})
        atomic_write(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Scores:
        """Read what `save` has written.

        Raises:
            InputError: if the file cannot be read, or holds no scores.
        """
        try:
            with path.open("rb") as opened, np.lib.npyio.NpzFile(opened) as file:
                log_probabilities, counted, resets = (file[name] for name in _ARRAYS)
                text, tokenizer, domain, part = (str(file[name]) for name in _TEXTS)
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            problem = f"cannot be read as scores: {error}"
            raise InputError("scores", str(path), problem, "Score the model again") from error
        return cls(log_probabilities, counted, resets, text, tokenizer, domain, part)


def score(model: Scorer, data: DataConfig, domain: str, part: str, sequences: int) -> Scores:
    """Return a model's scores of at most `sequences` held-out sequences of a part of a domain.

    Which sequences these are does not depend on the model, nor on the size of microbatches.

    Raises:
        InputError: as `held_out_batches` does, or if the model takes other tokens than the data's,
            or shorter sequences.
    """
    tokenizer = load_tokenizer(tokenizer_of(data))
    if model.tokenizer.digest != tokenizer.digest:
        problem = "is not the model's tokenizer"
        raise InputError("data.tokenizer", data.tokenizer, problem, "Set the model's tokenizer")
    if data.sequence_length > model.context:
        problem = f"is longer than the model's context of {model.context} tokens"
        raise InputError("data.sequence_length", data.sequence_length, problem, "Shorten it")
    text = hashlib.blake2b(digest_size=16)
    batches = _batches(data, domain, part, sequences, text)
    parts: list[tuple[np.ndarray, ...]] = []
    for batch, scored, resets in tqdm(
        batches, unit="batch", disable=None, leave=False, desc=domain
    ):
        counted = batch["targets"] != IGNORED_TARGET
        parts.append((model.log_probabilities(batch)[scored], counted[scored], resets[scored]))
    log_probabilities, counted, resets = map(np.concatenate, zip(*parts, strict=True))
    return Scores(
        log_probabilities, counted, resets, text.hexdigest(), tokenizer.digest, domain, part
    )


def text_of(data: DataConfig, domain: str, part: str, sequences: int) -> str:
    """Return the `text` of the scores that `score` would give of any model.

    Raises:
        InputError: as `held_out_batches` does.
    """
    text = hashlib.blake2b(digest_size=16)
    for _ in _batches(data, domain, part, sequences, text):
        pass
    return text.hexdigest()


def _batches(
    data: DataConfig, domain: str, part: str, sequences: int, text: Any
) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """Yield each batch, the rows to score, and the starts of documents; `text` hashes them."""
    text.update(b"%d" % data.sequence_length)
    begin = load_tokenizer(tokenizer_of(data)).begin
    size = min(data.microbatch_size, sequences)
    for batch in held_out_batches(data, size, sequences, part=part, domain=domain):
        # Rows without a target only fill up the last batch.
        scored = np.flatnonzero((batch["targets"] != IGNORED_TARGET).any(axis=1))
        resets = document_starts(batch, begin)
        for row in scored:
            for array in (batch["tokens"], batch["targets"], resets):
                text.update(array[row].data)
        yield batch, scored, resets


def scores_of_mixture(
    each: Sequence[Scores],
    prior: str,
    how: str,
    log_prior: Float[np.ndarray, " expert"] | None = None,
    decay: float = KEPT,
) -> Scores:
    """Return the scores of experts together, from those of each on the same text.

    The arguments are those of `ensemble.target_log_weights`.
    """
    log_p, resets = _stacked(each)
    log_w = target_log_weights(
        log_p, resets, prior=prior, how=how, log_prior=log_prior, decay=decay
    )
    return replace(each[0], log_probabilities=weighed(log_p, log_w))


def log_prior_of(each: Sequence[Scores], decay: float = KEPT) -> Float[np.ndarray, " expert"]:
    """Return the cached prior over experts that their scores of the part for priors give."""
    return cached_log_prior(*_stacked(each), decay)


def _stacked(each: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities [expert sequence position], and where documents start."""
    return np.stack([one.log_probabilities for one in each]), each[0].resets


def require_same_text(scores: Mapping[str, Scores]) -> None:
    """Refuse scores of several models, by their names, that are not of the same tokens.

    Raises:
        InputError: naming the first model whose scores are of another tokenizer or another text
            than those of the first.
    """
    (first, of_first), *others = scores.items()
    for name, other in others:
        if other.tokenizer != of_first.tokenizer:
            problem = f"its tokenizer differs from that of {first}"
            remedy = "Mix experts with the same tokenizer"
            raise InputError("scores", name, problem, remedy)
        if other.text != of_first.text:
            problem = (
                f"the scores are of another text ({other.domain}, {other.part}) than those of "
            )
            problem += f"{first} ({of_first.domain}, {of_first.part})"
            raise InputError("scores", name, problem, "Score both on the same sequences")
