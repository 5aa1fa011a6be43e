"""Text becomes batches of token sequences, and every data node reads its own microbatches of them.

    files  ->  documents (training | held out)  ->  tokens  ->  windows  ->  batches

A file belongs to one part as a whole, so nothing that is measured on the held-out part was trained
on. Training windows pass through Grain (shuffle, repeat, batch), where any microbatch can be looked
up by its number: how many have been read is the only state there is, and it can be saved.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, NotRequired, TypedDict

import grain
import numpy as np
from jaxtyping import Bool, Int32, UInt16
from skippipe_sched import fields
from skippipe_sched.errors import InputError

# The target of a position that the loss leaves out.
NOT_COUNTED = -1

_PYTHON_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_PYTHON_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}

# The windows lie in memory: a thread that reads ahead would only compete for the interpreter.
_READ_IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


@dataclass(frozen=True)
class DataConfig:
    """Which text is trained on, and how it is cut.

    Attributes:
        source: ``python``, the standard library of the Python that runs, or ``text``, plain text.
        path: for ``text``, a file or a folder whose files (hidden ones aside) are read.
        sequence_length: tokens of a sequence, each of which predicts the one after it.
        microbatch_size: sequences of a microbatch.
        packing: with ``windows`` documents follow one another and are cut into sequences. With
            ``documents`` a sequence holds whole documents, which attention, and the positions that
            it counts with, keep apart.
        held_out: share of the files, between 0 and 1, that is kept for evaluation; of a single
            file it is the share at the end.
        shuffle_seed: decides the order of training and which files are held out.

    Raises `InputError` for a value outside its range.
    """

    source: str = "python"
    path: str | None = None
    sequence_length: int = 256
    microbatch_size: int = 4
    packing: str = "windows"
    held_out: float = 0.05
    shuffle_seed: int = 0

    def __post_init__(self):
        """Check the values; the files are looked at when they are read."""
        fields.text(self.source, "data.source", choices=("python", "text"))
        if self.source == "text":
            if self.path is None:
                raise InputError("data.path", None, "is missing", "Name a text file or a folder")
            fields.text(self.path, "data.path")
        elif self.path is not None:
            problem = f"source {self.source} reads no path"
            raise InputError("data.path", self.path, problem, "Remove it or set data.source: text")
        fields.integer(self.sequence_length, "data.sequence_length", 1)
        fields.integer(self.microbatch_size, "data.microbatch_size", 1)
        fields.text(self.packing, "data.packing", choices=("windows", "documents"))
        if not 0 < self.held_out < 1:
            problem = "must lie between 0 and 1, or one of the two parts is empty"
            raise InputError("data.held_out", self.held_out, problem, "Write a share such as 0.05")
        fields.integer(self.shuffle_seed, "data.shuffle_seed", 0, 2**32 - 1)


class ByteTokenizer:
    """A token is a byte; three more mark where a document begins, where it ends, and padding."""

    begin = 256
    end = 257
    padding = 258
    vocabulary_size = 259

    def encode(self, text: bytes | str) -> UInt16[np.ndarray, " token"]:
        """One token per byte (of the UTF-8 form of a string), without marks."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of the tokens that are bytes; the rest is left out.

        Bytes that are not UTF-8 become U+FFFD, so that a model's first attempts can be printed.
        """
        ids = np.asarray(tokens)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


def check_vocabulary(vocabulary_size: int) -> None:
    """Raise `InputError` unless a model with this many tokens can take every one of ours."""
    if vocabulary_size < ByteTokenizer.vocabulary_size:
        raise InputError(
            "model.vocabulary_size",
            vocabulary_size,
            "vocabulary too small for the tokenizer",
            f"Write {ByteTokenizer.vocabulary_size} or more",
        )


class Batch(TypedDict):
    """What one microbatch is computed from; a target of `NOT_COUNTED` stays out of the loss.

    With packed documents, `begins` says where each of them starts.
    """

    tokens: Int32[np.ndarray, "sequence position"]
    targets: Int32[np.ndarray, "sequence position"]
    begins: NotRequired[Bool[np.ndarray, "sequence position"]]


@dataclass(frozen=True)
class Corpus:
    """The tokens of both parts, and a short hash that tells the training part from any other."""

    training: UInt16[np.ndarray, " token"]
    held_out: UInt16[np.ndarray, " token"]
    fingerprint: str


def load_corpus(config: DataConfig) -> Corpus:
    """The tokens of the source, read once per process: later changes of the files are not seen.

    Raises `InputError` where there is no text, or a part is shorter than one window.
    """
    path = config.path and os.path.abspath(os.path.expanduser(config.path))
    corpus = _read_corpus(config.source, path, config.held_out, config.shuffle_seed)
    for part, tokens in (("training", corpus.training), ("held-out", corpus.held_out)):
        if tokens.size <= config.sequence_length:
            raise InputError(
                "data.sequence_length",
                config.sequence_length,
                f"the {part} text has {tokens.size} tokens, and one sequence and its last target "
                f"need {config.sequence_length + 1}",
                "Shorten the sequence, give more text, or change data.held_out",
            )
    return corpus


class TrainingBatches:
    """Every microbatch of a run, counted from its first: any of them can be read at any time.

    Epoch after epoch each sequence comes once, in a new order. Who reads which microbatch does not
    matter, so a run can go on with other data nodes: all there is to know is how many were read.
    """

    def __init__(self, config: DataConfig):
        """Read the text.

        Raises:
            InputError: as `load_corpus` does, or if there is too little for one microbatch.
        """
        corpus = load_corpus(config)
        windows = _windows(corpus.training, config.sequence_length)
        if len(windows) < config.microbatch_size:
            field, value = _origin(config.source, config.path)
            raise InputError(
                field,
                value,
                f"{len(windows)} sequences of {config.sequence_length} tokens are too few for a "
                f"microbatch of {config.microbatch_size}",
                "Give more text, or lower data.sequence_length or data.microbatch_size",
            )
        self.fingerprint = corpus.fingerprint
        self._identity = {
            "fingerprint": corpus.fingerprint,
            "sequence_length": config.sequence_length,
            "shuffle_seed": config.shuffle_seed,
            "microbatch_size": config.microbatch_size,
        }
        order = grain.MapDataset.range(len(windows)).shuffle(config.shuffle_seed).repeat()
        self._batches = order.batch(
            config.microbatch_size,
            # Nothing is left over in an endless order, and rounding its length up would overflow.
            drop_remainder=True,
            batch_fn=functools.partial(_batch, windows, config.microbatch_size),
        )

    def __getitem__(self, number: int) -> Batch:
        """Microbatch `number` of the run, in fresh arrays."""
        batch = self._batches[number]
        assert batch is not None, "nothing is filtered out"
        return batch

    def state(self, read: int) -> dict[str, Any]:
        """What a checkpoint holds after `read` microbatches: the number, and of which data."""
        return {**self._identity, "microbatches": read}

    def position(self, state: Mapping[str, Any]) -> int:
        """How many microbatches had been read when `state` was saved.

        Raises:
            InputError: if the state belongs to other data or another order.
        """
        for name, expected in self._identity.items():
            if state.get(name) != expected:
                raise InputError(
                    f"data_state.{name}",
                    state.get(name),
                    f"saved for other data; here it is {expected}",
                    "Resume with the settings and the text that it was saved with",
                )
        return fields.integer(state.get("microbatches"), "data_state.microbatches", 0)


def held_out_batches(
    config: DataConfig, batch_size: int, limit: int | None = None
) -> Iterator[Batch]:
    """The held-out windows once, in a fixed shuffled order; at most `limit` batches of them.

    The last batch is padded to `batch_size` sequences whose targets are all `NOT_COUNTED`.
    Raises `InputError` as `load_corpus` does.
    """
    windows = _windows(load_corpus(config).held_out, config.sequence_length)
    order = grain.MapDataset.range(len(windows)).shuffle(config.shuffle_seed)
    batches = order.batch(batch_size, batch_fn=functools.partial(_batch, windows, batch_size))
    return iter(batches[:limit].to_iter_dataset(_READ_IN_CALLER))


def split_names(names: Collection[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """Which of two or more files are for training and which are held out, each part sorted.

    A name's own hash decides, whatever other files there are; only where that would leave a part
    empty does the name nearest to it move.
    """

    def place(name: str) -> tuple[float, str]:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(errors="surrogateescape"), digest_size=8)
        return int.from_bytes(digest.digest()) / 2**64, name

    ranked = sorted(names, key=place)
    below = sum(place(name)[0] < held_out for name in names)
    count = min(max(below, 1), len(ranked) - 1)
    return sorted(ranked[count:]), sorted(ranked[:count])


@functools.lru_cache(maxsize=2)
def _read_corpus(source: str, path: str | None, held_out: float, seed: int) -> Corpus:
    documents = _read_documents(source, path)
    if len(documents) == 1:
        (text,) = documents.values()
        cut = round(len(text) * (1 - held_out))
        training, evaluation = _tokenize([text[:cut]]), _tokenize([text[cut:]])
    else:
        training, evaluation = (
            _tokenize([documents[name] for name in part])
            for part in split_names(documents, held_out, seed)
        )
    fingerprint = hashlib.blake2b(training.data, digest_size=8).hexdigest()
    return Corpus(training, evaluation, fingerprint)


def _read_documents(source: str, path: str | None) -> dict[str, bytes]:
    """The bytes of every file that is not empty, by its name relative to the source."""
    field, value = _origin(source, path)
    root = Path(path or sysconfig.get_path("stdlib"))
    skipped = () if path else _PYTHON_SKIPPED
    try:
        files = [root] if root.is_file() else _walk(root, skipped)
        texts = {
            file.relative_to(root).as_posix(): file.read_bytes()
            for file in files
            if path or file.suffix in _PYTHON_SUFFIXES
        }
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
        raise InputError(field, value, problem, "Name a file or folder that exists") from error
    documents = {name: text for name, text in texts.items() if text}
    if not documents:
        raise InputError(field, value, f"no text in {root}", "Name a file or folder with text")
    return documents


def _origin(source: str, path: str | None) -> tuple[str, str]:
    """The field that names where the text comes from, and its value."""
    return ("data.source", source) if path is None else ("data.path", path)


def _walk(root: Path, skipped: Collection[str]) -> Iterator[Path]:
    """Every file below `root`, hidden ones and `skipped` folders left out."""
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in skipped]
        yield from (Path(folder, name) for name in names if name[0] != ".")


def _raise(error: OSError) -> NoReturn:
    raise error


def _tokenize(documents: Sequence[bytes]) -> UInt16[np.ndarray, " token"]:
    """Begin mark, bytes, end mark of one document after the other, in one read-only array."""
    tokenizer = ByteTokenizer()
    tokens = np.empty(sum(len(document) + 2 for document in documents), np.uint16)
    start = 0
    for document in documents:
        last = start + len(document) + 1
        tokens[start], tokens[last] = tokenizer.begin, tokenizer.end
        tokens[start + 1 : last] = tokenizer.encode(document)
        start = last + 1
    tokens.flags.writeable = False
    return tokens


def _windows(
    tokens: UInt16[np.ndarray, " token"], sequence_length: int
) -> UInt16[np.ndarray, "window position"]:
    """A view of the tokens as non-overlapping windows: a sequence and the target of its last."""
    length = sequence_length + 1
    count = tokens.size // length
    return tokens[: count * length].reshape(count, length)


def _batch(
    windows: UInt16[np.ndarray, "window position"], size: int, chosen: Sequence[int]
) -> Batch:
    """The chosen windows as one batch, padded to `size` sequences where they are fewer."""
    tokens = np.full((size, windows.shape[1] - 1), ByteTokenizer.padding, np.int32)
    targets = np.full_like(tokens, NOT_COUNTED)
    rows = windows[np.asarray(chosen)]
    tokens[: len(rows)], targets[: len(rows)] = rows[:, :-1], rows[:, 1:]
    return {"tokens": tokens, "targets": targets}
