"""Names that were written elsewhere, and must not lead out of the folder in which they count."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in a folder, which need not be there yet.

    Raises:
        ValueError: if the name is absolute, holds ``..``, or leads elsewhere by a link.
    """
    path, parts = folder / name, PurePosixPath(name)
    own = not parts.is_absolute() and parts.parts and ".." not in parts.parts
    if not own or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the name {name!r} leads out of {folder}")
    return path
