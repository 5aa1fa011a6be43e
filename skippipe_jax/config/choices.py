"""Sections of a configuration, with the allowed values of a key in its type."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from skippipe_sched import fields
from skippipe_sched.errors import InputError


class Choice(tuple[str, ...]):
    """Allowed words of a key, in ``Annotated[str, Choice((...))]``."""

    __slots__ = ()


class Whole(NamedTuple):
    """Smallest and largest whole number of a key, in ``Annotated[int, ...]``."""

    least: int
    most: int = fields.INT32_MAX


class Real(NamedTuple):
    """Range of a key's numbers: from `least` (or above it), to `most` or below `end`."""

    least: float = 0.0
    above: bool = False
    most: float | None = None
    end: float | None = None


Bounds = Choice | Whole | Real
DTYPES = Choice(("float32", "bfloat16"))
AtLeastOne = Annotated[int, Whole(1)]
Seed = Annotated[int, Whole(0, fields.MAX_SEED)]
NonNegative = Annotated[float, Real()]
Positive = Annotated[float, Real(above=True)]


class Section:
    """Section of a configuration: a frozen dataclass that checks its values against their types.

    A subclass with further checks calls `__post_init__` of this class first.
    """

    NAME: ClassVar[str] = ""

    def __init_subclass__(cls, name: str | None = None, **others: Any):
        """Set the name of the section in errors; empty for the outermost section."""
        super().__init_subclass__(**others)
        if name is not None:
            cls.NAME = name

    def __post_init__(self) -> None:
        """Reject values that are not among a key's words or not in its range.

        Raises:
            InputError: for the first such key.
        """
        require_values(self, self.NAME)

    def error(self, key: str, problem: str, remedy: str) -> InputError:
        """Return an error about the value of a key."""
        value = getattr(self, key)
        value = list(value) if isinstance(value, tuple) else value
        return InputError(f"{self.NAME}.{key}".lstrip("."), value, problem, remedy)

    def require_default(self, *keys: str, problem: str, remedy: str = "Remove it") -> None:
        """Reject values other than the default of keys that have no effect.

        `problem` says when they have none, such as "with network.mode: real".

        Raises:
            InputError: for the first such key.
        """
        for key in keys:
            if getattr(self, key) != getattr(type(self), key):
                raise self.error(key, f"has no effect {problem}", remedy)


def require_values(section: Any, name: str) -> None:
    """Reject values of a section that are not among a key's words or not in its range.

    `name` is the name of the section in errors.

    Raises:
        InputError: for the first such key.
    """
    for key, bounds in bounds_of(type(section)).items():
        value = getattr(section, key)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                require_within(one, f"{name}.{key}".lstrip("."), bounds)


@functools.cache
def bounds_of(kind: Any) -> Mapping[str, Bounds]:
    """Return the words or the range of each key of a section that has them."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: bounds
        for field in dataclasses.fields(kind)
        if (bounds := _bounds_within(hints[field.name])) is not None
    }


def _bounds_within(hint: Any) -> Bounds | None:
    direct = [
        one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Choice | Whole | Real)
    ]
    nested = map(_bounds_within, typing.get_args(hint))
    return next((bounds for bounds in (*direct, *nested) if bounds is not None), None)


def require_within(value: Any, name: str, bounds: Bounds) -> None:
    """Reject a value that is not among the words or not in the range, by the `name` of its key."""
    match bounds:
        case Whole(least, most):
            fields.integer(value, name, least, most)
        case Real(least, above, most, end):
            fields.number(value, name, least, above=above)
            if most is not None and value > most:
                bound = f"at most {most:g}"
            elif end is not None and value >= end:
                bound = f"less than {end:g}"
            else:
                return
            lower = "greater than" if above else "at least"
            remedy = f"Write a number that is {lower} {least:g} and {bound}"
            raise InputError(name, value, f"must be {bound}", remedy)
        case Choice():
            fields.text(value, name, bounds)
