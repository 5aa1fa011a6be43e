"""How what does not end a run is told of."""

from __future__ import annotations

import sys
from contextlib import suppress


def warn(text: str) -> None:
    """Print a line to stderr, at once; not where that is on a disk that is full."""
    with suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)
