"""Tokenized text on disk: ArrayRecord shards of which any span can be read, and an index.

For each part of the text (`training`, `held_out`), a folder has shards of equal records, each with
`BLOCK` tokens of the concatenated documents, the end of each document, and for conversations the
start and end of each span that is trained on. index.json is written last. The tokenizer is in
`tokenizer/`.
"""

from __future__ import annotations

import array
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Bool, Int64, Integer
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.data import TOKENS_INDEX
from skippipe_jax.data.rows import TokenizedDocuments

PARTS = ("training", "held_out")
FORMAT, VERSION = "skippipe-tokens", 1

BLOCK = 4096
"""Tokens of a record."""
_SHARD = 1 << 14  # records: 128 MiB of two-byte tokens


@dataclass(frozen=True)
class PartIndex:
    """Number of documents, tokens and shards of a part, and a digest of its tokens.

    `learnt` is the number of tokens that are trained on, None if all are. The digest covers which.
    """

    documents: int
    tokens: int
    shards: int
    digest: str
    learnt: int | None = None


@dataclass(frozen=True)
class TokenIndex:
    """Description of a folder of token shards.

    `tokenizer` is the digest of the tokenizer; documents were held out by `held_out` and `seed`.
    """

    tokenizer: str
    vocabulary_size: int
    dtype: str
    held_out: float
    seed: int
    parts: dict[str, PartIndex]


class PartWriter:
    """Writer of the documents of one part."""

    def __init__(self, folder: Path, part: str, dtype: np.dtype):
        """Open no file yet: nothing is written before the first block is full."""
        self._folder, self._part, self._dtype = folder, part, dtype
        self._rest = np.empty(0, dtype)
        self._blocks = 0
        self._writer: Any = None
        self._ends = array.array("q")
        self._learnt: array.array[int] | None = None
        self._tokens = 0
        self._digest = hashlib.blake2b(digest_size=8)

    def add(
        self,
        tokens: Integer[np.ndarray, " token"],
        ends: Int64[np.ndarray, " document"],
        learnt: Bool[np.ndarray, " token"] | None = None,
    ) -> None:
        """Write documents, which end at `ends`; `learnt` is given for all or for none."""
        if learnt is not None:
            spans = np.flatnonzero(np.diff(learnt.astype(np.int8), prepend=0, append=0))
            self._learnt = array.array("q") if self._learnt is None else self._learnt
            self._learnt.frombytes((spans + self._tokens).astype(np.int64).tobytes())
        self._ends.frombytes((ends + self._tokens).astype(np.int64).tobytes())
        self._tokens += len(tokens)
        pending = np.concatenate([self._rest, tokens.astype(self._dtype, copy=False)])
        self._digest.update(pending[len(self._rest) :].data)
        full = len(pending) - len(pending) % BLOCK
        for block in pending[:full].reshape(-1, BLOCK):
            self._write(block)
        self._rest = pending[full:]

    def close(self) -> PartIndex:
        """Write the remaining tokens, and return the description of the part."""
        if len(self._rest):
            self._write(self._rest)
        if self._writer is not None:
            self._writer.close()
        np.save(_ends_file(self._folder, self._part), np.array(self._ends, np.int64))
        learnt = None if self._learnt is None else self._close_learnt(self._learnt)
        shards = -(-self._blocks // _SHARD)
        return PartIndex(len(self._ends), self._tokens, shards, self._digest.hexdigest(), learnt)

    def _close_learnt(self, bounds: array.array[int]) -> int:
        """Write the loss mask, add it to the digest, and return how many tokens are trained on."""
        # All starts, and then all ends.
        spans = np.ascontiguousarray(np.array(bounds, np.int64).reshape(-1, 2).T)
        np.save(_learnt_file(self._folder, self._part), spans)
        learnt = _mask_of(spans, self._tokens)
        self._digest.update(learnt.data)
        return int(learnt.sum())

    def _write(self, block: Integer[np.ndarray, " token"]) -> None:
        shard, place = divmod(self._blocks, _SHARD)
        if place == 0:
            if self._writer is not None:
                self._writer.close()
            file = str(_shard_file(self._folder, self._part, shard))
            # With groups of one record, any record is found quickly.
            self._writer = ArrayRecordWriter(file, "group_size:1,uncompressed")
        self._writer.write(block.tobytes())
        self._blocks += 1


class ShardedTokens:
    """Tokens of a part as one long array, of which only requested spans are read."""

    def __init__(self, files: list[Path], size: int, dtype: str):
        """Open the shards, which hold `size` tokens."""
        # Imported here because Grain imports JAX, which processes that tokenize do not need.
        import grain

        self._records: Any = grain.sources.ArrayRecordDataSource([str(file) for file in files])
        self.size = size
        self.dtype = np.dtype(dtype)

    @property
    def blocks(self) -> int:
        """Number of records in the shards."""
        return len(self._records)

    def __getitem__(self, span: slice, /) -> Integer[np.ndarray, " token"]:
        """Return the tokens of a span without a step."""
        start, stop, _ = span.indices(self.size)
        first = start // BLOCK
        records = [self._records[block] for block in range(first, -(-stop // BLOCK))]
        tokens = np.frombuffer(b"".join(records), self.dtype)
        return tokens[start - first * BLOCK : stop - first * BLOCK]


def write_index(folder: Path, index: TokenIndex) -> None:
    """Write the index of a folder, after all else has been written."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(index)}, indent=1)
    (folder / TOKENS_INDEX).write_text(text + "\n", encoding="utf-8")


def read_index(path: str, field: str) -> TokenIndex:
    """Return the index of a folder of token shards.

    Raises:
        InputError: naming `field`, if the folder has none, or an invalid one.
    """
    folder = Path(path)
    if not (folder / TOKENS_INDEX).is_file():
        problem = f"has no {TOKENS_INDEX}, so it is not a complete output of skippipe tokenize"
        remedy = "Name a local folder of tokens, or tokenize the text again"
        raise InputError(field, path, problem, remedy)
    content = fields.load_json(folder / TOKENS_INDEX, field)
    try:
        if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"its format is not version {VERSION} of {FORMAT}")
        parts = {part: PartIndex(**content["parts"][part]) for part in PARTS}
        return TokenIndex(**content | {"parts": parts})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            field, path, f"{TOKENS_INDEX} is not valid: {error}", "Tokenize the text again"
        ) from error


def open_part(path: str, part: str, index: TokenIndex, field: str) -> TokenizedDocuments:
    """Return the documents of one part, none of which is read yet.

    Raises:
        InputError: naming `field` and the file, if one is missing or incomplete.
    """
    folder, part_index = Path(path), index.parts[part]
    ends_file = _ends_file(folder, part)
    files = [_shard_file(folder, part, shard) for shard in range(part_index.shards)]
    learnt_file = _learnt_file(folder, part)
    array_files = [ends_file] if part_index.learnt is None else [ends_file, learnt_file]
    for file in (*array_files, *files):
        if not file.is_file():
            raise InputError(field, path, f"{file.name} is missing", "Tokenize the text again")
    learnt = None
    try:
        ends = np.load(ends_file, mmap_mode="r")
        if part_index.learnt is not None:
            learnt = _mask_of(np.load(learnt_file), part_index.tokens)
        if not files:
            return TokenizedDocuments(np.empty(0, index.dtype), ends, learnt)
        tokens = ShardedTokens(files, part_index.tokens, index.dtype)
    except (OSError, ValueError, IndexError, RuntimeError) as error:
        raise InputError(
            field, path, f"the {part} part cannot be read: {error}", "Tokenize the text again"
        ) from error
    counts = len(ends), None if learnt is None else int(learnt.sum())
    if counts != (part_index.documents, part_index.learnt) or tokens.blocks != -(
        -part_index.tokens // BLOCK
    ):
        problem = f"the {part} part does not match {TOKENS_INDEX}: a file is truncated"
        raise InputError(field, path, problem, "Tokenize the text again")
    return TokenizedDocuments(tokens, ends, learnt)


def _mask_of(spans: Int64[np.ndarray, "bound span"], tokens: int) -> Bool[np.ndarray, " token"]:
    """Return the loss mask of so many tokens; `spans` are the starts and the ends of true ones."""
    switches = np.zeros(tokens + 1, np.int8)
    for bounds, change in zip(spans, (1, -1), strict=True):
        switches[bounds] += change
    return np.cumsum(switches[:-1], dtype=np.int8).view(bool)


def _ends_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.ends.npy"


def _learnt_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.learnt.npy"


def _shard_file(folder: Path, part: str, shard: int) -> Path:
    return folder / f"{part}-{shard:05d}.array_record"
