"""Training part and held-out part of a text, as tokens.

A document belongs to one part as a whole, so no document of the held-out part is trained on.
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
from skippipe_jax.data.rows import TokenizedDocuments
from skippipe_jax.data.tokenizer import ByteTokenizer, Tokenizer, encode_documents, token_dtype

GROUP_BYTES = 1 << 20
"""Bytes of text that are tokenized at once."""


KEPT_SOURCES = 64
"""Number of sources whose tokens stay in memory."""


@dataclass(frozen=True)
class Corpus:
    """Both parts of a text, and a short hash that identifies the training part."""

    training: TokenizedDocuments
    held_out: TokenizedDocuments
    fingerprint: str


@functools.lru_cache(maxsize=KEPT_SOURCES)
def read_corpus(source: DocumentSource, tokenizer: Tokenizer, held_out: float, seed: int) -> Corpus:
    """Return the tokens of a source; those of a folder of tokens are read when they are needed.

    A source is read once per process, whatever it is mixed with.

    Raises:
        InputError: if it cannot be read or holds no text.
    """
    if source.kind == "tokens":
        return _open_tokens(source, tokenizer)
    documents = list(read_documents(source))
    if not documents:
        raise source.error("does not contain text", "Name a file or folder with text")
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
        digest.update(training.learnt.data)
    return Corpus(training, evaluation, digest.hexdigest())


def cut_in_two(document: Document, held_out: float) -> tuple[Document, Document]:
    """Split a single document into its beginning, for training, and its end, which is held out."""
    text = document.text
    cut = round(len(text) * (1 - held_out))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # in the middle of a character
        cut += 1
    return replace(document, text=text[:cut]), replace(document, text=text[cut:])


def place_of(key: bytes, seed: int) -> float:
    """Return a number in [0, 1) from a document's key alone; the lowest are held out."""
    digest = hashlib.blake2b(b"%d/%b" % (seed, key), digest_size=8)
    return int.from_bytes(digest.digest()) / 2**64


def held_out_of(keys: Sequence[bytes], held_out: float, seed: int) -> Bool[np.ndarray, " document"]:
    """Return which of the documents are held out.

    The hash of each document decides, independently of the others. Only if one part of several
    documents would be empty, the nearest document moves there, with all that are equal to it.
    """
    places = np.array([place_of(key, seed) for key in keys])
    chosen = places < held_out
    if len(keys) > 1 and not chosen.any():
        chosen = places == places.min()
    elif len(keys) > 1 and chosen.all():
        chosen = places < places.max()
    return chosen


def groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in groups of about `GROUP_BYTES`."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode(
    documents: Sequence[Document], source: DocumentSource, tokenizer: Tokenizer
) -> TokenizedDocuments:
    """Return the tokens of documents, of which there is at least one.

    Raises:
        InputError: if one is not UTF-8, or not a conversation in a source of conversations.
    """
    if source.kind != "chat":
        texts: list[Any] = [document.text for document in documents]
        if not isinstance(tokenizer, ByteTokenizer):
            texts = [document.decoded(source) for document in documents]
        return TokenizedDocuments(*encode_documents(tokenizer, texts))
    encoded = [encode_conversation(document, source, tokenizer) for document in documents]
    tokens, learnt = zip(*encoded, strict=True)
    ends = np.cumsum([len(one) for one in tokens])
    return TokenizedDocuments(np.concatenate(tokens), ends, np.concatenate(learnt))


def _tokenize(
    documents: Sequence[Document], source: DocumentSource, tokenizer: Tokenizer
) -> TokenizedDocuments:
    tokens = [np.empty(0, token_dtype(tokenizer.vocabulary_size))]
    lengths, learnt = [np.empty(0, np.int64)], [np.empty(0, bool)]
    for group in groups(documents):
        encoded = encode(group, source, tokenizer)
        tokens.append(encoded.tokens[:])
        lengths.append(np.diff(encoded.ends, prepend=0))
        if encoded.learnt is not None:
            learnt.append(encoded.learnt)
    all_tokens = np.concatenate(tokens)
    all_tokens.flags.writeable = False
    return TokenizedDocuments(
        all_tokens,
        np.cumsum(np.concatenate(lengths)),
        np.concatenate(learnt) if source.kind == "chat" else None,
    )


def _open_tokens(source: DocumentSource, tokenizer: Tokenizer) -> Corpus:
    field, value = source.origin
    folder = local_path(value)
    index = token_shards.read_index(folder, field)
    if index.tokenizer != tokenizer.digest:
        raise InputError(
            field,
            value,
            "contains tokens of another tokenizer than data.tokenizer",
            f"Set data.tokenizer to {value}/{TOKENIZER_FOLDER}, or tokenize the text again",
        )
    training, held_out = (
        token_shards.open_part(folder, part, index, field) for part in token_shards.PARTS
    )
    return Corpus(training, held_out, index.parts["training"].digest)


PRIORS_FRACTION = 0.25
"""Approximate fraction of the held-out documents on which priors are estimated."""


def documents_of_part(documents: TokenizedDocuments, part: str) -> TokenizedDocuments:
    """Return the documents of the part `priors` or `scores`, as a copy in memory.

    A document belongs to one part as a whole, by a hash of its tokens alone, so equal documents are
    in the same part with any seed. If one part would be empty, the nearest documents move, as in
    `held_out_of`. A single document, also one of which there are only copies, is split at a token;
    its beginning is for priors.
    """
    ends = np.asarray(documents.ends)
    starts = ends - np.diff(ends, prepend=0)
    keys = [
        _digest(documents.tokens[start:end])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    if len(set(keys)) == 1:
        size = int(ends[0])
        cuts = starts + min(max(round(size * PRIORS_FRACTION), 1), size - 1)
        return _spans(documents, *((starts, cuts) if part == "priors" else (cuts, ends)))
    chosen = held_out_of(keys, PRIORS_FRACTION, seed=0) == (part == "priors")
    return _spans(documents, starts[chosen], ends[chosen])


def _digest(tokens: Integer[np.ndarray, " token"]) -> bytes:
    # As int32, because tokens on disk may have another dtype than those of a text.
    return hashlib.blake2b(tokens.astype(np.int32).data, digest_size=16).digest()


def _spans(
    documents: TokenizedDocuments,
    starts: Int64[np.ndarray, " span"],
    ends: Int64[np.ndarray, " span"],
) -> TokenizedDocuments:
    """Return spans of the tokens, each as a document."""
    each = list(zip(starts.tolist(), ends.tolist(), strict=True))
    learnt = None
    if documents.learnt is not None:
        learnt = np.concatenate([documents.learnt[start:end] for start, end in each])
    tokens = np.concatenate([documents.tokens[start:end] for start, end in each])
    return TokenizedDocuments(tokens, np.cumsum(ends - starts), learnt)
