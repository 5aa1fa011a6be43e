"""The command that tokenizes text in advance, or trains a tokenizer for it."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched import fields
from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import accept_old_names
from skippipe_jax.config import DocumentSource
from skippipe_jax.config.data import BYTES, CHAT_TEMPLATE, TOKENIZER_FOLDER, kind_of, require_day

if TYPE_CHECKING:
    from skippipe_jax.data.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Tokenize text into shards for data.source: tokens, or train a tokenizer."
    about = "file, folder, glob or URL of the text"
    parser.add_argument("input", nargs="+", metavar="INPUT", help=about)
    about = "new folder"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help=about)
    about = "format (default: jsonl or parquet by file name, else text)"
    parser.add_argument("--source", choices=("text", "jsonl", "parquet", "chat"), help=about)
    parser.add_argument("--text-field", default="text", help="key or column of the text")
    about = "date for chat templates that write one, such as 2026-11-22"
    parser.add_argument("--today", metavar="DAY", help=about)
    about = "plain, chatml, llama3 or a Jinja file (default: the tokenizer's)"
    parser.add_argument("--chat-template", metavar="NAME", help=about)
    tokenizer = parser.add_mutually_exclusive_group()
    about = "tokenizer.json, a folder with one, or bytes"
    tokenizer.add_argument("--tokenizer", default=BYTES, metavar="PATH", help=about)
    about = "train a byte-level BPE tokenizer with this vocabulary size"
    tokenizer.add_argument("--train-bpe", type=int, metavar="SIZE", help=about)
    parser.add_argument("--tokenizer-only", action="store_true", help="write only the tokenizer")
    about = "fraction of documents, or of a single one at its end, held out for evaluation"
    parser.add_argument("--held-out", type=float, default=0.05, metavar="FRACTION", help=about)
    about = "seed of the selection of held-out documents"
    parser.add_argument("--seed", type=int, default=0, help=about)
    about = "number of processes (default: one per core)"
    parser.add_argument("--num-workers", type=int, metavar="N", help=about)
    accept_old_names(parser, processes="--num-workers")


def run(arguments: argparse.Namespace) -> int:
    """Tokenize and write; return the exit code."""
    with loading():
        from skippipe_jax.data.tokenizer import MARKS, copy_tokenizer, load_tokenizer
        from skippipe_jax.data.tokenizing import train_bpe, training_documents, write_tokens
        from skippipe_jax.storage.files import new_directory

    cores = os.cpu_count() or 1
    processes = fields.integer(
        cores if arguments.num_workers is None else arguments.num_workers, "--num-workers", 1
    )
    seed = fields.integer(arguments.seed, "--seed", 0, fields.MAX_SEED)
    held_out = fields.number(arguments.held_out, "--held-out", 0.0, above=True)
    if held_out >= 1:
        raise InputError("--held-out", held_out, "must be below 1", "Write a fraction such as 0.05")
    if arguments.tokenizer_only and arguments.train_bpe is None and arguments.tokenizer == BYTES:
        raise InputError(
            "--tokenizer-only", True, "requires a tokenizer", "Add --train-bpe or --tokenizer"
        )
    if arguments.today is not None:
        require_day(arguments.today, "--today")
    sources = [
        DocumentSource(
            arguments.source or kind_of(path),
            path,
            arguments.text_field,
            "input",
            arguments.today,
            arguments.chat_template,
        )
        for path in arguments.input
    ]
    _require_outside(arguments.output, arguments.input)
    with new_directory(arguments.output, "--output") as folder:
        tokenizer_folder, name = folder / TOKENIZER_FOLDER, arguments.tokenizer
        if arguments.train_bpe is not None:
            # Every byte is a token, so that any text can be encoded.
            min_size = 256 + len(MARKS)
            size = fields.integer(arguments.train_bpe, "--train-bpe", min_size)
            train_bpe(training_documents(sources, held_out, seed), size, tokenizer_folder)
            name = str(tokenizer_folder)
        elif name != BYTES:
            copy_tokenizer(name, tokenizer_folder, "--tokenizer")
        tokenizer = load_tokenizer(name, "--tokenizer")
        vocabulary_size = tokenizer.vocabulary_size
        _write_template(arguments.chat_template, tokenizer_folder, sources, tokenizer)
        summary = f"a tokenizer of {vocabulary_size:,} tokens"
        if not arguments.tokenizer_only:
            index = write_tokens(folder, sources, name, held_out, seed, processes)
            if not index.parts["training"].tokens:
                documents = sum(part.documents for part in index.parts.values())
                raise InputError(
                    "INPUT",
                    " ".join(arguments.input),
                    f"has {documents} documents, none with training text",
                    "Give other files, or their format with --source",
                )
            summary = ", ".join(
                f"{part.tokens:,} tokens of {part.documents:,} documents ({kind.replace('_', ' ')})"
                for kind, part in index.parts.items()
            )
            summary += f", {_tokenizer_phrase(arguments)}"
    print(f"{arguments.output}: {summary}")
    if arguments.tokenizer_only:
        print(f"use it with: data.tokenizer={arguments.output / TOKENIZER_FOLDER}")
    else:
        packing = ["--set", "data.packing=documents"] if arguments.source == "chat" else []
        words = ["skippipe", "train", "--data", str(arguments.output), *packing]
        print(f"train on it with:\n{shlex.join(words)}")
    return 0


def _require_outside(output: Path, texts: Sequence[str]) -> None:
    """Refuse an output folder that lies in a folder that is read as text."""
    for path in map(Path, texts):
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            problem = f"is in {path}, which is read as text"
            raise InputError("--output", str(output), problem, "Name a folder outside of it")


def _tokenizer_phrase(arguments: argparse.Namespace) -> str:
    """Return a phrase that names the tokenizer of the tokens."""
    if arguments.train_bpe is not None:
        return "with a new BPE tokenizer"
    if arguments.tokenizer == BYTES:
        return "as bytes; for a pretrained model, give its --tokenizer"
    return f"with the tokenizer {arguments.tokenizer}"


def _write_template(
    name: str | None, folder: Path, sources: Sequence[DocumentSource], tokenizer: Tokenizer
) -> None:
    """Write the chat template beside the tokenizer in `folder`; warn if there is none."""
    from skippipe_jax.data.chat import template_text, template_warning

    if name is not None and folder.is_dir():
        text = template_text(name, "--chat-template")
        (folder / CHAT_TEMPLATE).write_text(text, encoding="utf-8")
    chats = [source for source in sources if source.kind == "chat"]
    for sentence in template_warning(chats, tokenizer):
        log.warning(sentence)
