"""Errors caused by a user's input or machine, and their report by commands."""

from __future__ import annotations

import errno
import itertools
import os
import reprlib
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

INPUT_ERROR_EXIT_CODE = 2
"""Exit code of errors that persist on a retry."""
TEMPORARY_EXIT_CODE = 75
"""Exit code of errors that may be over on a retry (EX_TEMPFAIL)."""
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
SIGPIPE_EXIT_CODE = 128 + 13
"""Exit code of a process that ends by SIGPIPE, which not all platforms have."""

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = (
    *DISK_FULL_ERRNOS,
    errno.EADDRINUSE,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
)


SHOWN_CHARACTERS = 200
"""Limit on the shown part of a value in a message."""


class _Shown(reprlib.Repr):
    """Version of `repr` that visits only the shown part of a value."""

    def __init__(self):
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxdict = SHOWN_CHARACTERS
        self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = SHOWN_CHARACTERS
        self.maxstring = self.maxlong = self.maxother = 5 * SHOWN_CHARACTERS
        self._left = SHOWN_CHARACTERS

    def repr1(self, x: Any, level: int) -> str:
        """Write an inner value; each takes at least one character."""
        self._left -= 1
        return super().repr1(x, level) if self._left >= 0 else self.fillvalue

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        """Write a mapping in its own order."""
        first = itertools.islice(x.items(), self.maxdict)
        parts = [
            f"{self.repr1(key, level - 1)}: {self.repr1(item, level - 1)}" for key, item in first
        ]
        return "{" + ", ".join(parts) + "}"


LINES = "\n\t"
"""Characters kept in a text of several lines, in addition to printable ones."""


def printable(text: str, kept: str = "") -> str:
    """Escape the characters of a foreign text that are not printable, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


class SkipPipeError(Exception):
    """Base of the project's own errors; each has a text."""

    def __init__(self, text: str):
        """Store the text."""
        super().__init__(text)


class InputError(SkipPipeError, ValueError):
    """Invalid input, with the field, its value, the problem and the remedy.

    Raised where input enters; commands print it and exit with its code, 2.
    """

    exit_code = INPUT_ERROR_EXIT_CODE

    def __init__(self, field: str, value: Any, problem: str, remedy: str):
        """Store the four parts; `field` is a dotted path such as ``case.rules.max_jump``."""
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        shown = _Shown().repr(value)
        if len(shown) > SHOWN_CHARACTERS:
            shown = shown[: SHOWN_CHARACTERS - 3] + "..."
        # Keys and names are user input too: whatever they contain, the message is one line.
        super().__init__(printable(f"{field} = {shown}: {problem}. {remedy}."))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the four parts, so that another process can raise the error again."""
        return type(self), (self.field, self.value, self.problem, self.remedy)


class TemporaryError(InputError):
    """Error that may be over on a retry: a full disk, a port in use, a late host.

    Commands then exit with code 75, and their caller may start them again.
    """

    exit_code = TEMPORARY_EXIT_CODE


class Terminated(KeyboardInterrupt):
    """SIGTERM: a command ends as by Ctrl-C, but with its own exit code, 143."""


def interrupt_exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code of a process that a signal has interrupted."""
    return TERMINATED_EXIT_CODE if isinstance(error, Terminated) else INTERRUPTED_EXIT_CODE


def error_class(error: BaseException) -> type[InputError]:
    """Return `TemporaryError` for system errors that may be over on a retry, else `InputError`."""
    passes = isinstance(error, OSError) and error.errno in _TEMPORARY
    return TemporaryError if passes else InputError


def as_input_error(error: BaseException) -> InputError | None:
    """Convert an error into one that is reported in one line, if it is such an error; else None."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        path = error.filename or "a file"
        problem = f"cannot be written: {error.strerror}"
        return TemporaryError("file", str(path), problem, "Free disk space, and start again")
    return None


def _stdout_is_read() -> bool:
    """Return whether stdout, if it is a pipe, has a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def run_command(
    command: Callable[[], int], interrupted: str = "interrupted; nothing was saved"
) -> int:
    """Run a command and return its exit code; an `InputError` becomes one line and its code.

    So does a full disk. A Ctrl-C that the command does not handle becomes the line `interrupted`,
    and code 130; SIGTERM the same line after its name, and code 143. If stdout has no reader any
    more, as after `| head`, the command ends with code 141.
    """
    try:
        with _raise_on_signals():
            code = command()
            print(end="", flush=True)
            return code
    except (InputError, OSError) as error:
        if isinstance(error, BrokenPipeError) and not _stdout_is_read():
            # The interpreter writes the rest of the buffer when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return SIGPIPE_EXIT_CODE
        input_error = as_input_error(error)
        if input_error is None:
            raise
        print(f"error: {input_error}", file=sys.stderr)
        return input_error.exit_code
    except KeyboardInterrupt as error:
        by = "SIGTERM: " if isinstance(error, Terminated) else ""
        print(by + interrupted, file=sys.stderr)
        return interrupt_exit_code(error)


@contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise, unless they have another handler."""
    if not _is_main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is _end_at_once:  # Set by `end_quietly_on_interrupt`.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    if before in (signal.SIG_DFL, _end_at_once):
        signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_terminated(*_: Any) -> NoReturn:
    """Raise the exception that ends a running command on SIGTERM."""
    raise Terminated("by SIGTERM")


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once with one line, where they would raise.

    For code that would lose the exception, or mistake it for another.
    """
    raising = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: raise_terminated}
    replaced = _end_by(raising)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, raising[number])


# For a command that imports its libraries, which takes seconds: some packages treat a
# KeyboardInterrupt as a failed import.
loading = exit_on_signals


def end_quietly_on_interrupt() -> None:
    """Let signals end a process without a traceback while a package is imported for a command.

    The effect ends when `run_command` begins.
    """
    is_command = sys.argv[:1] == ["-m"] or os.path.basename(*sys.argv[:1] or [""]) == "skippipe"
    if is_command:
        _end_by({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL})


def _end_by(handled: Mapping[signal.Signals, Any]) -> list[signal.Signals]:
    """Let signals with these handlers end the process at once; return those signals."""
    replaced = [
        number
        for number, handler in handled.items()
        if _is_main_thread() and signal.getsignal(number) is handler
    ]
    for number in replaced:
        signal.signal(number, _end_at_once)
    return replaced


def _end_at_once(number: int, _: Any) -> NoReturn:
    """End the process by a signal, whatever is in progress."""
    with suppress(OSError):  # a closed stream has no reader to lose
        os.write(2, f"ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
