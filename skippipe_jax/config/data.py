"""The section `data`: which text, by which tokenizer, and how it is cut."""

from __future__ import annotations

import dataclasses
import datetime
import glob
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import Choice, Count, Section, Seed

BYTES = "bytes"
"""What stands for `ByteTokenizer` where a path is asked for."""


TOKENIZER_FOLDER = "tokenizer"
"""The folder, of a run or of tokenized text, that keeps the tokenizer."""


CHAT_TEMPLATE = "chat_template.jinja"
"""The file beside a tokenizer that says how conversations are written."""


TOKENIZER = "tokenizer.json"

TOKENS_INDEX = "index.json"
"""The file by which a folder of tokenized text says what it holds."""


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer that `load_tokenizer` finds."""
    return (folder / TOKENIZER).is_file()


def named_tokenizer(path: Path) -> Path:
    """Return the tokenizer.json that a path means: its own, its folder's, or a SentencePiece's.

    A tokenizer.model of SentencePiece means the tokenizer.json beside it.
    """
    if path.suffix == ".model":
        return path.with_name(TOKENIZER)
    return path / TOKENIZER if path.is_dir() else path


def vocabulary_size_of(data: Mapping[str, Any]) -> int | None:
    """Return how many tokens there are by the section `data`, as a mapping.

    None: it names no tokenizer or tokenized text, or one that is not here or damaged, which whoever
    reads it finds out.
    """
    try:
        named = data.get("tokenizer")
        if named is not None:
            if named == BYTES:
                return None
            return _tokens_of(named_tokenizer(Path(named).expanduser()))
        for source in (data, *(data.get("mixture") or ())):
            if source.get("source") == "tokens":
                index = Path(source["path"]).expanduser() / TOKENS_INDEX
                return int(json.loads(index.read_text(encoding="utf-8"))["vocabulary_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def _tokens_of(file: Path) -> int:
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    # Of a Unigram model it is a list, in the order of the tokens.
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in content.get("added_tokens") or ())
    return 1 + max((*numbers, *added))


# The ways in which documents fill sequences.
PACKING = Choice(("windows", "documents"))
SOURCES = Choice(("python", "text", "jsonl", "parquet", "tokens", "chat"))
# What becomes of documents that are longer than a sequence.
TOO_LONG = Choice(("drop", "truncate", "split"))
# A JSON object with one of these keys is a conversation (`skippipe_jax.data.chat`).
CONVERSATIONS = frozenset({"messages", "conversations", "instruction"})
# All held-out documents, those that priors are estimated on, or those that scores are taken of.
FOR_PRIORS, FOR_SCORES = "priors", "scores"
HELD_OUT_PARTS = Choice(("all", FOR_PRIORS, FOR_SCORES))


# A greater cycle would take memory for proportions that nobody could tell from simpler ones.
_LONGEST_CYCLE = 1_000_000


@dataclass(frozen=True)
class DocumentSource:
    """Some files, and what is a document in them.

    Attributes:
        kind: `python` or `text`, where a document is a file; `jsonl` or `parquet`, where it is
            `text_field` of a line or row; `chat`, where it is a line with messages.
        path: a file, a folder, a glob, or any of these as a URL that fsspec knows. None for
            `python`, which reads the standard library.
        text_field: key or column of the text.
        field: the section of the configuration that says so, for messages; two sources that differ
            only in it are the same.
        today: of `chat`, the day that chat templates are told.
        chat_template: of `chat`, the template instead of the tokenizer's: its name, or its file.
    """

    kind: str
    path: str | None = None
    text_field: str = "text"
    field: str = dataclasses.field(default="data", compare=False)
    today: str | None = None
    chat_template: str | None = None

    @property
    def origin(self) -> tuple[str, str]:
        """The field that names where the text comes from, and its value."""
        if self.path is None:
            return f"{self.field}.source", self.kind
        return f"{self.field}.path", self.path

    @property
    def told(self) -> str:
        """Name the text, for readers."""
        return self.path or "Python's standard library"


def kind_of(path: str) -> str:
    """Guess what kind of source a path is, from the names of its files and the first JSON line."""
    folder = Path(path).expanduser()
    if (folder / TOKENS_INDEX).is_file():
        return "tokens"
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    files = files or [Path(found) for found in sorted(glob.glob(str(folder)))]
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
    """Raise `InputError`, naming `field`, unless the text is a day."""
    fields.text(value, field)
    try:
        datetime.date.fromisoformat(value)
    except ValueError as error:
        raise InputError(field, value, "is no day", "Write one such as 2026-11-22") from error


@dataclass(frozen=True)
class MixtureConfig:
    """One source of a mixture.

    Attributes:
        source: as `data.source`.
        path: as `data.path`.
        text_field: as `data.text_field`.
        weight: its share of all sequences, relative to the others.
        name: the domain that it is, by which evaluation reports it. null: the last part of its
            path that is no pattern, or else its kind, with a number where another has that name.
    """

    source: Annotated[str, SOURCES] = "text"
    path: str | None = None
    text_field: str = "text"
    weight: float = 1.0
    name: str | None = None


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Which text is trained on, and how it is cut.

    Attributes:
        source: what is a document: with ``text``, plain text, a file; with ``jsonl`` or
            ``parquet`` the `text_field` of a line or row; with ``chat`` a line of JSON with
            messages (see `skippipe_jax.data.chat`), of which the assistant's are learnt. ``tokens``
            is a folder that `skippipe tokenize` has written, read as it is needed; ``python``
            is the standard library of the Python that runs; ``mixture`` is what `mixture` says.
        path: a file, a folder whose files (hidden ones aside) are read, or a glob; or, but for
            ``tokens``, any of these as a URL that fsspec knows.
        text_field: for ``jsonl`` and ``parquet``, the key or column of the text.
        mixture: sources with weights, of each of which every sequence comes once in an epoch of
            its own.
        tokenizer: ``bytes``; or the path of a tokenizer.json, or of the folder with one. The
            default is the one that ``tokens`` were made with, or else ``bytes``.
        chat_template: for conversations, how they are written, instead of by the tokenizer's own
            template: the path of a Jinja file, or ``chatml``, ``llama3``, whose tokens the
            tokenizer must have, or ``plain``, which needs no tokens but the tokenizer's begin and
            end. The run keeps it with its tokenizer.
        today: for conversations, the day that it is to chat templates that write the date, as
            2026-11-22; it stays the same when the run is resumed or evaluated. null: they are told
            none, and some write one of their own.
        packing: with ``windows``, documents follow one another and are cut into sequences; with
            ``documents``, sequences are filled with whole documents, each of which sees itself
            only.
        too_long: with ``packing: documents``, what becomes of documents that are longer than a
            sequence: ``split`` cuts them into pieces, each of which sees nothing of those before
            it; ``truncate`` keeps their first `sequence_length` tokens; ``drop`` leaves them out.
            null: conversations are dropped, as the pieces of an answer have lost its question,
            and all else is split. A run says at its start how many there are.
        sequence_length: tokens of a sequence, each of which predicts the one after it.
        microbatch_size: sequences of a microbatch.
        held_out: share of the documents, between 0 and 1, that is kept for evaluation; of a single
            document it is the share at the end. Of ``tokens`` it was decided when they were made.
        shuffle_seed: decides the order of training and which documents are held out.

    Raises `InputError` for a value outside its range.
    """

    source: Annotated[str, Choice((*SOURCES, "mixture"))] = "python"
    path: str | None = None
    text_field: str = "text"
    mixture: tuple[MixtureConfig, ...] | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    today: str | None = None
    packing: Annotated[str, PACKING] = "windows"
    too_long: Annotated[str, TOO_LONG] | None = None
    sequence_length: Count = 256
    microbatch_size: Count = 4
    held_out: float = 0.05
    shuffle_seed: Seed = 0

    def __post_init__(self):
        """Check the values; the files are looked at when they are read."""
        super().__post_init__()
        if (self.source == "mixture") != (self.mixture is not None):
            problem = f"does not go with data.source: {self.source}"
            remedy = "Write both source: mixture and mixture: [{source: ..., weight: ...}, ...]"
            raise InputError("data.mixture", self.mixture, problem, remedy)
        if self.mixture is not None and self.path is not None:
            problem = "every source of a mixture has a path of its own"
            raise InputError("data.path", self.path, problem, "Remove it")
        for part in self.sources():
            self._check_source(part)
        self._check_names()
        if self.too_long is not None and self.packing != "documents":
            problem = f"has no effect on packing {self.packing}, which cut all documents alike"
            remedy = "Write packing: documents too, or remove it"
            raise InputError("data.too_long", self.too_long, problem, remedy)
        if self.tokenizer is not None:
            fields.text(self.tokenizer, "data.tokenizer")
        has_chat = any(source.kind == "chat" for source in self.sources())
        if self.chat_template is not None:
            fields.text(self.chat_template, "data.chat_template")
            if not has_chat:
                problem = "has no effect: only conversations are written by a template"
                raise InputError("data.chat_template", self.chat_template, problem, "Remove it")
        if self.today is not None:
            require_day(self.today, "data.today")
            if not has_chat:
                problem = "has no effect: only chat templates ask for the date"
                raise InputError("data.today", self.today, problem, "Remove it")
        if not 0 < self.held_out < 1:
            problem = "must lie between 0 and 1, or one of the two parts is empty"
            raise InputError("data.held_out", self.held_out, problem, "Write a share such as 0.05")
        all_tokens = all(source.kind == "tokens" for source in self.sources())
        if self.held_out != DataConfig.held_out and all_tokens:
            problem = "does not go with tokens: what is held out was decided when they were made"
            remedy = "Remove it, or tokenize the text again with --held-out"
            raise InputError("data.held_out", self.held_out, problem, remedy)
        self.shares()

    def _check_source(self, source: DocumentSource) -> None:
        fields.text(source.kind, f"{source.field}.source", choices=SOURCES)
        fields.text(source.text_field, f"{source.field}.text_field")
        if source.kind == "chat" and self.packing != "documents":
            problem = "conversations are learnt one by one"
            raise InputError("data.packing", self.packing, problem, "Write packing: documents")
        if source.kind != "python" and source.path is None:
            remedy = "Name a file, a folder or a glob"
            raise InputError(f"{source.field}.path", None, "is missing", remedy)
        if source.kind == "python" and source.path is not None:
            problem = "source python reads no path"
            remedy = "Remove it or set source: text"
            raise InputError(f"{source.field}.path", source.path, problem, remedy)
        if source.path is not None:
            fields.text(source.path, f"{source.field}.path")

    def _check_names(self) -> None:
        given: set[str] = set()
        for number, one in enumerate(self.mixture or ()):
            if one.name is None:
                continue
            field = f"data.mixture[{number}].name"
            if fields.text(one.name, field) in given:
                raise InputError(field, one.name, "names two domains", "Give each its own name")
            given.add(one.name)

    def sources(self) -> tuple[DocumentSource, ...]:
        """Return where documents come from, one source or those of the mixture."""
        each = {"data": self}
        if self.mixture is not None:
            each = {f"data.mixture[{number}]": one for number, one in enumerate(self.mixture)}
        of_chat = self.today, self.chat_template
        return tuple(
            DocumentSource(one.source, one.path, one.text_field, field, *of_chat)
            for field, one in each.items()
        )

    def domains(self) -> tuple[str, ...]:
        """Return what each of the sources is called, no two alike."""
        given = [one.name for one in self.mixture or ()] or [None]
        names: list[str] = []
        for name, source in zip(given, self.sources(), strict=True):
            if name is None:
                parts = reversed(PurePosixPath(source.path or "").parts)
                is_no_name = ("/", "..", "~")
                named = (one for one in parts if not (glob.has_magic(one) or one in is_no_name))
                name = next(named, source.kind)
                numbered = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
                name = next(one for one in numbered if one not in (*given, *names))
            names.append(name)
        return tuple(names)

    def shares(self) -> tuple[int, ...]:
        """Return how many sequences of each source come in one cycle of the mixture."""
        if self.mixture is None:
            return (1,)
        weights = [
            Fraction(
                str(fields.number(one.weight, f"data.mixture[{number}].weight", 0, above=True))
            )
            for number, one in enumerate(self.mixture)
        ]
        unit = Fraction(1, math.lcm(*(weight.denominator for weight in weights)))
        shares = [int(weight / unit) for weight in weights]
        common = math.gcd(*shares)
        if sum(shares) // common > _LONGEST_CYCLE:
            raise InputError(
                "data.mixture",
                [one.weight for one in self.mixture],
                f"its proportions repeat only after {sum(shares) // common} sequences",
                "Write weights with fewer digits",
            )
        return tuple(share // common for share in shares)
