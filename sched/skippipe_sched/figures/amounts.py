"""Formatting of bytes and times with three digits."""

from __future__ import annotations

from skippipe_sched.fields import UNITS_S


def size_text(size: float) -> str:
    """Format bytes in a unit that leaves three digits, such as 33.6 MB."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.5 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{_three_digits(size)} {unit}"


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits, such as 12.3 s."""
    return f"{_three_digits(seconds)} s"


def duration_text(seconds: float) -> str:
    """Format a time as `fields.duration` reads it, to three digits: 30s, 1.5h, 7d."""
    suiting = [unit for unit, length_s in UNITS_S.items() if seconds >= 0.9995 * length_s]
    unit = max(suiting, key=UNITS_S.__getitem__, default="s")
    count = seconds / UNITS_S[unit]
    return f"{count:.0f}{unit}" if count >= 999.5 else f"{count:.3g}{unit}"


def _three_digits(value: float) -> str:
    if value == 0 or value >= 999.5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")
