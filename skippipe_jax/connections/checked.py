"""What other hosts say, checked before any of it is believed: types with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MOST_CHARACTERS = 4096
"""The longest text, such as a path."""

MOST_PARTS = 1024
"""So many texts there may be by name."""

MOST_HOSTS = 1 << 17
"""So many hosts there may be, with those that may come."""

ShortText = Annotated[str, Meta(max_length=MOST_CHARACTERS)]
Texts = Annotated[Mapping[ShortText, ShortText], Meta(max_length=MOST_PARTS)]
HostNumber = Annotated[int, Meta(ge=0, lt=MOST_HOSTS)]
HostCount = Annotated[int, Meta(ge=0, lt=1 << 16)]

_UNPRINTABLE = {code: None for code in [*range(32), 127]}


def number(given: Any, end: int) -> int:
    """Return a whole number from 0 on, below `end`; `ValueError` for anything else."""
    return msgspec.convert(given, Annotated[int, Meta(ge=0, lt=end)])


def texts(given: Any) -> Mapping[str, str]:
    """Return a few short texts by name; `ValueError` for anything else."""
    return msgspec.convert(given, Texts)


def printable(text: str) -> str:
    """Return a text that is printed without what a terminal would take for a command."""
    return text.encode("ascii", "backslashreplace").decode().translate(_UNPRINTABLE)


def require_below(end: int, *hosts: int) -> None:
    """Refuse numbers of hosts of which a run has less, by a `ValueError`."""
    if max(hosts) >= end:
        raise ValueError(f"has host {max(hosts)}, where there are at most {end}")
