"""A run folder that fails for a while: what training does there is done again, some seconds later.

Network file systems do so when a server is restarted or busy, and a disk that is full may have room
again. A host for which that takes too long ends by itself, with the code that says to start it
again; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.storage.warning import warn

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""So long it is waited between one try and the next."""


def retried(folder: Path, act: Callable[[], T]) -> T:
    """Do something in a run folder, which may be done again where the file system fails.

    Raises:
        TemporaryError: if it still fails after the last pause.
    """
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            return act()
        except (OSError, InputError) as error:
            failure = failure_of_storage(error)
            if failure is None:
                raise
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise unusable(folder, failure) from error
            warn(f"{folder} cannot be used: {failure.strerror}; tried again in {pause_s:g} s")
        time.sleep(pause_s)


def failure_of_storage(error: BaseException) -> OSError | None:
    """What the file system said, if that is behind an error; what came of a connection is not."""
    for told in (error, error.__cause__):
        if isinstance(told, OSError) and not isinstance(told, ConnectionError) and told.errno:
            return told
    return None


def unusable(folder: Path, failure: OSError) -> TemporaryError:
    """The error of a host that has waited for its run folder in vain."""
    where = f" ({failure.filename})" if failure.filename else ""
    return TemporaryError(
        "run_dir",
        str(folder),
        f"cannot be used: {failure.strerror}{where}",
        "Mend that, and --resume goes on",
    )


@contextmanager
def temporary_failures(folder: Path) -> Iterator[None]:
    """Raise what the run folder causes in a block as an error that may be over later.

    Other errors are raised as they are.

    Raises:
        TemporaryError: if the folder cannot be used.
    """
    try:
        yield
    except (OSError, InputError) as error:
        failure = failure_of_storage(error)
        if failure is None or isinstance(error, TemporaryError) or not _is_of(folder, error):
            raise
        raise unusable(folder, failure) from error


def _is_of(folder: Path, error: OSError | InputError) -> bool:
    """Whether an error speaks of a run folder, or of a file in it."""
    if isinstance(error, InputError):
        return error.field == "run_dir"
    named = error.filename
    return isinstance(named, str) and Path(named).absolute().is_relative_to(folder.absolute())
