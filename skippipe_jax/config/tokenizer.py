"""Names and files of tokenizers, and how many tokens they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skippipe_jax.config.extras import require

BYTES = "bytes"
"""What stands for `ByteTokenizer` where a path is asked for."""


TOKENIZER_FOLDER = "tokenizer"
"""The folder, of a run or of tokenized text, that keeps the tokenizer."""


CHAT_TEMPLATE = "chat_template.jinja"
"""The file beside a tokenizer that says how conversations are written."""


HUGGING_FACE, SENTENCE_PIECE = "tokenizer.json", "tokenizer.model"

TOKENS_INDEX = "index.json"
"""The file by which a folder of tokenized text says what it holds."""


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer that `load_tokenizer` finds."""
    return any((folder / name).is_file() for name in (HUGGING_FACE, SENTENCE_PIECE))


def tokenizer_files(path: Path) -> list[Path]:
    """Return where the file of a tokenizer may be whose path, or whose folder's path, is given."""
    return [path / HUGGING_FACE, path / SENTENCE_PIECE] if path.is_dir() else [path]


def vocabulary_size_of(data: Mapping[str, Any]) -> int | None:
    """Return how many tokens there are by the section `data`, as a mapping.

    None: it names no tokenizer or tokenized text, or one that is not here or damaged, which whoever
    reads it finds out.

    Raises:
        InputError: if the package that reads a SentencePiece model is not installed.
    """
    try:
        named = data.get("tokenizer")
        if named is not None:
            if named == BYTES:
                return None
            files = tokenizer_files(Path(named).expanduser())
            return _tokens_of(next(file for file in files if file.is_file()))
        for source in (data, *(data.get("mixture") or ())):
            if source.get("source") == "tokens":
                index = Path(source["path"]).expanduser() / TOKENS_INDEX
                return int(json.loads(index.read_text(encoding="utf-8"))["vocabulary_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        pass
    return None


def _tokens_of(file: Path) -> int:
    if file.suffix == ".model":
        package = require("sentencepiece", "hf", "data.tokenizer", str(file))
        try:
            return package.SentencePieceProcessor(model_proto=file.read_bytes()).vocab_size()
        except RuntimeError as error:
            raise ValueError from error
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    # Of a Unigram model it is a list, in the order of the tokens.
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (token["id"] for token in content.get("added_tokens") or ())
    return 1 + max((*numbers, *added))
