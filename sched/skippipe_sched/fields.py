"""Checked values of YAML and JSON: each function checks one kind of value and names its field."""

from __future__ import annotations

import contextlib
import json
import math
import re
import string
from collections.abc import Collection
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

# Larger numbers have no meaning here, and times computed from them would not stay finite.
MAX_NUMBER = 1e100
# Sizes and counts are stored in arrays of signed 32-bit integers, seeds in unsigned ones.
INT32_MAX, MAX_SEED = 2**31 - 1, 2**32 - 1
# Units of times, in seconds.
UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def read_text(path: Path, field: str) -> str:
    """Read the text of a file; raise `InputError` naming `field` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(field, str(path), f"cannot be read: {reason}", "Check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(field, str(path), "is not UTF-8 text", "Give a text file") from error


def load_yaml(path: Path, field: str) -> Any:
    """Read the content of a YAML file."""
    return parse_yaml(read_text(path, field), field, str(path))


def parse_yaml(text: str, field: str, origin: str) -> Any:
    """Read the value of a YAML text from `origin` (a path or an argument, for messages)."""
    # Half of the import time of a configuration, and not needed for --help.
    import yaml

    from skippipe_sched.strict_yaml import StrictLoader

    try:
        return yaml.load(text, Loader=StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        problem = f"is not valid YAML{position}: {problem}"
        raise InputError(field, origin, problem, "Correct the syntax") from error


def load_json(path: Path, field: str) -> Any:
    """Read the content of a JSON file."""
    content = read_text(path, field)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        problem, remedy = f"is not valid JSON: {error}", "Correct the file, or write it again"
        raise InputError(field, str(path), problem, remedy) from error


def checked_mapping(
    value: Any, field: str, allowed: Collection[str], required: Collection[str] = ()
) -> dict:
    """Check a mapping: only the `allowed` keys, and all of the `required` ones."""
    if not isinstance(value, dict):
        raise InputError(field, value, "must be a mapping of keys to values", "Write key: value")
    for key in value:
        if key not in allowed:
            known = ", ".join(sorted(allowed))
            remedy = f"{suggestion(key, allowed)}Remove it, or use one of: {known}"
            raise InputError(f"{field}.{key}", value[key], "unknown key", remedy)
    for key in required:
        if key not in value:
            raise InputError(f"{field}.{key}", None, "is missing", f"Add {key}: to {field}")
    return value


def suggestion(value: Any, known: Collection[str]) -> str:
    """Return the start of a remedy with the nearest known name; "" if none is near."""
    import difflib  # Slow to load, and needed for messages only.

    names = list(known)
    close = difflib.get_close_matches(str(value), names, n=1)
    # The given text may contain the name, as llama3-8b contains 8b.
    words = re.split(r"[^\w.]+", str(value).lower())
    matches = close or [name for name in names if name.lower() in words]
    return f"Did you mean {matches[0]}? " if matches else ""


def number(value: Any, field: str, minimum: float = -math.inf, *, above: bool = False) -> float:
    """Read a finite number of at least `minimum` (greater than it where `above`).

    YAML 1.1 reads ``3e-4`` as text; such text counts as the number that it spells.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(field, value, "must be a number", "Write a number without quotes")
    if not abs(value) <= MAX_NUMBER:
        raise InputError(field, value, "must be finite", f"Write a number below {MAX_NUMBER:g}")
    if value < minimum or (above and value == minimum):
        bound = f"greater than {minimum:g}" if above else f"at least {minimum:g}"
        raise InputError(field, value, f"must be {bound}", f"Write a number {bound}")
    return float(value)


def duration(value: Any, field: str, *, above: bool = False) -> float:
    """Return the seconds of a time: a number, or one with its unit, such as 30s, 5min, 2h or 7d.

    It is at least 0, and greater than 0 where `above`.
    """
    if not isinstance(value, str):
        return number(value, field, 0.0, above=above)
    written = value.strip()
    amount = written.rstrip(string.ascii_lowercase)
    try:
        seconds, unit_s = float(amount), UNITS_S[written[len(amount) :] or "s"]
    except (ValueError, KeyError):
        problem, remedy = "must be a time", "Write 30s, 5min, 2h or 7d, or a number of seconds"
        raise InputError(field, value, problem, remedy) from None
    return unit_s * number(seconds, field, 0.0, above=above)


def integer(value: Any, field: str, minimum: int | None = None, maximum: int = INT32_MAX) -> int:
    """Read an integer within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(field, value, "must be a whole number", "Write a number without fraction")
    if minimum is not None and value < minimum:
        problem = f"must be at least {minimum}"
        raise InputError(field, value, problem, f"Write {minimum} or a greater number")
    if value > maximum:
        problem = f"must be at most {maximum}"
        raise InputError(field, value, problem, f"Write {maximum} or a smaller number")
    return value


def text(value: Any, field: str, choices: Collection[str] | None = None) -> str:
    """Read a non-empty string of printable characters, one of `choices` if they are given."""
    if not isinstance(value, str) or not value:
        raise InputError(field, value, "must be text", "Write a name, in quotes")
    if not value.isprintable():
        raise InputError(field, value, "contains a control character", "Remove it")
    if choices is not None and value not in choices:
        remedy = f"{suggestion(value, choices)}Use one of: {', '.join(choices)}"
        raise InputError(field, value, "unknown name", remedy)
    return value


def sequence(value: Any, field: str, *, minimum_length: int = 1) -> list:
    """Read a list with at least `minimum_length` entries."""
    if not isinstance(value, list | tuple):
        raise InputError(field, value, "must be a list", "Write [first, second, ...]")
    if len(value) < minimum_length:
        problem = f"must have at least {minimum_length} entries"
        raise InputError(field, value, problem, "Add the missing ones")
    return list(value)
