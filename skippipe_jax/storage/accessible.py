"""A folder that cannot be read or written, as a user is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skippipe_sched.errors import kind_of


@contextmanager
def accessible(folder: Path, field: str = "run_dir") -> Iterator[None]:
    """Say which folder it is that cannot be read or written, as an `InputError`."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename in (None, str(folder)) else f" ({error.filename})"
        raise kind_of(error)(
            field,
            str(folder),
            f"cannot be used: {error.strerror}{where}",
            "Give another folder, or mend that",
        ) from error
