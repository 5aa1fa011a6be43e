"""What a tokenizer is called, and which files are one."""

from __future__ import annotations

from pathlib import Path

BYTES = "bytes"
"""What stands for `ByteTokenizer` where a path is asked for."""


TOKENIZER_FOLDER = "tokenizer"
"""The folder, of a run or of tokenized text, that keeps the tokenizer."""


CHAT_TEMPLATE = "chat_template.jinja"
"""The file beside a tokenizer that says how conversations are written."""


HUGGING_FACE, SENTENCE_PIECE = "tokenizer.json", "tokenizer.model"


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer that `load_tokenizer` finds."""
    return any((folder / name).is_file() for name in (HUGGING_FACE, SENTENCE_PIECE))
