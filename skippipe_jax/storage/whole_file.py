"""A file that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PARTIAL = ".partial"
"""What the name of a file ends with until it is whole."""
COPIED_BYTES = 1 << 20


def write_whole(path: Path, content: str | bytes, *, durably: bool = False) -> None:
    """Write a file so that a crash leaves the old one, if there is one, or the new one.

    With `durably` a power cut does so too, and the file is on the disk when this returns.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        if durably:
            synchronize(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durably:
        synchronize(path.parent)


def copy_beginning(path: Path, size: int) -> None:
    """Replace a file by another with its first `size` bytes; who has it open keeps the old one."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with path.open("rb") as old, partial.open("wb") as new:
            shutil.copyfileobj(old, new, COPIED_BYTES)
            new.truncate(size)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def synchronize(*paths: Path) -> None:
    """Return once these files, and the entries of these folders, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
