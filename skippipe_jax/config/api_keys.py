"""API keys of a service, in a file that the service and its clients share."""

from __future__ import annotations

from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Read API keys, one per line; without a file there are none.

    Raises:
        InputError: if the file cannot be read, or holds no keys.
    """
    if path is None:
        return ()
    field = "--api-key-file"
    keys = tuple(line.strip() for line in fields.read_text(path, field).splitlines())
    keys = tuple(filter(None, keys))
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        remedy = "Write one printable ASCII key per line, such as skippipe keygen FILE generates"
        raise InputError(field, str(path), "does not contain valid API keys", remedy)
    return keys


def header_with(path: Path | None) -> dict[str, str]:
    """Return the HTTP header that carries the first key of a file; empty without a file.

    Raises:
        InputError: if the file cannot be read, or holds no keys.
    """
    keys = read_keys(path)
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}
