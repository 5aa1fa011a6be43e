"""What host 0 says while a run is set up and goes on; the other hosts say nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable

from skippipe_sched.errors import LINES, printable
from tqdm import tqdm


def say(text: str) -> None:
    """Print a line."""
    print(printable(text, kept=LINES), flush=True)


def say_meanwhile(text: str) -> None:
    """Say what takes so long, above the bar if there is one."""
    tqdm.write(printable(text, kept=LINES), file=sys.stderr)


def on_host_0(host: int, tell: Callable[[str], None]) -> Callable[[str], None]:
    """A way to tell something, which is used on host 0 alone."""
    return tell if host == 0 else lambda _: None
