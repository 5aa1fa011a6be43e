"""Folder of a diskless host: the files that it received of the run's own folder.

    config.yaml plan.json plans/ tokenizer/   the same files as in the run's folder
    joined.json                               the identity of the run, and addresses of its hosts

Its configuration is an exact copy of that of the run, so that this host can send it to others as
well. Settings of this host, such as the folder itself, are given at each start of the process.
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
from skippipe_jax.config.resume import identity, require_same_on_all_hosts
from skippipe_jax.storage.files import atomic_write, os_errors_as, safe_join
from skippipe_jax.storage.run_dir import PLAN, PLANS

JOINED = "joined.json"

NAME_ANOTHER = "Name another folder with --run-dir"


def is_joined(folder: Path) -> bool:
    """Return whether a folder is that of a diskless host."""
    return (folder / JOINED).exists()


def require_not_joined(folder: Path) -> None:
    """Refuse to resume a run in the folder of a diskless host, which has no checkpoints."""
    if is_joined(folder):
        raise InputError(
            "run_dir",
            str(folder),
            "is the folder of a diskless host, without checkpoints",
            "Rejoin with skippipe join, or name the folder of the run itself",
        )


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files that joiners need of the folder of a run, by name.

    Raises:
        InputError: if they cannot be read.
    """
    with os_errors_as("run_dir", folder, "cannot be read", "Make the folder readable"):
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in _files_of_run(folder)
        }


def file_stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Return a value that changes whenever one of the files of `contents_of` changes.

    Raises:
        InputError: if they cannot be accessed.
    """
    with os_errors_as("run_dir", folder, "cannot be read", "Make the folder readable"):
        files = [(path, path.stat()) for path in _files_of_run(folder)]
    return [(str(path), status.st_mtime_ns, status.st_size) for path, status in files]


def _files_of_run(folder: Path) -> list[Path]:
    tokenizer = (path for path in (folder / TOKENIZER_FOLDER).glob("*") if path.is_file())
    plans = (folder / PLANS).glob("*.json")
    return [folder / CONFIG, folder / PLAN, *sorted(plans), *sorted(tokenizer)]


def earlier_join(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the files and addresses that this host received in an earlier join by this folder.

    Both are empty if there was no earlier join.

    Raises:
        InputError: if it is the run's own folder, or cannot be read.
    """
    if not is_joined(folder):
        if is_run(folder):
            raise InputError(
                "--run-dir",
                str(folder),
                "is the folder of a run itself",
                "Rejoin with skippipe train --resume, or name another folder",
            )
        return {}, []
    addresses = [str(address) for address in _joined(folder)["addresses"]]
    return (contents_of(folder) if is_run(folder) else {}), addresses


def keep(folder: Path, contents: Mapping[str, bytes], addresses: Sequence[str]) -> None:
    """Write the files that a joiner has received to its folder, in place of earlier ones.

    Raises:
        InputError: if the folder holds another run or cannot be written, or `contents` are not the
            files of a run.
    """
    identity = _identity(contents)
    if is_joined(folder) and _joined(folder)["run"] != identity:
        problem = "a host used this folder to join another run"
        raise InputError("--run-dir", str(folder), problem, NAME_ANOTHER)
    with os_errors_as("--run-dir", folder, "cannot be written", NAME_ANOTHER):
        folder.mkdir(parents=True, exist_ok=True)
        record = {"run": identity, "addresses": [*addresses]}
        atomic_write(folder / JOINED, json.dumps(record, indent=1) + "\n")
        for path in (folder / PLANS).glob("*.json"):
            if path.relative_to(folder).as_posix() not in contents:
                path.unlink()
        # The configuration marks a folder as complete, so write it last.
        for name in sorted(contents, key=lambda name: name == CONFIG):
            path = safe_join(folder, name)
            path.parent.mkdir(exist_ok=True)
            if not path.exists() or path.read_bytes() != contents[name]:
                atomic_write(path, contents[name])


def run_dir_of(contents: Mapping[str, bytes]) -> str:
    """Return the `run_dir` in the configuration of the run.

    Raises:
        InputError: if `contents` are not the files of a run.
    """
    return _identity(contents)["run_dir"]


def configurations(folder: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    """Return the configuration of the run, and that of this host with its folder.

    Raises:
        InputError: if `overrides` set a value that must be the same on all hosts.
    """
    theirs = saved_config(folder, "--run-dir")
    local = saved_config(folder, "--run-dir", overrides)
    require_same_on_all_hosts(local, theirs)
    # Only runs in `independent` mode can be joined.
    cluster = replace(local.cluster, runtime=INDEPENDENT)
    return theirs, replace(local, run_dir=str(folder), cluster=cluster)


def _identity(contents: Mapping[str, bytes]) -> dict[str, str]:
    try:
        for name in contents:
            if not _is_of_a_run(name):
                raise ValueError(f"{name!r} is not a file of a run")
        tree = fields.parse_yaml(contents[CONFIG].decode(), CONFIG, CONFIG)
        return dict(identity(parse_config(tree)))
    except InputError:
        raise
    except (ValueError, KeyError) as error:
        raise InputError(
            "ADDRESS", None, f"the received files are not a run ({error})", "Ask another host"
        ) from error


def _is_of_a_run(name: str) -> bool:
    if name in (CONFIG, PLAN):
        return True
    parts = PurePosixPath(name).parts
    if len(parts) != 2 or name != "/".join(parts) or parts[1] in ("..", "."):
        return False
    return parts[0] == TOKENIZER_FOLDER or (parts[0] == PLANS and parts[1].endswith(".json"))


def _joined(folder: Path) -> Mapping[str, Any]:
    record = fields.load_json(folder / JOINED, JOINED)
    names = ("run", "addresses")
    record = fields.checked_mapping(record, JOINED, names, names)
    fields.sequence(record["addresses"], f"{JOINED}.addresses", minimum_length=0)
    return record
