"""Batches of token sequences from text; each data node reads its own microbatches.

    files  ->  documents (training | held out)  ->  tokens  ->  rows  ->  batches

Grain shuffles the rows of each source again in every epoch, and any microbatch can be read by its
number: the number of microbatches read is the only state, and it can be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import grain
import numpy as np
from jaxtyping import Bool, Int32
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig, DocumentSource
from skippipe_jax.config.data import BYTES, HELD_OUT_PARTS, TOKENIZER_FOLDER
from skippipe_jax.data.corpus import Corpus, documents_of_part, read_corpus
from skippipe_jax.data.documents import local_path, require_disjoint
from skippipe_jax.data.rows import (
    IGNORED_TARGET,
    Interleaving,
    PackedDocuments,
    Pieces,
    Rows,
    TokenizedDocuments,
    Windows,
    cut_documents,
)
from skippipe_jax.data.tokenizer import Tokenizer, load_tokenizer

# A prefetch thread would only compete for the interpreter with the thread that needs the batch.
_READ_IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def tokenizer_of(config: DataConfig) -> str:
    """Return the name of the data's tokenizer, as `load_tokenizer` takes it."""
    if config.tokenizer is not None:
        return config.tokenizer
    folders = [
        local_path(one.path) for one in config.sources() if one.kind == "tokens" and one.path
    ]
    of_tokens = [Path(folder, TOKENIZER_FOLDER) for folder in folders]
    return next((str(folder) for folder in of_tokens if folder.is_dir()), BYTES)


def check_vocabulary(vocabulary_size: int, tokenizer: Tokenizer) -> None:
    """Raise `InputError` if the vocabulary of a model is too small for the tokenizer."""
    if vocabulary_size < tokenizer.vocabulary_size:
        raise InputError(
            "model.vocabulary_size",
            vocabulary_size,
            "is too small for the tokenizer",
            f"Write {tokenizer.vocabulary_size} or more",
        )


class Batch(TypedDict):
    """Arrays of one microbatch; the loss ignores targets that are `IGNORED_TARGET`.

    With `packing: documents`, `begins` marks the first token of each document.
    """

    tokens: Int32[np.ndarray, "sequence position"]
    targets: Int32[np.ndarray, "sequence position"]
    begins: NotRequired[Bool[np.ndarray, "sequence position"]]


def load_corpora(config: DataConfig) -> tuple[Corpus, ...]:
    """Return the tokens of each source, read once per process: later changes have no effect.

    Raises `InputError` if there is no text, or a part is shorter than one row.
    """
    sources = tuple(
        replace(source, path=source.path and local_path(source.path)) for source in config.sources()
    )
    if len(sources) > 1:
        require_disjoint(sources)
    tokenizer = load_tokenizer(tokenizer_of(config))
    division = config.held_out, config.shuffle_seed
    corpora = tuple(read_corpus(source, tokenizer, *division) for source in sources)
    for source, corpus in zip(config.sources(), corpora, strict=True):
        for part, documents in (("training", corpus.training), ("held-out", corpus.held_out)):
            _require_a_sequence(config, f"the {part} text of {source.origin[1]}", documents)
    return corpora


def _require_a_sequence(config: DataConfig, text: str, documents: TokenizedDocuments) -> None:
    """Raise `InputError`, naming the `text`, unless these documents fill a sequence."""
    size = documents.tokens.size
    if config.packing == "windows" and size < (needed := config.sequence_length + 1):
        problem = f"{text} has {size} tokens, but a sequence and its last target need {needed}"
        remedy = "Lower it, add text, or change data.held_out"
        raise config.error("sequence_length", problem, remedy)
    if size < 2:  # The marks of a document.
        raise config.error("held_out", f"{text} is empty", "Add text, or change the share")


class TrainingBatches:
    """Microbatches of a run, numbered from its first: any of them can be read at any time.

    In each epoch, every sequence of a source is read once, in a new order. It does not matter which
    node reads which microbatch, so a run can continue with other data nodes: the only state is how
    many were read.

    Attributes:
        fingerprint: hash that identifies the text.
        sequences: number of sequences of all sources.
        too_long: lines of `too_long_lines`.
    """

    def __init__(self, config: DataConfig):
        """Read the text.

        Raises:
            InputError: as `load_corpora` does, or if there is too little for one microbatch, or all
                documents of a source are too long.
        """
        corpora = load_corpora(config)
        self._config = config
        self._padding = load_tokenizer(tokenizer_of(config)).padding
        both = list(zip(config.sources(), corpora, strict=True))
        self._rows = [_rows(config, source, "training", corpus.training) for source, corpus in both]
        self.too_long = too_long_lines(config)
        self.sequences = sum(len(rows) for rows in self._rows)
        if self.sequences < config.microbatch_size:
            origins = [source.origin for source in config.sources()]
            field, value = origins[0] if len(origins) == 1 else ("data.mixture", len(origins))
            raise InputError(
                field,
                value,
                f"{self.sequences} sequences of {config.sequence_length} tokens are too few for a "
                f"microbatch of {config.microbatch_size}",
                "Add text, or lower data.sequence_length or data.microbatch_size",
            )
        self._mixture = Interleaving(config.shares())
        self._orders = [
            grain.MapDataset.range(len(rows)).shuffle(config.shuffle_seed).repeat()
            for rows in self._rows
        ]
        self.fingerprint = _fingerprint(corpora, config.shares())
        self._identity = {
            "fingerprint": self.fingerprint,
            "packing": config.packing,
            "too_long": _treatments_unless_split(config, corpora),
            "sequence_length": config.sequence_length,
            "shuffle_seed": config.shuffle_seed,
            "microbatch_size": config.microbatch_size,
        }

    def __getitem__(self, number: int) -> Batch:
        """Return microbatch `number` of the run, in new arrays."""
        size = self._config.microbatch_size
        return _batch(
            self._config,
            self._padding,
            size,
            map(self._row, range(number * size, (number + 1) * size)),
        )

    def _row(self, number: int) -> tuple[Rows, int]:
        """Return the rows of a source, and the index in them of row `number` of the run."""
        source, position = self._mixture[number]
        row = self._orders[source][position]
        assert row is not None, "nothing is filtered out"
        return self._rows[source], row

    def state(self, read: int) -> dict[str, Any]:
        """Return the state to save after `read` microbatches: the number, and which data."""
        return {**self._identity, "microbatches": read}

    def position(self, state: Mapping[str, Any]) -> int:
        """Return how many microbatches had been read when `state` was saved.

        Raises:
            InputError: if the state belongs to other data or another order.
        """
        for name, expected in self._identity.items():
            if state.get(name) != expected:
                raise InputError(
                    f"data_state.{name}",
                    state.get(name),
                    f"was saved for other data: the current value is {expected}",
                    "Resume with the original data settings and text",
                )
        return fields.integer(state.get("microbatches"), "data_state.microbatches", 0)


def shortage_warning(config: DataConfig, sequences: int, part: str = "all") -> list[str]:
    """Return a warning if fewer than `sequences` sequences are held out.

    Raises:
        InputError: as `held_out_batches` does.
    """
    count = sum(map(len, _rows_held_out(config, part)))
    if count >= sequences:
        return []
    return [f"reading {count} sequences instead of {sequences}: the held-out text has no more"]


def _rows_held_out(config: DataConfig, part: str, domain: str | None = None) -> list[Rows]:
    """Return the held-out rows of each source, or only of the source `domain`."""
    fields.text(part, "part", HELD_OUT_PARTS)
    if domain is not None:
        fields.text(domain, "domain", config.domains())
    each = zip(config.domains(), config.sources(), load_corpora(config), strict=True)
    rows = []
    for name, source, corpus in each:
        if domain not in (None, name):
            continue
        documents, label = corpus.held_out, "held-out"
        if part != "all":
            documents, purpose = (
                documents_of_part(documents, part),
                f"for {part} of the domain {name}",
            )
            _require_a_sequence(config, f"the held-out text {purpose}", documents)
            label = f"held-out, {purpose}"
        rows.append(_rows(config, source, label, documents))
    return rows


def held_out_batches(
    config: DataConfig,
    batch_size: int,
    sequences: int | None = None,
    *,
    part: str = "all",
    domain: str | None = None,
) -> Iterator[Batch]:
    """Return the held-out rows of all sources once, as batches in a fixed shuffled order.

    At most `sequences` rows are read. The last batch is padded to `batch_size` by rows whose
    targets are all `IGNORED_TARGET`. `part` is one of `HELD_OUT_PARTS`, and `domain`, if given, the
    only source that is read. Raises `InputError` as `load_corpora` does, or if all documents of a
    source are too long, a part of a domain is shorter than one row, or there is no such part or
    domain.
    """
    padding = load_tokenizer(tokenizer_of(config)).padding
    rows = _rows_held_out(config, part, domain)
    bounds = np.cumsum([0, *map(len, rows)])

    def batch(chosen: Sequence[int]) -> Batch:
        sources = np.searchsorted(bounds, chosen, side="right") - 1
        places = zip(sources, chosen, strict=True)
        picked = [(rows[source], int(row - bounds[source])) for source, row in places]
        return _batch(config, padding, batch_size, picked)

    order = grain.MapDataset.range(int(bounds[-1])).shuffle(config.shuffle_seed)
    batches = order[:sequences].batch(batch_size, batch_fn=batch)
    return iter(batches.to_iter_dataset(_READ_IN_CALLER))


def document_starts(batch: Batch, begin: int) -> Bool[np.ndarray, "sequence position"]:
    """Return which tokens are the first that a row has of a document.

    These are the first position of every row, and positions that `begins` marks; in windows, which
    have no such marks, those of the tokenizer's begin mark, `begin`.
    """
    starts = batch["begins"].copy() if "begins" in batch else batch["tokens"] == begin
    starts[:, 0] = True
    return starts


def _fingerprint(corpora: Sequence[Corpus], shares: Sequence[int]) -> str:
    if len(corpora) == 1:
        return corpora[0].fingerprint
    parts = [f"{share}*{one.fingerprint}" for share, one in zip(shares, corpora, strict=True)]
    return hashlib.blake2b("+".join(parts).encode(), digest_size=8).hexdigest()


def too_long_lines(config: DataConfig) -> list[str]:
    """Return, for sources with documents longer than a sequence, their number and treatment.

    Text that is split without loss is left out. Raises `InputError` as `load_corpora` does.
    """
    both = zip(config.sources(), load_corpora(config), strict=True)
    lines = (_too_long_line(config, source, corpus) for source, corpus in both)
    return [line for line in lines if line is not None]


def _rows(
    config: DataConfig, source: DocumentSource, part: str, documents: TokenizedDocuments
) -> Rows:
    """Return the rows of one part of a source; raise `InputError` if there are none."""
    if config.packing == "windows":
        if documents.learnt is not None:
            problem = f"must be documents: {source.origin[1]} contains conversations"
            raise config.error("packing", problem, "Write packing: documents")
        return Windows(documents, config.sequence_length)
    pieces = _pieces(config, documents)
    if not len(pieces.starts) and not pieces.too_long:
        # A single document has been split into both parts.
        origin = source.origin[1]
        problem = f"the documents of {origin} ({part}) have no tokens to train on"
        raise source.error(problem, "Add documents")
    if not len(pieces.starts):
        treatment = _treatment(config, documents)
        remaining = "no documents" if treatment == "drop" else "no tokens to train on"
        raise config.error(
            "sequence_length",
            f"all {pieces.too_long} documents of {source.origin[1]} ({part}) are longer, and "
            f"data.too_long: {treatment} leaves {remaining}",
            "Raise it, or change data.too_long",
        )
    return PackedDocuments(documents, pieces, config.sequence_length)


def _treatment(config: DataConfig, documents: TokenizedDocuments) -> str:
    """Return the treatment of documents that are too long."""
    if config.too_long is not None:
        return config.too_long
    return "split" if documents.learnt is None else "drop"


def _pieces(config: DataConfig, documents: TokenizedDocuments) -> Pieces:
    return cut_documents(documents, config.sequence_length, _treatment(config, documents))


def _treatments_unless_split(config: DataConfig, corpora: Sequence[Corpus]) -> list[str] | None:
    """Return the treatment of too long documents of each source, or None if all are split.

    Splitting was the only treatment before `data.too_long`, so older checkpoints do not name it.
    """
    treatments = [_treatment(config, corpus.training) for corpus in corpora]
    return None if set(treatments) == {"split"} else treatments


def _too_long_line(config: DataConfig, source: DocumentSource, corpus: Corpus) -> str | None:
    """Return a line on the documents of a source that are too long, if they are not just split."""
    if config.packing == "windows":
        return None
    treatment = _treatment(config, corpus.training)
    if treatment == "split" and corpus.training.learnt is None:
        return None
    parts = {"training": corpus.training, "held out": corpus.held_out}
    pieces = {name: _pieces(config, documents) for name, documents in parts.items()}
    if not any(of_part.too_long for of_part in pieces.values()):
        return None
    counts = [
        f"{pieces[name].too_long} of {len(documents.ends)} documents ({name})"
        for name, documents in parts.items()
    ]
    participle = {"drop": "dropped", "truncate": "truncated", "split": "split"}[treatment]
    line = (
        f"{source.origin[1]}: {' and '.join(counts)} are longer than a sequence of "
        f"{config.sequence_length} tokens, and {participle} (data.too_long)"
    )
    unread = sum(of_part.left_out for of_part in pieces.values())
    if treatment == "truncate" and unread:
        line += f"; {unread} of them have no tokens left to train on"
    return line


def _batch(config: DataConfig, padding: int, size: int, rows: Iterable[tuple[Rows, int]]) -> Batch:
    """Return the rows as one batch, padded to `size` sequences."""
    tokens = np.full((size, config.sequence_length), padding, np.int32)
    targets = np.full_like(tokens, IGNORED_TARGET)
    begins = np.zeros(tokens.shape, bool)
    for place, (source, row) in enumerate(rows):
        source.fill(row, tokens[place], targets[place], begins[place])
    batch: Batch = {"tokens": tokens, "targets": targets}
    if config.packing == "documents":
        batch["begins"] = begins
    return batch


Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Items by number, of which those that were announced may have been made in advance.

    One thread makes the items announced last, so at most one iteration's items are held. If it
    fails to make an item, the error is raised where the item is requested.
    """

    def __init__(self, read: Callable[[int], Item]):
        """Make nothing yet; `read` makes an item."""
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read_ahead")
        self._announced: dict[int, Future[Item]] = {}

    def __getitem__(self, number: int) -> Item:
        """Return the item, made now unless it was announced."""
        future = self._announced.pop(number, None)
        return self._read(number) if future is None else future.result()

    def announce(self, numbers: Iterable[int]) -> None:
        """Start to make the items that are requested next, and discard those announced before."""
        for future in self._announced.values():
            future.cancel()
        self._announced = {number: self._thread.submit(self._read, number) for number in numbers}

    def close(self) -> None:
        """End the thread, after its current item."""
        self._thread.shutdown(cancel_futures=True)
