"""A folder that is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skippipe_sched.errors import InputError, kind_of


@contextmanager
def new_folder(folder: Path, field: str) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end and vanishes at an error.

    Raises:
        InputError: naming `field`, if there is something at `folder` already, or it cannot be made.
    """
    folder = folder.absolute()
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise InputError(field, str(folder), "is there already", "Name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise kind_of(error)(
            field, str(folder), f"cannot be written: {error.strerror}", "Name another folder"
        ) from error
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
