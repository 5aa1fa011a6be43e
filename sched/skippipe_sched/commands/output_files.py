"""Output files of the commands."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError, error_class


def require_writable(option: str, path: Path | None, source: Path | None = None) -> None:
    """Check before a search that a path can be written, and is not the `source` that is read.

    Names of other picture formats than SVG are refused.

    Raises:
        InputError: naming the option.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(option, str(path), "is a folder", "Give the path of a file")
    if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".pdf"):
        # Under such a name, no program would open the file.
        remedy = "Give a picture the ending .svg, a plan .json"
        raise InputError(option, str(path), "has an ending for other contents", remedy)
    if path.exists() and not path.is_file():
        return  # A pipe or a device is written to in place.
    if source is not None and os.path.realpath(path) == os.path.realpath(source):
        problem = "is the file that this command reads, which would be lost"
        raise InputError(option, str(path), problem, "Give another path")
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        problem = f"cannot be written: {existing} is not a writable folder"
        raise InputError(option, str(path), problem, "Give another path")


def write(option: str, path: Path, content: str | Callable[[Path], Any]) -> None:
    """Write text, or call a function that writes the path; make missing folders.

    On an error, a new file is removed.

    Raises:
        InputError: naming the option, if it cannot be written.
    """
    require_writable(option, path)
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content(path)
    except OSError as error:
        if is_new:
            with suppress(OSError):
                path.unlink()  # Part of a file would pass for a whole one.
        raise error_class(error)(
            option, str(path), f"cannot be written: {error.strerror}", "Give another path"
        ) from error
