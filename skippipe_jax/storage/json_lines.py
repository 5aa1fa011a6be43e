"""Files of JSON objects, one on each line, to which lines are only added.

A crash or a full disk can leave a line that is cut short. What is added later begins on a line of
its own, and readers leave out what they cannot read. Lines that count steps are in their order, so
that one is found without reading all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from skippipe_sched.errors import InputError, kind_of

from skippipe_jax.storage.warning import warn

T = TypeVar("T")

BLOCK_BYTES = 1 << 16
LEFT_OUT = "This line is left out"
"""What becomes of a line that cannot be read, as the message of its error says it."""


def add_line(descriptor: int, line: Mapping[str, Any]) -> None:
    """Add a line to an open file, all of it.

    Where that fails, it may be called again: what was cut short becomes a line that nobody reads.
    """
    size = os.fstat(descriptor).st_size
    is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    left = memoryview(b"\n" * is_torn + json.dumps(line).encode() + b"\n")
    while left:  # A full disk takes a part, and fails only at the rest.
        left = left[os.write(descriptor, left) :]


def add_line_to(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file, which is made if it is not there."""
    with path.open("a+b", buffering=0) as file:
        add_line(file.fileno(), line)


def read_lines(path: Path, read: Callable[[str, str], T]) -> list[T]:
    """What `read` makes of each line and its name; one that it refuses is left out with a warning.

    The last one is left out without a word if it has no end: it may be under way.

    Raises:
        InputError: if the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        problem = f"cannot read this file: {error.strerror}"
        raise kind_of(error)(path.name, str(path), problem, "Check the path") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(read(line.decode(errors="replace"), f"{path}, line {number}"))
        except InputError as error:
            warn(str(error))
    return found


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines from the last to the first, each after the offset of its end; only those with one.

    Raises:
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        held, end = b"", None
        while True:
            newline = held.rfind(b"\n")
            if newline < 0 and start > 0:
                size = min(BLOCK_BYTES, start)
                start = file.seek(start - size)
                held = file.read(size) + held
                continue
            if end is not None:
                yield end, held[newline + 1 :]
            if newline < 0:
                return
            end, held = start + newline + 1, held[:newline]


def end_of_step(path: Path, step: int) -> tuple[int, int]:
    """Where the lines up to `step` end, and the step of the last of them; 0 if there are none.

    Raises:
        OSError: if the file cannot be read.
    """
    for end, line in lines_from_end(path):
        found = step_of(line)
        if found is not None and found <= step:
            return end, found
    return 0, 0


def line_of_step(path: Path, step: int) -> dict[str, Any] | None:
    """The line of a step, if there is one: found by halves, whatever the length of the file.

    Raises:
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while low < high:
            middle = (low + high) // 2
            if middle > 0:
                file.seek(middle - 1)
                file.readline()
            else:
                file.seek(0)
            found = line = None
            while found is None and (line := file.readline()):
                found = step_of(line)
            if found is None or found > step:
                high = middle
            elif found < step:
                low = file.tell()
            else:
                assert line is not None, "has a step"
                return json.loads(line)
    return None


def step_of(line: bytes) -> int | None:
    """The step that a line tells of; None where it cannot be read."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
