"""What other hosts say, checked part by part before any of it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_CHARACTERS = 4096
"""The longest text, such as a path."""

MOST_PARTS = 64
"""So many texts there may be by name."""

_UNPRINTABLE = {code: None for code in [*range(32), 127]}


def number(given: Any, end: int) -> int:
    """A whole number from 0 on, below `end`; `ValueError` for anything else."""
    if type(given) is not int or not 0 <= given < end:
        raise ValueError(f"has {given!r:.80} where a number from 0 to {end - 1} belongs")
    return given


def text(given: Any) -> str:
    """A short text; `ValueError` for anything else."""
    if type(given) is not str or len(given) > MOST_CHARACTERS:
        raise ValueError("has something else where a short text belongs")
    return given


def name(given: Any) -> str:
    """A text that is printed, by a host that does not know what it would do to a terminal."""
    return text(given).encode("ascii", "backslashreplace").decode().translate(_UNPRINTABLE)


def texts(given: Any) -> Mapping[str, str]:
    """A few short texts by name; `ValueError` for anything else."""
    if type(given) is not dict or len(given) > MOST_PARTS:
        raise ValueError("has something else where short texts belong")
    return {text(part): text(value) for part, value in given.items()}
