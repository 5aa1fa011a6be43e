"""The error that a user's own input can cause, and how a command reports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

INPUT_ERROR_EXIT_CODE = 2


class InputError(ValueError):
    """Says which field is wrong, what it holds, why that is wrong, and what to do about it.

    Raised at the edge, where input enters; commands print it and exit with code 2.
    """

    def __init__(self, field: str, value: Any, problem: str, remedy: str):
        """Keep the four parts; `field` is a dotted path such as ``case.rules.max_jump``."""
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        message = f"{field} = {shown}: {problem}. {remedy}."
        # Keys and names come from the user too: whatever they hold, the message is one line.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; an `InputError` becomes one line and code 2."""
    try:
        return command()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return INPUT_ERROR_EXIT_CODE
