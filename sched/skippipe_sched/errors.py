"""The error that a user's own input can cause, and how a command reports it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INPUT_ERROR_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process raise it anew."""
        return type(self), (self.field, self.value, self.problem, self.remedy)


def run_command(
    command: Callable[[], int], interrupted: str = "interrupted; nothing is kept"
) -> int:
    """Run a command and return its exit code; an `InputError` becomes one line and code 2.

    A Ctrl-C that the command does not take itself becomes the line `interrupted`, and code 130.
    """
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # By `end_quietly_on_interrupt`.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return INPUT_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


@contextmanager
def loading() -> Iterator[None]:
    """While a command imports what it computes with, let Ctrl-C end it without a traceback.

    That takes seconds, and some packages would take a KeyboardInterrupt for a failed import.
    """
    in_main = threading.current_thread() is threading.main_thread()
    is_default = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_quietly_on_interrupt() -> None:
    """Where a package is imported for a command, let Ctrl-C end it without a traceback.

    That is over when `run_command` begins.
    """
    is_command = sys.argv[:1] == ["-m"] or os.path.basename(*sys.argv[:1] or [""]) == "skippipe"
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
