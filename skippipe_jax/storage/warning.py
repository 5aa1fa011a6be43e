"""How what does not end a run is told of."""

from __future__ import annotations

import sys


def warn(text: str) -> None:
    """Print a line to stderr, at once."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
