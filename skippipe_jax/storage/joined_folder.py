"""The folder of a host that has joined a run: what it was given of the run's own folder.

    config.yaml plan.json plans/ tokenizer/   as the run has them
    joined.json                               of which run they are, and where its hosts listened

The configuration in it is that of the run, word for word, so that this host can give it to others
as well. What differs here, such as the folder itself, is told to each process anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, parse_config
from skippipe_jax.config.cluster import INDEPENDENT
from skippipe_jax.config.data import TOKENIZER_FOLDER
from skippipe_jax.config.parsing import CONFIG, is_run, saved_config
from skippipe_jax.config.resume import identity, require_same_for_all
from skippipe_jax.storage.files import atomic_write, os_errors_as, safe_join
from skippipe_jax.storage.run_dir import PLAN, PLANS

JOINED = "joined.json"

WHAT_TO_DO = "Name another folder by --run-dir"


def is_joined(folder: Path) -> bool:
    """Tell whether a folder is that of a joined host, which does not reach the run's own."""
    return (folder / JOINED).exists()


def require_not_joined(folder: Path) -> None:
    """Refuse to resume a run in such a folder, which has none of its checkpoints."""
    if is_joined(folder):
        raise InputError(
            "run_dir",
            str(folder),
            "is what a host was given that has joined the run",
            "Join it again by skippipe join, or name the folder of the run itself",
        )


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return what newcomers need of the folder of a run, by name.

    Raises:
        InputError: if it cannot be read.
    """
    with os_errors_as("run_dir", folder, "cannot be read", "Mend that"):
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in _files_of_run(folder)
        }


def state_of_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return a value that differs once one of these files has changed.

    Raises:
        InputError: if they cannot be looked at.
    """
    with os_errors_as("run_dir", folder, "cannot be read", "Mend that"):
        found = [(path, path.stat()) for path in _files_of_run(folder)]
    return [(str(path), status.st_mtime_ns, status.st_size) for path, status in found]


def _files_of_run(folder: Path) -> list[Path]:
    tokenizer = (path for path in (folder / TOKENIZER_FOLDER).glob("*") if path.is_file())
    plans = (folder / PLANS).glob("*.json")
    return [folder / CONFIG, folder / PLAN, *sorted(plans), *sorted(tokenizer)]


def known_before(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return what this host got when it joined by this folder earlier, and the addresses then.

    Nothing, if there is no such folder.

    Raises:
        InputError: if it holds a run that nobody has joined by it, or cannot be read.
    """
    if not is_joined(folder):
        if is_run(folder):
            raise InputError(
                "--run-dir",
                str(folder),
                "is the folder of a run itself",
                "A host that reaches it comes back by train --resume. Else name another folder",
            )
        return {}, []
    addresses = [str(address) for address in _joined(folder)["addresses"]]
    return (contents_of(folder) if is_run(folder) else {}), addresses


def keep(folder: Path, contents: Mapping[str, bytes], addresses: Sequence[str]) -> None:
    """Write what a newcomer was given into its folder, in place of what it was given earlier.

    Raises:
        InputError: if the folder holds another run or cannot be written, or what was given are not
            the files of a run.
    """
    identity = _identity(contents)
    if is_joined(folder) and _joined(folder)["run"] != identity:
        problem = "a host has joined another run by it"
        raise InputError("--run-dir", str(folder), problem, WHAT_TO_DO)
    with os_errors_as("--run-dir", folder, "cannot be written", WHAT_TO_DO):
        folder.mkdir(parents=True, exist_ok=True)
        told = {"run": identity, "addresses": [*addresses]}
        atomic_write(folder / JOINED, json.dumps(told, indent=1) + "\n")
        for path in (folder / PLANS).glob("*.json"):
            if path.relative_to(folder).as_posix() not in contents:
                path.unlink()
        # The configuration marks a folder as whole, so it comes last.
        for name in sorted(contents, key=lambda name: name == CONFIG):
            path = safe_join(folder, name)
            path.parent.mkdir(exist_ok=True)
            if not path.exists() or path.read_bytes() != contents[name]:
                atomic_write(path, contents[name])


def name_of_run(contents: Mapping[str, bytes]) -> str:
    """Return what the run's own folder is called, where it is.

    Raises:
        InputError: if what was given are not the files of a run.
    """
    return _identity(contents)["run_dir"]


def configurations(folder: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    """Read the configuration of the run, and this host's own by its folder.

    Raises:
        InputError: if `overrides` say what has to be the same on all hosts.
    """
    theirs = saved_config(folder, "--run-dir")
    own = saved_config(folder, "--run-dir", overrides)
    require_same_for_all(own, theirs)
    # A host that joins has a JAX of its own, like all hosts that others can join.
    cluster = replace(own.cluster, runtime=INDEPENDENT)
    return theirs, replace(own, run_dir=str(folder), cluster=cluster)


def _identity(contents: Mapping[str, bytes]) -> dict[str, str]:
    try:
        for name in contents:
            if not _is_of_a_run(name):
                raise ValueError(f"{name!r} is no file of a run")
        tree = fields.parse_yaml(contents[CONFIG].decode(), CONFIG, CONFIG)
        return dict(identity(parse_config(tree)))
    except InputError:
        raise
    except (ValueError, KeyError) as error:
        raise InputError(
            "ADDRESS", None, f"what was given there is no run ({error})", "Ask another host"
        ) from error


def _is_of_a_run(name: str) -> bool:
    if name in (CONFIG, PLAN):
        return True
    parts = PurePosixPath(name).parts
    if len(parts) != 2 or name != "/".join(parts) or parts[1] in ("..", "."):
        return False
    return parts[0] == TOKENIZER_FOLDER or (parts[0] == PLANS and parts[1].endswith(".json"))


def _joined(folder: Path) -> Mapping[str, Any]:
    told = fields.load_json(folder / JOINED, JOINED)
    names = ("run", "addresses")
    given = fields.mapping(told, JOINED, names, names)
    fields.sequence(given["addresses"], f"{JOINED}.addresses", minimum_length=0)
    return given
