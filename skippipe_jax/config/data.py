"""The section `data`: text, tokenizer, and how documents become sequences."""

from __future__ import annotations

import dataclasses
import datetime
import glob
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import (
    AtLeastOne,
    Choice,
    Positive,
    Real,
    Section,
    Seed,
    require_values,
)

BYTES = "bytes"
"""Name of `ByteTokenizer` where a path of a tokenizer is expected."""
TOKENIZER_FOLDER = "tokenizer"
"""Folder with the tokenizer, in a run or in tokenized text."""
CHAT_TEMPLATE = "chat_template.jinja"
"""File beside a tokenizer with the template of conversations."""
TOKENIZER = "tokenizer.json"
TOKENS_INDEX = "index.json"
"""File that describes the content of a folder of tokenized text."""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer that `load_tokenizer` finds."""
    return (folder / TOKENIZER).is_file()


def tokenizer_path(path: Path) -> Path:
    """Return the tokenizer.json for a path: the file itself, or the one in the folder.

    For a tokenizer.model of SentencePiece it is the tokenizer.json beside it.
    """
    if path.suffix == ".model":
        return path.with_name(TOKENIZER)
    return path / TOKENIZER if path.is_dir() else path


def vocabulary_size_of(data: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size that the section `data`, as a mapping, implies.

    Return None if it names no tokenizer or tokenized text, or one that is missing or damaged: the
    code that loads it reports the error.
    """
    try:
        named = data.get("tokenizer")
        if named is not None:
            if named == BYTES:
                return None
            return _vocabulary_size_of_file(tokenizer_path(Path(named).expanduser()))
        for source in (data, *(data.get("mixture") or ())):
            if source.get("source") == "tokens":
                index = Path(source["path"]).expanduser() / TOKENS_INDEX
                return int(json.loads(index.read_text(encoding="utf-8"))["vocabulary_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def _vocabulary_size_of_file(file: Path) -> int:
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    # In a Unigram model the vocabulary is a list, in the order of the tokens.
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in content.get("added_tokens") or ())
    return 1 + max((*numbers, *added))


SOURCES = Choice(("python", "text", "jsonl", "parquet", "tokens", "chat"))
# A JSON object with one of these keys is a conversation (`skippipe_jax.data.chat`).
CONVERSATIONS = frozenset({"messages", "conversations", "instruction"})
# All held-out documents, those for estimating priors, or those for scores.
FOR_PRIORS, FOR_SCORES = "priors", "scores"
HELD_OUT_PARTS = Choice(("all", FOR_PRIORS, FOR_SCORES))
# A longer cycle would take memory, for proportions very close to simpler ones.
_LONGEST_CYCLE = 1_000_000


@dataclass(frozen=True)
class DocumentSource:
    """Source of documents: some files, and the unit that is a document in them.

    Attributes:
        kind: `python` or `text`, where a document is a file; `jsonl` or `parquet`, where it is
            `text_field` of a line or row; `chat`, where it is a line with messages.
        path: a file, a folder, a glob, or any of these as a URL that fsspec supports. None for
            `python`, which reads the standard library.
        text_field: key or column of the text.
        field: section of the configuration that names the source, for messages; it does not count
            in comparisons.
        today: for `chat`, the current date in chat templates.
        chat_template: for `chat`, the name or the file of a template that replaces the tokenizer's.
    """

    kind: str
    path: str | None = None
    text_field: str = "text"
    field: str = dataclasses.field(default="data", compare=False)
    today: str | None = None
    chat_template: str | None = None

    @property
    def origin(self) -> tuple[str, str]:
        """Configuration field that names the origin of the text, and its value."""
        if self.path is None:
            return f"{self.field}.source", self.kind
        return f"{self.field}.path", self.path

    def error(self, problem: str, remedy: str) -> InputError:
        """Return an error of the text, which names its origin."""
        return InputError(*self.origin, problem, remedy)

    @property
    def label(self) -> str:
        """Name of the text, for messages."""
        return self.path or "Python's standard library"


def kind_of(path: str) -> str:
    """Guess the kind of source from the names of the files and the first JSON line."""
    folder = Path(path).expanduser()
    if (folder / TOKENS_INDEX).is_file():
        return "tokens"
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    files = files or [Path(name) for name in sorted(glob.glob(str(folder)))]
    names = [file.name for file in files] or [folder.name]
    if all(".parquet" in name for name in names):
        return "parquet"
    if all(".jsonl" in name for name in names):
        return "chat" if files and _holds_conversations(files[0]) else "jsonl"
    return "text"


def _holds_conversations(file: Path) -> bool:
    try:
        with file.open("rb") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and not CONVERSATIONS.isdisjoint(first)


def require_day(value: str, field: str) -> None:
    """Raise `InputError`, naming `field`, unless the text is a date."""
    fields.text(value, field)
    try:
        datetime.date.fromisoformat(value)
    except ValueError as error:
        raise InputError(
            field, value, "is not a date", "Write a date such as 2026-11-22"
        ) from error


@dataclass(frozen=True)
class MixtureConfig:
    """One source of a mixture.

    Attributes:
        source: as `data.source`.
        path: as `data.path`.
        text_field: as `data.text_field`.
        weight: share of the sequences, relative to other sources.
        name: name of the domain. null: the last part of the path that is not a pattern, or the
            kind, with a number if taken.
    """

    source: Annotated[str, SOURCES] = "text"
    path: str | None = None
    text_field: str = "text"
    weight: Positive = 1.0
    name: str | None = None


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Text to train on, and how it is split into sequences.

    Attributes:
        source: ``text``: a document per file; ``jsonl`` or ``parquet``: one per line or row, in
            `text_field`; ``chat``: a conversation per line of JSON, trained on the assistant's
            messages; ``tokens``: a folder from `skippipe tokenize`; ``python``: Python's standard
            library; ``mixture``: the sources in `mixture`.
        path: a file, a folder (without its hidden files) or a glob; except for ``tokens`` also a
            URL for fsspec.
        text_field: key of ``jsonl`` or column of ``parquet`` with the text.
        mixture: weighted sources, each with its own epochs.
        tokenizer: ``bytes``, or the path of a tokenizer.json or its folder. null: that of the
            ``tokens``, or ``bytes``.
        chat_template: template for conversations, instead of the tokenizer's: a Jinja file;
            ``chatml`` or ``llama3``, whose tokens the tokenizer must have; or ``plain``, which
            needs only its begin and end tokens. The run saves it.
        today: date such as 2026-11-22 for chat templates that write one. null: templates get no
            date, and some write a fixed one.
        packing: ``windows``: documents are concatenated and cut into sequences; ``documents``:
            sequences are filled with whole documents, and attention stays within each.
        too_long: with ``packing: documents``, treatment of documents longer than a sequence:
            ``split`` into pieces, within which attention stays; ``truncate`` to `sequence_length`
            tokens; or ``drop``. null: drop conversations, split others.
        sequence_length: tokens in a sequence.
        microbatch_size: sequences in a microbatch.
        held_out: fraction of the documents for evaluation, or of a single document, at its end. For
            ``tokens``, `skippipe tokenize` has fixed it.
        shuffle_seed: seed of the order of training and of the held-out documents.
    """

    source: Annotated[str, Choice((*SOURCES, "mixture"))] = "python"
    path: str | None = None
    text_field: str = "text"
    mixture: tuple[MixtureConfig, ...] | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    today: str | None = None
    packing: Annotated[str, Choice(("windows", "documents"))] = "windows"
    too_long: Annotated[str, Choice(("drop", "truncate", "split"))] | None = None
    sequence_length: AtLeastOne = 256
    microbatch_size: AtLeastOne = 4
    held_out: Annotated[float, Real(above=True, end=1.0)] = 0.05
    shuffle_seed: Seed = 0

    def __post_init__(self):
        """Check the values; the files are checked when they are read."""
        super().__post_init__()
        if (self.source == "mixture") != (self.mixture is not None):
            problem = f"does not match data.source: {self.source}"
            remedy = "Write both source: mixture and mixture: [{source: ..., weight: ...}, ...]"
            raise self.error("mixture", problem, remedy)
        if self.mixture is not None:
            own = "with data.mixture, whose sources have their own paths"
            self.require_default("path", problem=own)
        for number, one in enumerate(self.mixture or ()):
            require_values(one, f"data.mixture[{number}]")
        for part in self.sources():
            self._check_source(part)
        names = [one.name for one in self.mixture or ()]
        for number, name in enumerate(names):
            field = f"data.mixture[{number}].name"
            if name is not None and fields.text(name, field) in names[:number]:
                problem = "is the name of two domains"
                raise InputError(field, name, problem, "Name each one differently")
        if self.packing != "documents":
            remedy = "Write packing: documents, or remove data.too_long"
            problem = f"with data.packing: {self.packing}"
            self.require_default("too_long", problem=problem, remedy=remedy)
        kinds = {source.kind for source in self.sources()}
        if "chat" not in kinds:
            self.require_default("chat_template", "today", problem="without a chat source")
        if self.today is not None:
            require_day(self.today, "data.today")
        if kinds == {"tokens"}:
            problem = "on tokens, whose held-out part skippipe tokenize has selected"
            remedy = "Remove it, or tokenize the text again with --held-out"
            self.require_default("held_out", problem=problem, remedy=remedy)
        self.shares()

    def _check_source(self, source: DocumentSource) -> None:
        if source.kind == "chat" and self.packing != "documents":
            problem = "must be documents for conversations"
            raise self.error("packing", problem, "Write packing: documents")
        if source.kind != "python" and source.path is None:
            remedy = "Name a file, a folder or a glob"
            raise InputError(f"{source.field}.path", None, "is missing", remedy)
        if source.kind == "python" and source.path is not None:
            problem = "has no effect with source: python"
            remedy = "Remove it or set source: text"
            raise InputError(f"{source.field}.path", source.path, problem, remedy)

    def sources(self) -> tuple[DocumentSource, ...]:
        """Return the source of documents, or those of the mixture."""
        each = {"data": self}
        if self.mixture is not None:
            each = {f"data.mixture[{number}]": one for number, one in enumerate(self.mixture)}
        of_chat = self.today, self.chat_template
        return tuple(
            DocumentSource(one.source, one.path, one.text_field, field, *of_chat)
            for field, one in each.items()
        )

    def domains(self) -> tuple[str, ...]:
        """Return a unique name for each of the sources."""
        configured = [one.name for one in self.mixture or ()] or [None]
        names: list[str] = []
        for name, source in zip(configured, self.sources(), strict=True):
            if name is None:
                parts = reversed(PurePosixPath(source.path or "").parts)
                not_names = ("/", "..", "~")
                candidates = (one for one in parts if not (glob.has_magic(one) or one in not_names))
                name = next(candidates, source.kind)
                numbered = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
                name = next(one for one in numbered if one not in (*configured, *names))
            names.append(name)
        return tuple(names)

    def shares(self) -> tuple[int, ...]:
        """Return the number of sequences of each source in one cycle of the mixture."""
        if self.mixture is None:
            return (1,)
        from fractions import Fraction  # Slow to load, and only mixtures need it.

        weights = [Fraction(str(one.weight)) for one in self.mixture]
        unit = Fraction(1, math.lcm(*(weight.denominator for weight in weights)))
        shares = [int(weight / unit) for weight in weights]
        common = math.gcd(*shares)
        if sum(shares) // common > _LONGEST_CYCLE:
            given = [one.weight for one in self.mixture]
            cycle = sum(shares) // common
            problem = f"proportions repeat only after {cycle} sequences, more than {_LONGEST_CYCLE}"
            raise InputError("data.mixture", given, problem, "Write weights with fewer digits")
        return tuple(share // common for share in shares)
