"""What may change when a run is resumed, and what would make it another run."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax.config.parsing import to_tree
from skippipe_jax.config.run import Config

# How the model is drawn at first, cut into stages and computed: the parameters of a run that has
# begun do not depend on these.
FREE_TO_CHANGE = (
    "model.initial_deviation",
    "model.stage_layers",
    "model.recompute",
    "model.attention",
)
OF_THE_RUN = ("seed", "init_from", "model", "data")
"""The sections that make a run this one, but for what is free to change in them."""
LONGEST_TEXT = 200
"""Characters of the longest value that hosts tell each other whole; else they tell a digest."""
DIFFERS_BY_HOST = (
    "compilation_cache",
    "data.path",
    "train.metrics_port",
    "cluster.bind_address",
    "cluster.secret",
    "cluster.insecure",
)
"""What a host that joins may be told otherwise than the run, with the paths in `data.mixture`; the
texts themselves are compared."""


def require_same_run(config: Config, saved: Config) -> list[tuple[str, Any, Any]]:
    """Refuse to resume a run under a configuration that would make it another run.

    Model, first parameters and data must be as they were. The plan, the recipe, how the model is
    cut into stages, how replicas average and the optimizer goes on, how long to train, how often to
    save, and on which hosts to run may change. Returns what has changed in how the model is cut and
    computed, replicas average and the optimizer goes on, which a default of another version may
    have changed: key, new and old value.
    """
    new, old = to_tree(config), to_tree(saved)
    changes = [
        change
        for section in ("optimizer", "averaging")
        for change in _differences(section, new[section], old[section])
    ]
    for section in OF_THE_RUN:
        for name, now, before in _differences(section, new[section], old[section]):
            if name in FREE_TO_CHANGE:
                changes.append((name, now, before))
                continue
            raise InputError(
                name,
                now,
                f"the run that is to be resumed has {before!r}",
                f"Set {name}={json.dumps(before)}, or start another run with another run_dir",
            )
    return changes


def require_same_for_all(config: Config, of_run: Config) -> None:
    """Refuse what a host that joins is told otherwise than the run, but where hosts may differ.

    Raises:
        InputError: naming the key.
    """
    own, theirs = _without_own(config), _without_own(of_run)
    for section, value in own.items():
        for name, given, there in _differences(section, value, theirs[section]):
            raise InputError(
                name,
                given,
                f"the run has {there!r}, which is the same for all its hosts",
                f"Leave it out: hosts may differ in {', '.join(DIFFERS_BY_HOST)}, and the paths in "
                "data.mixture",
            )


def _without_own(config: Config) -> dict[str, Any]:
    """Return what a configuration says that hosts which join cannot be told otherwise."""
    tree = to_tree(config)
    for name in DIFFERS_BY_HOST:
        *sections, key = name.split(".")
        del functools.reduce(dict.__getitem__, sections, tree)[key]
    for source in tree["data"]["mixture"] or ():
        del source["path"]
    return tree


def identity(config: Config) -> Mapping[str, str]:
    """Return what makes a run this one and not another, by key."""
    tree = to_tree(config)
    for name in FREE_TO_CHANGE:
        section, key = name.split(".")
        del tree[section][key]
    return _as_texts({name: tree[name] for name in ("run_dir", *OF_THE_RUN)})


def settings(config: Config) -> Mapping[str, str]:
    """Return all that a run is told, by key."""
    return _as_texts(to_tree(config))


def _as_texts(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Write the values of keys as short texts, which hosts compare and tell readers of."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _as_texts(value, f"{prefix}{key}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        found[prefix + key] = text if len(text) <= LONGEST_TEXT else digest(value)
    return found


def digest(value: Any) -> str:
    """Return what stands for a value of JSON where it is compared."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _differences(name: str, new: Any, old: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(new, dict) and isinstance(old, dict):
        found = []
        for key in dict.fromkeys([*old, *new]):
            found += _differences(f"{name}.{key}", new.get(key), old.get(key))
        return found
    return [(name, new, old)] if new != old else []
