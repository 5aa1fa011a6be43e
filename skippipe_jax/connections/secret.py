"""The secret of a run, which all of its hosts have and nobody else: making one, and reading it."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import shlex
import stat
from pathlib import Path

from skippipe_sched import fields
from skippipe_sched.errors import InputError, kind_of

from skippipe_jax import log

SECRET_VARIABLE = "SKIPPIPE_SECRET"
"""The environment variable that holds the secret itself. It wins over all else."""

FILE_VARIABLE = "SKIPPIPE_SECRET_FILE"
"""The environment variable with the path of the file that holds it, in place of the configured."""

FEWEST_CHARACTERS = 32
"""Whoever comes to the port of a host can try secrets for as long as he likes, far from it: shorter
ones may have been thought up."""

MOST_SECRETS = 2
"""The first one of a file is shown to others, and each is taken from them."""

_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Secret:
    """What the hosts of a run know of each other.

    Attributes:
        field: by which configuration key or variable this host has it.
        shown: what is told of it in messages, which is never the secret.
        text: the secret.
        other: one that is taken for it, while one takes the place of the other.
    """

    field: str
    shown: str
    text: str = dataclasses.field(repr=False)
    other: str | None = dataclasses.field(default=None, repr=False)


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
    """Read the secret that the environment or the configuration gives this host, if one does.

    Raises:
        InputError: if what they name is no secret, or two, or cannot be read.
    """
    if (text := os.environ.get(SECRET_VARIABLE)) is not None:
        return _checked(SECRET_VARIABLE, "(not shown)", text)
    named = os.environ.get(FILE_VARIABLE)
    path, where = (named, FILE_VARIABLE) if named else (configured, "cluster.secret")
    if path is None:
        return None
    found = _checked(where, path, fields.read_text(Path(path), where))
    _warn_of_readers(where, path)
    return found


@functools.cache  # which says it once
def _warn_of_readers(where: str, path: str) -> None:
    """Say that every user of this machine can read or change the file of a secret, if so."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        told = f"{where} = {path!r}: every user of this machine can use this secret (mode {mode:o})"
        log.warning(f"{told}. Run chmod 600 {shlex.quote(path)}")


def _checked(where: str, shown: str, text: str) -> Secret:
    found = [line.strip() for line in text.strip().split("\n")]
    for one in found:
        if len(one) < FEWEST_CHARACTERS or not one.isprintable() or " " in one:
            problem = (
                f"holds no secret, which is one word of {FEWEST_CHARACTERS} characters or more"
            )
            raise InputError(where, shown, problem, "Make one by skippipe keygen FILE")
    if len(found) > MOST_SECRETS:
        problem = f"holds {len(found)} secrets, of which at most {MOST_SECRETS} are told apart"
        raise InputError(where, shown, problem, "Keep the one that is shown and one that is taken")
    return Secret(where, shown, *found)
