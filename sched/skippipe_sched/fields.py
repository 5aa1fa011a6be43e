"""Reading values out of YAML and JSON: each function checks one kind of value and names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from skippipe_sched.errors import InputError


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise InputError(
                    str(key),
                    f"twice in the mapping at line {line}",
                    "a key may be given once",
                    "Delete one of the two",
                )
        return super().construct_mapping(node, deep=deep)


def read_text(path: Path, field: str) -> str:
    """The text of a file; `InputError` naming `field` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            field, str(path), f"cannot read this file: {reason}", "Check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            field, str(path), "the file is not UTF-8 text", "Give a text file"
        ) from error


def load_yaml(path: Path, field: str) -> Any:
    """The content of a YAML file."""
    return parse_yaml(read_text(path, field), field, str(path))


def parse_yaml(text: str, field: str, origin: str) -> Any:
    """The value of a YAML text that came from `origin` (a path or an argument, for messages)."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(
            field, origin, f"not valid YAML{where}", "Mend the syntax there"
        ) from error


def load_json(path: Path, field: str) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(read_text(path, field))
    except json.JSONDecodeError as error:
        raise InputError(
            field,
            str(path),
            f"not valid JSON at line {error.lineno}, column {error.colno}",
            "Write the file again or mend it there",
        ) from error


def mapping(value: Any, field: str, allowed: Collection[str], required: Collection[str] = ()) -> dict:
    """A mapping with only the `allowed` keys and all of the `required` ones."""
    if not isinstance(value, dict):
        raise InputError(field, value, "must be a mapping of keys to values", "Write key: value")
    for key in value:
        if key not in allowed:
            known = ", ".join(sorted(allowed))
            raise InputError(
                f"{field}.{key}", value[key], "unknown key", f"Remove it, or use one of: {known}"
            )
    for key in required:
        if key not in value:
            raise InputError(f"{field}.{key}", None, "is missing", f"Add {key}: to {field}")
    return value


def number(value: Any, field: str, minimum: float = -math.inf, *, above: bool = False) -> float:
    """A finite number of at least `minimum` (greater than it where `above`).

    YAML 1.1 reads ``3e-4`` as text; such text counts as the number that it spells.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(field, value, "must be a number", "Write a number without quotes")
    if not math.isfinite(value):
        raise InputError(field, value, "must be finite", "Write a finite number")
    if value < minimum or (above and value == minimum):
        bound = f"greater than {minimum:g}" if above else f"at least {minimum:g}"
        raise InputError(field, value, f"must be {bound}", f"Write a number {bound}")
    return float(value)


def integer(
    value: Any, field: str, minimum: int | None = None, maximum: int | None = None
) -> int:
    """A whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(field, value, "must be a whole number", "Write a number without fraction")
    if minimum is not None and value < minimum:
        raise InputError(
            field, value, f"must be at least {minimum}", f"Write {minimum} or a greater number"
        )
    if maximum is not None and value > maximum:
        raise InputError(
            field, value, f"must be at most {maximum}", f"Write {maximum} or a smaller number"
        )
    return value


def text(value: Any, field: str, choices: Collection[str] | None = None) -> str:
    """A non-empty string, one of `choices` if they are given."""
    if not isinstance(value, str) or not value:
        raise InputError(field, value, "must be text", "Write a name")
    if choices is not None and value not in choices:
        raise InputError(field, value, "unknown name", f"Use one of: {', '.join(choices)}")
    return value


def sequence(value: Any, field: str, *, minimum_length: int = 1) -> list:
    """A list with at least `minimum_length` entries."""
    if not isinstance(value, list | tuple):
        raise InputError(field, value, "must be a list", "Write [first, second, ...]")
    if len(value) < minimum_length:
        raise InputError(
            field, value, f"must have at least {minimum_length} entries", "Add the missing ones"
        )
    return list(value)
