"""Tokenizers: bytes, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer, UInt16
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.data import (
    BYTES,
    CHAT_TEMPLATE,
    TOKENIZER,
    tokenizer_path,
)
from skippipe_jax.config.extras import require_extra
from skippipe_jax.config.pretrained import download_remedy

CONFIG = "tokenizer_config.json"
SETTINGS = (CONFIG, "special_tokens_map.json", CHAT_TEMPLATE)

MARKS = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "pad_token": "<|padding|>",
}
"""Marks of the tokenizers that are written here."""

# Begin and end marks in the tokenizers of well-known models, for a tokenizer.json without the file
# that names them.
_MARKS = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>", "[CLS]"),
    "eos_token": ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[SEP]"),
}

# An encoding takes a hundred times the memory of its text, so long texts are encoded in pieces.
_PIECE = 1 << 20
_LINE = re.compile(r"(?<=\n)(?=\S)")


class ByteTokenizer:
    """Tokenizer of bytes, with three more tokens for a document's begin and end, and padding."""

    begin = 256
    end = 257
    padding = 258
    vocabulary_size = 259
    digest = BYTES
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = {}

    def encode(self, text: bytes | str) -> UInt16[np.ndarray, " token"]:
        """Return one token per byte (of the UTF-8 form of a string), without marks."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[UInt16[np.ndarray, " token"]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of the tokens that are bytes; others are left out.

        Bytes that are not UTF-8 become U+FFFD, so that an untrained model's text can be printed.
        """
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        return bytes([token for token in ids if 0 <= token < 256]).decode(errors="replace")

    def token_of(self, text: str) -> int | None:
        """Return None: only bytes have tokens."""
        return None


class HuggingFaceTokenizer:
    """Tokenizer from a tokenizer.json, with its marks from the files beside it.

    Attributes:
        begin: token before the first of a document (the end mark if there is no other).
        end: token after the last of a document.
        padding: token of unused positions.
        vocabulary_size: all tokens, the three marks among them, are below this number.
        digest: hash that identifies the tokenizer.
        chat_template: Jinja template of conversations, if the tokenizer comes with one.
        special_tokens: texts of `bos_token`, `eos_token` and the like, as templates use them.
    """

    def __init__(self, file: Path, field: str):
        """Read the files; `field` is the key or option that gave the path.

        Raises:
            InputError: if they cannot be read, or no token marks the end of a document.
        """
        package = require_extra("tokenizers", "hf", field, str(file))
        content = fields.read_text(file, field)
        refuse = functools.partial(InputError, field, str(file))
        try:
            self._tokenizer = package.Tokenizer.from_str(content)
        except Exception as error:  # The package raises nothing narrower.
            raise refuse(f"is not a tokenizer.json: {error}", "Name another file") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _settings(file.parent, field)
        self.special_tokens: Mapping[str, str] = {
            name: text
            for name, value in settings.items()
            if name.endswith("_token") and (text := _content(value)) is not None
        }
        marks = ("bos_token", "eos_token", "pad_token")
        begin, end, padding = (self._mark(name, refuse) for name in marks)
        if end is None:
            remedy = 'Write tokenizer_config.json beside it with {"eos_token": ...}'
            raise refuse("no token marks the end of a document", remedy)
        self.end = end
        self.begin = end if begin is None else begin
        self.padding = end if padding is None else padding
        self.vocabulary_size = 1 + max(self._tokenizer.get_vocab(True).values())
        self.digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        self.chat_template = _chat_template(file.parent, settings, field)

    def _mark(self, name: str, refuse: Callable[[str, str], InputError]) -> int | None:
        text = self.special_tokens.get(name)
        if text is not None:
            token = self._tokenizer.token_to_id(text)
            if token is None:
                problem = f"does not contain the {name} {text!r} of the files beside it"
                raise refuse(problem, "Copy all files of the tokenizer from the same model")
            return token
        tokens = map(self._tokenizer.token_to_id, _MARKS.get(name, ()))
        return next((token for token in tokens if token is not None), None)

    def encode(self, text: str) -> Integer[np.ndarray, " token"]:
        """Return the tokens of a text; special tokens that are spelled out in it count as such."""
        [tokens] = self.encode_batch([text])
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " token"]]:
        """Return the tokens of each text, encoded in the threads of the package."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of the tokens, without marks and numbers that are not tokens."""
        return self._tokenizer.decode(_within(tokens, self.vocabulary_size))

    def token_of(self, text: str) -> int | None:
        """Return the token of a whole text, such as <|eot_id|>; None if it is not a token."""
        return self._tokenizer.token_to_id(text)


Tokenizer: TypeAlias = ByteTokenizer | HuggingFaceTokenizer
"""Conversion of text to tokens and back."""


def load_tokenizer(name: str | None, field: str = "data.tokenizer") -> Tokenizer:
    """Return the tokenizer of this name.

    `bytes` or None is `ByteTokenizer`; a path is that of a tokenizer.json, or of its folder.

    Raises:
        InputError: naming `field`, if there is none, or the package to read it is not installed.
    """
    if name is None or name == BYTES:
        return _BYTES
    file = tokenizer_file(name, field)
    settings_files = (file.parent / settings for settings in SETTINGS)
    digests = tuple(map(_digest, (file, *settings_files)))
    if digests not in _READ:
        _READ[digests] = HuggingFaceTokenizer(file, field)
    return _READ[digests]


_BYTES = ByteTokenizer()
_READ: dict[tuple[bytes | None, ...], Tokenizer] = {}
"""Tokenizers by the contents of their files, because to read a large vocabulary takes long."""


def _digest(file: Path) -> bytes | None:
    """Return the digest of a file's content; None if it cannot be read (its reader reports it)."""
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).digest()
    except OSError:
        return None


def tokenizer_file(name: str, field: str) -> Path:
    """Return the file of a tokenizer, given its path or its folder's path.

    Raises:
        InputError: naming `field`, if there is none.
    """
    path = Path(name).expanduser()
    file = tokenizer_path(path)
    if not file.is_file():
        problem = f"{file} does not exist"
        remedy = f"Write bytes, or name a local {TOKENIZER} or its folder"
        if next(file.parent.glob("*.model"), None):
            problem += ", and SentencePiece models are not supported"
            folder = f'"{file.parent}"'
            remedy = (
                f"Convert it with transformers and sentencepiece: AutoTokenizer.from_pretrained("
                f"{folder}).save_pretrained({folder}) writes {TOKENIZER} beside it"
            )
        elif not path.is_dir():
            problem += ", and nothing is downloaded"
            remedy += download_remedy(name, "*token*", "*.jinja")
        raise InputError(field, name, problem, remedy)
    return file


def copy_tokenizer(name: str, folder: Path, field: str = "data.tokenizer") -> None:
    """Copy the files of a tokenizer to `folder`, where `load_tokenizer` then finds them."""
    file = tokenizer_file(name, field)
    folder.mkdir(parents=True, exist_ok=True)
    settings_files = [file.parent / settings for settings in SETTINGS]
    for source, target in [(file, TOKENIZER), *((other, other.name) for other in settings_files)]:
        if source.is_file() and source.absolute() != (folder / target).absolute():
            shutil.copyfile(source, folder / target)


def write_byte_tokenizer(folder: Path, field: str) -> None:
    """Write `ByteTokenizer` to an existing folder, in the format of Hugging Face tokenizers.

    Raises:
        InputError: naming `field`, if the package is missing.
    """
    package = require_extra("tokenizers", "hf", field, str(folder))
    byte_level = package.pre_tokenizers.ByteLevel
    # Bytes that are not printable are written as characters beyond Latin-1, in order.
    characters = sorted(byte_level.alphabet())
    printable = {character for character in characters if ord(character) < 256}
    others = (character for character in characters if character not in printable)
    tokens = [chr(b) if chr(b) in printable else next(others) for b in range(256)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = package.Tokenizer(package.models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    # In this order, the marks are tokens 256 to 258.
    tokenizer.add_special_tokens(list(MARKS.values()))
    # A mark that is spelled out in a text is encoded as bytes, as in `ByteTokenizer`.
    write_tokenizer(tokenizer, folder, split_special_tokens=True)


def write_tokenizer(tokenizer: Any, folder: Path, **settings: Any) -> None:
    """Write a tokenizer of the package tokenizers, with our `MARKS` and other `settings`."""
    tokenizer.save(str(folder / TOKENIZER))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **MARKS, **settings}
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the smallest integer type that holds every token."""
    return np.min_scalar_type(max(vocabulary_size - 1, 256))


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[Any]
) -> tuple[Integer[np.ndarray, " token"], Int64[np.ndarray, " document"]]:
    """Return begin mark, tokens and end mark of all texts, concatenated, and where each text ends.

    Texts are strings, or bytes for `ByteTokenizer`. Strings of more than a million characters are
    encoded in pieces that begin with a line, which does not change the tokens if no token crosses
    the end of a line.
    """
    pieces = [list(text_pieces(text)) for text in texts]
    encoded = tokenizer.encode_batch([piece for of_text in pieces for piece in of_text])
    first = np.cumsum([0, *map(len, pieces)])[:-1]
    lengths = np.add.reduceat([len(one) for one in encoded], first).astype(np.int64) + 2
    ends = np.cumsum(lengths)
    tokens = np.empty(ends[-1], token_dtype(tokenizer.vocabulary_size))
    begins, lasts = ends - lengths, ends - 1
    tokens[begins], tokens[lasts] = tokenizer.begin, tokenizer.end
    text = np.ones(tokens.size, bool)
    text[begins] = text[lasts] = False
    tokens[text] = np.concatenate(encoded)
    return tokens, ends


def text_pieces(text: Any) -> Iterator[Any]:
    """Yield the text in pieces; each but the first begins with a line."""
    start = 0
    while isinstance(text, str) and len(text) - start > _PIECE:
        line = _LINE.search(text, start + _PIECE)
        if line is None:
            break
        yield text[start : line.start()]
        start = line.start()
    yield text[start:]


def _settings(folder: Path, field: str) -> dict[str, Any]:
    """Return the settings beside a tokenizer.json; tokenizer_config.json takes precedence."""
    settings = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (folder / name).is_file():
            content = fields.load_json(folder / name, field)
            if not isinstance(content, dict):
                raise InputError(
                    field, str(folder / name), "is not a JSON object", "Correct or remove it"
                )
            settings |= {key: value for key, value in content.items() if value is not None}
    return settings


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is given as text or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, settings: Mapping[str, Any], field: str) -> str | None:
    """Return the template from its own file, or the (default) one from the settings."""
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        return fields.read_text(file, field)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def _within(tokens: Sequence[int] | np.ndarray, size: int) -> list[int]:
    ids = np.asarray(tokens)
    return ids[(ids >= 0) & (ids < size)].tolist()
