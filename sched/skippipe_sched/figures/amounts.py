"""Bytes and seconds, written with three digits."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Bytes in a unit that leaves three digits, as 33.6 MB."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.5 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{_three_digits(size)} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds with three digits, as 12.3 s."""
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    if value == 0 or value >= 999.5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")
