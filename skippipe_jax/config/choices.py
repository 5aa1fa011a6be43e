"""Keys whose text is one of a few words: the choices stand at the key's type, as ``Choice``."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from skippipe_sched import fields


class Choice(tuple[str, ...]):
    """The words that a key may hold, in ``Annotated[str, Choice((...))]``."""

    __slots__ = ()


DTYPES = Choice(("float32", "bfloat16"))


@functools.cache
def choices_of(kind: Any) -> Mapping[str, Choice]:
    """Return the choices of each key of a section that has some."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: found
        for field in dataclasses.fields(kind)
        if (found := _choice_within(hints[field.name])) is not None
    }


def require_choices(section: Any, name: str) -> None:
    """Refuse text that is none of its key's choices, in a section of this name.

    Raises:
        InputError: for the first such key.
    """
    for key, choices in choices_of(type(section)).items():
        value = getattr(section, key)
        if value is not None:
            fields.text(value, f"{name}.{key}".lstrip("."), choices)


def _choice_within(hint: Any) -> Choice | None:
    own = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Choice)]
    within = map(_choice_within, typing.get_args(hint))
    return next((found for found in (*own, *within) if found is not None), None)
