"""A text as the tokens of its training part and its held-out part.

A document belongs to one part as a whole, so nothing that is measured on the held-out part was
trained on.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer
from skippipe_sched.errors import InputError

from skippipe_jax.config import DocumentSource
from skippipe_jax.config.data import TOKENIZER_FOLDER
from skippipe_jax.data import token_shards
from skippipe_jax.data.chat import encode_conversation
from skippipe_jax.data.documents import Document, local_path, read_documents
from skippipe_jax.data.rows import Learnt, TokenizedDocuments
from skippipe_jax.data.tokenizer import ByteTokenizer, Tokenizer, encode_documents, token_dtype

GROUP_BYTES = 1 << 20
"""Bytes of text that are tokenized at once."""


KEPT_SOURCES = 64
"""Of so many sources the tokens stay in memory."""


@dataclass(frozen=True)
class Corpus:
    """Both parts of a text, and a short hash that tells the training part from any other."""

    training: TokenizedDocuments
    held_out: TokenizedDocuments
    fingerprint: str


@functools.lru_cache(maxsize=KEPT_SOURCES)
def read_corpus(source: DocumentSource, tokenizer: Tokenizer, held_out: float, seed: int) -> Corpus:
    """The tokens of a source; of a folder of tokens, a view that reads them as they are needed.

    A source is read once per process, whichever others it is mixed with.

    Raises:
        InputError: if it cannot be read or holds no text.
    """
    if source.kind == "tokens":
        return _open_tokens(source, tokenizer)
    documents = list(read_documents(source))
    if not documents:
        raise InputError(*source.origin, "holds no text", "Name a file or folder with text")
    if len(documents) == 1 and source.kind != "chat":
        parts = [[part] for part in cut_in_two(documents[0], held_out)]
    else:
        chosen = held_out_of([document.key for document in documents], held_out, seed)
        parts = [
            [one for one, out in zip(documents, chosen, strict=True) if bool(out) == part]
            for part in (False, True)
        ]
    training, evaluation = (_tokenize(part, source, tokenizer) for part in parts)
    digest = hashlib.blake2b(np.ascontiguousarray(training.tokens[:]).data, digest_size=8)
    if training.learnt is not None:
        digest.update(training.learnt.of(0, training.tokens.size).data)
    return Corpus(training, evaluation, digest.hexdigest())


def cut_in_two(document: Document, held_out: float) -> tuple[Document, Document]:
    """The beginning and the end of a document that is alone, of which the end is held out."""
    text = document.text
    cut = round(len(text) * (1 - held_out))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # in the middle of a character
        cut += 1
    return replace(document, text=text[:cut]), replace(document, text=text[cut:])


def place_of(key: bytes, seed: int) -> float:
    """A number in [0, 1) that a document's key decides alone; the lowest are held out."""
    digest = hashlib.blake2b(b"%d/%b" % (seed, key), digest_size=8)
    return int.from_bytes(digest.digest()) / 2**64


def held_out_of(keys: Sequence[bytes], held_out: float, seed: int) -> Bool[np.ndarray, " document"]:
    """Return which of the documents are held out.

    Each one's own hash decides, whatever other documents there are; only where that would leave
    one of the two parts of several documents empty does the one nearest to it move, with all that
    are like it.
    """
    places = np.array([place_of(key, seed) for key in keys])
    chosen = places < held_out
    if len(keys) > 1 and not chosen.any():
        chosen = places == places.min()
    elif len(keys) > 1 and chosen.all():
        chosen = places < places.max()
    return chosen


def groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Return the documents in groups of about `GROUP_BYTES`."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def texts_of(
    documents: Sequence[Document], source: DocumentSource, tokenizer: Tokenizer
) -> list[Any]:
    """What the tokenizer takes: bytes are bytes to one of bytes, and otherwise must be UTF-8."""
    if isinstance(tokenizer, ByteTokenizer):
        return [document.text for document in documents]
    return [document.decoded(source) for document in documents]


Encoded = tuple[
    Integer[np.ndarray, " token"],
    Int64[np.ndarray, " document"],
    Bool[np.ndarray, " token"] | None,
]


def encode(documents: Sequence[Document], source: DocumentSource, tokenizer: Tokenizer) -> Encoded:
    """The tokens of some documents, where each ends, and which are learnt; None where all are.

    Raises:
        InputError: if one is not UTF-8, or no conversation where the source has these.
    """
    if source.kind != "chat":
        return *encode_documents(tokenizer, texts_of(documents, source, tokenizer)), None
    encoded = [encode_conversation(document, source, tokenizer) for document in documents]
    tokens, learnt = zip(*encoded, strict=True)
    return np.concatenate(tokens), np.cumsum([len(one) for one in tokens]), np.concatenate(learnt)


def _tokenize(
    documents: Sequence[Document], source: DocumentSource, tokenizer: Tokenizer
) -> TokenizedDocuments:
    tokens = [np.empty(0, token_dtype(tokenizer.vocabulary_size))]
    lengths, learnt = [np.empty(0, np.int64)], [np.empty(0, bool)]
    for group in groups(documents):
        of_group, ends, learnt_of_group = encode(group, source, tokenizer)
        tokens.append(of_group)
        lengths.append(np.diff(ends, prepend=0))
        if learnt_of_group is not None:
            learnt.append(learnt_of_group)
    together = np.concatenate(tokens)
    together.flags.writeable = False
    return TokenizedDocuments(
        together,
        np.cumsum(np.concatenate(lengths)),
        Learnt.where(np.concatenate(learnt)) if source.kind == "chat" else None,
    )


def _open_tokens(source: DocumentSource, tokenizer: Tokenizer) -> Corpus:
    field, value = source.origin
    folder = local_path(value)
    index = token_shards.read_index(folder, field)
    if index.tokenizer != tokenizer.digest:
        raise InputError(
            "data.tokenizer",
            None,
            f"the tokens in {value} were made by another tokenizer",
            f"Name {value}/{TOKENIZER_FOLDER}, or tokenize the text again",
        )
    training, held_out = (
        token_shards.open_part(folder, part, index, field) for part in token_shards.PARTS
    )
    return Corpus(training, held_out, index.parts["training"].digest)


PRIORS_SHARE = 0.25
"""About which share of the held-out documents priors are estimated on."""


def part_of(documents: TokenizedDocuments, part: str) -> TokenizedDocuments:
    """Return the documents of the part `priors` or `scores`, as a copy in memory.

    A document belongs to one part as a whole, by a hash of its tokens alone, so equal ones are in
    the same part, whatever the seeds of a run. Where that would leave one of the parts empty, the
    nearest documents move, as among all that are held out. A document that is alone, or has only
    copies beside it, is cut in two at a token; its beginning is for priors.
    """
    ends = np.asarray(documents.ends)
    starts = ends - np.diff(ends, prepend=0)
    keys = [
        _digest(documents.tokens[start:end])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    if len(set(keys)) == 1:
        size = int(ends[0])
        cuts = starts + min(max(round(size * PRIORS_SHARE), 1), size - 1)
        return _spans(documents, *((starts, cuts) if part == "priors" else (cuts, ends)))
    chosen = held_out_of(keys, PRIORS_SHARE, seed=0) == (part == "priors")
    return _spans(documents, starts[chosen], ends[chosen])


def _digest(tokens: Integer[np.ndarray, " token"]) -> bytes:
    # Not as they lie there: tokens on disk may have another dtype than those of a text.
    return hashlib.blake2b(tokens.astype(np.int32).data, digest_size=16).digest()


def _spans(
    documents: TokenizedDocuments,
    starts: Int64[np.ndarray, " span"],
    ends: Int64[np.ndarray, " span"],
) -> TokenizedDocuments:
    """Spans of the tokens, each as a document."""
    each = list(zip(starts.tolist(), ends.tolist(), strict=True))
    learnt = None
    if documents.learnt is not None:
        learnt = Learnt.where(np.concatenate([documents.learnt.of(*span) for span in each]))
    tokens = np.concatenate([documents.tokens[start:end] for start, end in each])
    return TokenizedDocuments(tokens, np.cumsum(ends - starts), learnt)
