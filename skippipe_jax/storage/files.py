"""Atomic files and folders, and errors of the file system with retries.

Network file systems fail temporarily when a server is restarted or busy, and a full disk may get
room again. So training retries operations in the folder of a run for some seconds. A host whose
retries fail exits with the code that asks for a restart; the others continue.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from skippipe_sched.errors import InputError, TemporaryError, error_class

from skippipe_jax import log

T = TypeVar("T")

PARTIAL = ".partial"
"""Suffix of an incomplete file."""
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses in seconds between attempts in the folder of a run."""


def atomic_write(path: Path, content: str | bytes, *, durably: bool = False) -> None:
    """Write a file so that a crash leaves either the old one, if any, or the new one.

    With `durably` the same holds for a power cut, and the file is on the disk on return.
    """
    with _replacement(path) as partial:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        if durably:
            synchronize(partial)
    if durably:
        synchronize(path.parent)


def replace_by_beginning(path: Path, size: int) -> None:
    """Replace a file by a copy of its first `size` bytes; open descriptors keep the old one."""
    with _replacement(path) as partial:
        shutil.copyfile(path, partial)
        os.truncate(partial, size)


@contextmanager
def _replacement(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` at the end and is removed on an error."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def synchronize(*paths: Path) -> None:
    """Flush these files, and the entries of these folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def new_directory(folder: Path, field: str) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `folder` at the end and is removed on an error.

    Raises:
        InputError: naming `field`, if `folder` exists and is not empty, or cannot be created.
        TemporaryError: naming `field`, if the disk is full.
    """
    folder = folder.absolute()
    with os_errors_as(field, folder, "cannot be written", "Name another folder"):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise InputError(field, str(folder), "already exists", "Name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    except Exception as error:
        # safetensors and array_record report a full disk by errors of their own.
        full = os.strerror(errno.ENOSPC)
        if isinstance(error, (OSError, InputError)) or full not in str(error):
            raise
        remedy = "Free disk space, and start again"
        raise TemporaryError(field, str(folder), f"cannot be written: {full}", remedy) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def safe_join(folder: Path, name: str) -> Path:
    """Return the path of `name` in a folder, which need not exist.

    Raises:
        ValueError: if the name is absolute, holds ``..``, or leads elsewhere by a link.
    """
    path, parts = folder / name, PurePosixPath(name)
    is_local = not parts.is_absolute() and parts.parts and ".." not in parts.parts
    if not is_local or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the path {name!r} points outside {folder}")
    return path


@contextmanager
def os_errors_as(
    field: str,
    path: Path,
    problem: str = "cannot be used",
    remedy: str = "Name another folder, or fix this one",
) -> Iterator[None]:
    """Raise errors of a file system as `InputError`, or `TemporaryError` if they may pass."""
    try:
        yield
    except OSError as error:
        raise error_class(error)(
            field, str(path), f"{problem}: {_reason(error, path)}", remedy
        ) from error


def _reason(error: OSError, path: Path) -> str:
    where = "" if error.filename in (None, str(path)) else f" ({error.filename})"
    return f"{error.strerror}{where}"


def retry(folder: Path, act: Callable[[], T]) -> T:
    """Call `act` on the folder of a run, and retry while the file system fails.

    Raises:
        TemporaryError: if it still fails after the last pause.
    """
    pauses_s = iter(RETRY_PAUSES_S)
    while True:
        try:
            return act()
        except (OSError, InputError) as error:
            failure = os_error_behind(error)
            if failure is None:
                raise
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise unusable(folder, failure) from error
            log.warning(f"{folder} cannot be used: {failure.strerror}; retrying in {pause_s:g} s")
        time.sleep(pause_s)


def os_error_behind(error: BaseException) -> OSError | None:
    """Return the OSError of a file system, not of a connection, that caused an error, else None."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and not isinstance(cause, ConnectionError) and cause.errno:
            return cause
    return None


def unusable(folder: Path, failure: OSError) -> TemporaryError:
    """Return the error of a host that can no longer use the folder of its run."""
    problem = f"cannot be used: {_reason(failure, folder)}"
    remedy = "Fix the storage, then continue with --resume"
    return TemporaryError("run_dir", str(folder), problem, remedy)


@contextmanager
def temporary_failures(folder: Path) -> Iterator[None]:
    """Raise file system errors in the folder of a run within a block as `TemporaryError`.

    Other errors are not changed.

    Raises:
        TemporaryError: if the folder cannot be used.
    """
    try:
        yield
    except (OSError, InputError) as error:
        failure = os_error_behind(error)
        if failure is None or isinstance(error, TemporaryError) or not _concerns(folder, error):
            raise
        raise unusable(folder, failure) from error


def _concerns(folder: Path, error: OSError | InputError) -> bool:
    """Return whether an error is about the folder of a run, or a file in it."""
    if isinstance(error, InputError):
        return error.field == "run_dir"
    name = error.filename
    return isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())
