"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Write a line for each row, which all have as many cells; an empty column takes no room.

    Cells of the columns in `left` begin at the left, as text does, others end at the right, as
    figures do.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width or column == 0
        ).rstrip()
        for row in rows
    )
