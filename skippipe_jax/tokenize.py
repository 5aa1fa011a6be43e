"""Tokenize text once, so that training reads tokens; train a tokenizer for it, too.

python -m skippipe_jax.tokenize INPUT... -o DIR
"""

from __future__ import annotations

import argparse
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
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer
from skippipe_sched import fields
from skippipe_sched.errors import InputError, run_command
from tqdm import tqdm

from skippipe_jax.config import DocumentSource
from skippipe_jax.config.extras import require
from skippipe_jax.config.tokenizer import BYTES, TOKENIZER_FOLDER
from skippipe_jax.data.corpus import cut_in_two, groups, place_of, texts_of
from skippipe_jax.data.documents import Document, read_documents, require_apart
from skippipe_jax.data.token_shards import PARTS, PartWriter, TokenIndex, write_index
from skippipe_jax.data.tokenizer import (
    MARKS,
    Tokenizer,
    copy_tokenizer,
    cut,
    encode_documents,
    load_tokenizer,
    token_dtype,
    write_tokenizer,
)
from skippipe_jax.storage.new_folder import new_folder

EPILOG = """\
DIR is written anew, and appears when it is whole. Documents are held out by a hash of their own: of
a file's name, or of a row's text; of a single document, the end is. Train on it with
  --set data.source=tokens --set data.path=DIR --set model.vocabulary_size=...
"""


def main() -> int:
    """Parse the command line and tokenize; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def train_bpe(
    documents: Iterable[tuple[Document, DocumentSource]], vocabulary_size: int, folder: Path
) -> None:
    """Train a byte-level BPE and write it to `folder`, as Hugging Face tokenizers are written.

    Raises:
        InputError: if a document is not UTF-8, or the package is missing.
    """
    package = require("tokenizers", "hf", "--train-bpe", vocabulary_size)
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
    pieces = (piece for document, source in documents for piece in cut(document.decoded(source)))
    tokenizer.train_from_iterator(pieces, trainer)
    folder.mkdir(parents=True)
    write_tokenizer(tokenizer, folder)


def write_tokens(
    folder: Path,
    sources: Sequence[DocumentSource],
    tokenizer_name: str,
    held_out: float,
    seed: int,
    processes: int,
) -> TokenIndex:
    """Tokenize all documents into `folder`, which exists, and describe what was written.

    The same text gives the same files, however many processes there are.

    Raises:
        InputError: if a document cannot be read, or is of two sources, or one part would have all.
    """
    tokenizer = load_tokenizer(tokenizer_name, "--tokenizer")
    inputs, is_held_out = _inputs(sources, held_out, seed)
    dtype = token_dtype(tokenizer.vocabulary_size)
    writers = [PartWriter(folder, part, dtype) for part in PARTS]
    with tqdm(unit="B", unit_scale=True, disable=None, desc="tokenizing") as progress:
        for documents, tokens, ends in _tokenized(inputs, tokenizer_name, tokenizer, processes):
            lengths = np.diff(ends, prepend=0)
            out = np.array([is_held_out(document) for document in documents])
            for writer, chosen in zip(writers, (~out, out), strict=True):
                writer.add(tokens[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen]))
            progress.update(sum(len(document.text) for document in documents))
    parts = {part: writer.close() for part, writer in zip(PARTS, writers, strict=True)}
    total = sum(part.documents for part in parts.values())
    for name, part in parts.items():
        if total and not part.documents:
            raise InputError(
                "--held-out",
                held_out,
                f"the {name.replace('_', '-')} part would have none of the documents",
                "Give more of them, or another share or --seed",
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
    """The documents of each source, and what tells whether one of them is held out."""
    if len(sources) > 1:
        require_apart(sources)
    every = ((source, one) for source in sources for one in read_documents(source))
    first = list(itertools.islice(every, 2))
    if len(first) == 1:
        [(source, document)] = first
        beginning, end = cut_in_two(document, held_out)
        return [(source, [beginning, end])], lambda document: document is end
    inputs = [(source, read_documents(source)) for source in sources]
    return inputs, lambda document: place_of(document.key, seed) < held_out


Tokenized = tuple[Integer[np.ndarray, " token"], Int64[np.ndarray, " document"]]


def _tokenized(
    inputs: Inputs, name: str, tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[list[Document], *Tokenized]]:
    """Groups of documents in their order, with their tokens and where each ends."""
    work = (
        (group, texts_of(group, source, tokenizer))
        for source, documents in inputs
        for group in groups(documents)
    )
    if processes == 1:
        yield from ((group, *encode_documents(tokenizer, texts)) for group, texts in work)
        return
    running: deque[tuple[list[Document], Future[Tokenized]]] = deque()
    # Spawned: the packages' threads would not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_start_worker) as pool:
        for group, texts in work:
            running.append((group, pool.submit(_encode, name, texts)))
            # What waits lies in memory, so it must not be all of the text.
            if len(running) > 2 * processes:
                done, tokens = running.popleft()
                yield done, *tokens.result()
        for done, tokens in running:
            yield done, *tokens.result()


def _start_worker() -> None:
    """Let the parent alone handle Ctrl-C, and end when it has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode(name: str, texts: list[Any]) -> Tokenized:
    return encode_documents(_tokenizer_of_worker(name), texts)


@functools.cache
def _tokenizer_of_worker(name: str) -> Tokenizer:
    # There is a process for every core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_tokenizer(name)


def _run(arguments: argparse.Namespace) -> int:
    processes = fields.integer(arguments.processes, "--processes", 1)
    seed = fields.integer(arguments.seed, "--seed", 0, fields.LARGEST_SEED)
    held_out = fields.number(arguments.held_out, "--held-out", 0.0, above=True)
    if held_out >= 1:
        raise InputError("--held-out", held_out, "must be below 1", "Write a share such as 0.05")
    if arguments.tokenizer_only and arguments.train_bpe is None and arguments.tokenizer == BYTES:
        raise InputError(
            "--tokenizer-only", True, "bytes need no tokenizer", "Give --train-bpe or --tokenizer"
        )
    sources = [
        DocumentSource(arguments.source or _kind(path), path, arguments.text_field, "input")
        for path in arguments.input
    ]
    with new_folder(arguments.output, "--output") as folder:
        own, name = folder / TOKENIZER_FOLDER, arguments.tokenizer
        if arguments.train_bpe is not None:
            # Every byte is a token, so that any text can be written with them.
            least = 256 + len(MARKS)
            size = fields.integer(arguments.train_bpe, "--train-bpe", least)
            train_bpe(_training_documents(sources, held_out, seed), size, own)
            name = str(own)
        elif name != BYTES:
            copy_tokenizer(name, own, "--tokenizer")
        vocabulary_size = load_tokenizer(name, "--tokenizer").vocabulary_size
        written = f"a tokenizer of {vocabulary_size:,} tokens"
        if not arguments.tokenizer_only:
            index = write_tokens(folder, sources, name, held_out, seed, processes)
            if not index.parts["training"].tokens:
                documents = sum(part.documents for part in index.parts.values())
                raise InputError(
                    "INPUT",
                    " ".join(arguments.input),
                    f"holds {documents} documents, and none with text to train on",
                    "Name other files, or say by --source what they hold",
                )
            written = ", ".join(
                f"{part.tokens:,} tokens of {part.documents:,} documents ({kind.replace('_', ' ')})"
                for kind, part in index.parts.items()
            )
    print(f"{arguments.output}: {written}")
    if arguments.tokenizer_only:
        print(f"use it with: data.tokenizer={arguments.output / TOKENIZER_FOLDER}", end=" ")
    else:
        print(f"train on it with: data.source=tokens data.path={arguments.output}", end=" ")
    print(f"model.vocabulary_size={vocabulary_size}")
    return 0


def _training_documents(
    sources: Sequence[DocumentSource], held_out: float, seed: int
) -> Iterator[tuple[Document, DocumentSource]]:
    inputs, is_held_out = _inputs(sources, held_out, seed)
    for source, documents in inputs:
        yield from ((document, source) for document in documents if not is_held_out(document))


def _kind(path: str) -> str:
    """What an input holds, by its name."""
    for kind in ("jsonl", "parquet"):
        if f".{kind}" in Path(path).name:
            return kind
    return "text"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_jax.tokenize",
        description="Tokenize text into shards that training reads, or train a tokenizer for it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "input", nargs="+", metavar="INPUT", help="file, folder, glob or URL of the text"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder to write"
    )
    parser.add_argument(
        "--source",
        choices=("text", "jsonl", "parquet"),
        help="what the inputs hold (default: by their names, and text if these do not say)",
    )
    parser.add_argument("--text-field", default="text", help="its key or column (%(default)s)")
    own = parser.add_mutually_exclusive_group()
    own.add_argument(
        "--tokenizer",
        default=BYTES,
        metavar="PATH",
        help="tokenizer.json, SentencePiece tokenizer.model, or a folder with one (%(default)s)",
    )
    own.add_argument(
        "--train-bpe", type=int, metavar="SIZE", help="train a byte-level BPE of so many tokens"
    )
    parser.add_argument(
        "--tokenizer-only", action="store_true", help="write the tokenizer, and no tokens"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.05, help="share kept for evaluation (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides which (%(default)s)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="that tokenize (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
