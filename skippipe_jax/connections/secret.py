"""The secret of a run, which all of its hosts have and nobody else: making one, and reading it."""

from __future__ import annotations

import dataclasses
import os
import secrets
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError, kind_of

SECRET_VARIABLE = "SKIPPIPE_SECRET"
"""The environment variable that holds the secret itself. It wins over all else."""

FILE_VARIABLE = "SKIPPIPE_SECRET_FILE"
"""The environment variable with the path of the file that holds it, in place of the configured."""

FEWEST_CHARACTERS = 32
"""Whoever comes to the port of a host can try secrets for as long as he likes, far from it: shorter
ones may have been thought up."""

_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Secret:
    """What the hosts of a run know of each other.

    Attributes:
        field: by which configuration key or variable this host has it.
        shown: what is told of it in messages, which is never the secret.
        text: the secret.
    """

    field: str
    shown: str
    text: str = dataclasses.field(repr=False)


def make_secret(path: Path) -> None:
    """Write a new secret to a file of its own, which only this user may read.

    Raises:
        InputError: if there is such a file already, or it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        problem = "is there already, and hosts may have it as their secret"
        raise InputError("FILE", str(path), problem, "Give another name") from error
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise kind_of(error)(
            "FILE", str(path), problem, "Give a path in a folder of yours"
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{secrets.token_urlsafe(_BYTES)}\n")


def read_secret(configured: str | None) -> Secret | None:
    """The secret that the environment or else the configuration gives this host; None if none does.

    Raises:
        InputError: if what they name is no secret, or cannot be read.
    """
    if (text := os.environ.get(SECRET_VARIABLE)) is not None:
        return _checked(SECRET_VARIABLE, "(not shown)", text)
    named = os.environ.get(FILE_VARIABLE)
    path, where = (named, FILE_VARIABLE) if named else (configured, "cluster.secret")
    return None if path is None else _checked(where, path, fields.read_text(Path(path), where))


def _checked(where: str, shown: str, text: str) -> Secret:
    text = text.strip()
    if len(text) < FEWEST_CHARACTERS or not text.isprintable() or " " in text:
        problem = f"holds no secret, which is one word of {FEWEST_CHARACTERS} characters or more"
        raise InputError(where, shown, problem, "Make one by skippipe keys FILE")
    return Secret(where, shown, text)
