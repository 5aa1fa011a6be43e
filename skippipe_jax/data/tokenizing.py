"""Tokenization of text into shards, in several processes, and training of a tokenizer."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from skippipe_sched.errors import InputError
from tqdm import tqdm

from skippipe_jax.config import DocumentSource
from skippipe_jax.config.extras import require_extra
from skippipe_jax.data.chat import message_texts
from skippipe_jax.data.corpus import cut_in_two, encode, groups, place_of
from skippipe_jax.data.documents import Document, read_documents, require_disjoint
from skippipe_jax.data.rows import TokenizedDocuments
from skippipe_jax.data.token_shards import PARTS, PartWriter, TokenIndex, write_index
from skippipe_jax.data.tokenizer import (
    MARKS,
    Tokenizer,
    load_tokenizer,
    text_pieces,
    token_dtype,
    write_tokenizer,
)


def train_bpe(
    documents: Iterable[tuple[Document, DocumentSource]], vocabulary_size: int, folder: Path
) -> None:
    """Train a byte-level BPE, and write it to `folder` in the format of Hugging Face tokenizers.

    Raises:
        InputError: if a document is not UTF-8, or the package is missing.
    """
    package = require_extra("tokenizers", "hf", "--train-bpe", vocabulary_size)
    byte_level = package.pre_tokenizers.ByteLevel
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(MARKS.values()),
        initial_alphabet=byte_level.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    pieces = (
        piece for document, source in documents for piece in text_pieces(_text(document, source))
    )
    tokenizer.train_from_iterator(pieces, trainer)
    folder.mkdir(parents=True)
    write_tokenizer(tokenizer, folder)


def _text(document: Document, source: DocumentSource) -> str:
    return message_texts(document, source) if source.kind == "chat" else document.decoded(source)


def write_tokens(
    folder: Path,
    sources: Sequence[DocumentSource],
    tokenizer_name: str,
    held_out: float,
    seed: int,
    processes: int,
) -> TokenIndex:
    """Tokenize all documents into `folder`, which exists, and return the index of its files.

    The same text gives the same files with any number of processes. Either all sources are
    conversations, or none is.

    Raises:
        InputError: if a document cannot be read, or is in two sources, or one part would have all.
    """
    assert len({source.kind == "chat" for source in sources}) == 1
    tokenizer = load_tokenizer(tokenizer_name, "--tokenizer")
    inputs, is_held_out = _inputs(sources, held_out, seed)
    dtype = token_dtype(tokenizer.vocabulary_size)
    writers = [PartWriter(folder, part, dtype) for part in PARTS]
    with tqdm(unit="B", unit_scale=True, disable=None, desc="tokenizing") as progress:
        encoded = _tokenized(inputs, tokenizer_name, tokenizer, processes)
        for documents, group in encoded:
            lengths, learnt = np.diff(group.ends, prepend=0), group.learnt
            is_out = np.array([is_held_out(document) for document in documents])
            for writer, chosen in zip(writers, (~is_out, is_out), strict=True):
                is_selected = np.repeat(chosen, lengths)
                selected_learnt = None if learnt is None else learnt[is_selected]
                tokens = group.tokens[:][is_selected]
                writer.add(tokens, np.cumsum(lengths[chosen]), selected_learnt)
            progress.update(sum(len(document.text) for document in documents))
    parts = {part: writer.close() for part, writer in zip(PARTS, writers, strict=True)}
    total = sum(part.documents for part in parts.values())
    for name, part in parts.items():
        if total and not part.documents:
            raise InputError(
                "--held-out",
                held_out,
                f"the {name.replace('_', '-')} part would have no documents",
                "Add documents, or change --held-out or --seed",
            )
    index = TokenIndex(
        tokenizer.digest, tokenizer.vocabulary_size, dtype.name, held_out, seed, parts
    )
    write_index(folder, index)
    return index


Inputs = Sequence[tuple[DocumentSource, Iterable[Document]]]


def _inputs(
    sources: Sequence[DocumentSource], held_out: float, seed: int
) -> tuple[Inputs, Callable[[Document], bool]]:
    """Return the documents of each source, and a predicate for the held-out ones."""
    if len(sources) > 1:
        require_disjoint(tuple(sources))
    all_documents = ((source, one) for source in sources for one in read_documents(source))
    first = list(itertools.islice(all_documents, 2))
    if len(first) == 1 and first[0][0].kind != "chat":
        [(source, document)] = first
        beginning, end = cut_in_two(document, held_out)
        return [(source, [beginning, end])], lambda document: document is end
    inputs = [(source, read_documents(source)) for source in sources]
    return inputs, lambda document: place_of(document.key, seed) < held_out


def _tokenized(
    inputs: Inputs, name: str, tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[list[Document], TokenizedDocuments]]:
    """Yield groups of documents in their order, each encoded."""
    work = ((group, source) for source, documents in inputs for group in groups(documents))
    if processes == 1:
        yield from ((group, encode(group, source, tokenizer)) for group, source in work)
        return
    running: deque[tuple[list[Document], Future[TokenizedDocuments]]] = deque()
    # Spawned: the packages' threads would not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_start_worker) as pool:
        for group, source in work:
            running.append((group, pool.submit(_encode, name, group, source)))
            # Waiting groups take memory, so they must not be all of the text.
            if len(running) > 2 * processes:
                done, encoded = running.popleft()
                yield done, encoded.result()
        for done, encoded in running:
            yield done, encoded.result()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and exit when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode(name: str, documents: list[Document], source: DocumentSource) -> TokenizedDocuments:
    return encode(documents, source, _tokenizer_of_worker(name))


@functools.cache
def _tokenizer_of_worker(name: str) -> Tokenizer:
    # There already is a process for each core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_tokenizer(name)


def training_documents(
    sources: Sequence[DocumentSource], held_out: float, seed: int
) -> Iterator[tuple[Document, DocumentSource]]:
    """Yield the documents that are not held out, each with its source."""
    inputs, is_held_out = _inputs(sources, held_out, seed)
    for source, documents in inputs:
        yield from ((document, source) for document in documents if not is_held_out(document))
