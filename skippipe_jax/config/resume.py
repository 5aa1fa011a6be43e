"""Checks of a configuration on resume and on join."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax.config.parsing import leaves, to_tree
from skippipe_jax.config.run import Config

# Initialization, stage partition and computation of the model: the parameters of a run that has
# begun do not depend on these keys.
FREE_TO_CHANGE = (
    "model.initial_deviation",
    "model.stage_layers",
    "model.recompute",
    "model.attention",
)
FIXED_SECTIONS = ("seed", "init_from", "model", "data")
"""Sections that must not change on resume, except the keys in `FREE_TO_CHANGE`."""
LONGEST_TEXT = 200
"""Maximum length, in characters, of a value that hosts compare as text; else as a digest."""
OF_EACH_HOST = (
    "compilation_cache",
    "train.metrics_port",
    "cluster.bind_address",
    "cluster.secret",
    "cluster.insecure",
)
"""Keys in which hosts may differ."""
DIFFERS_BY_HOST = (*OF_EACH_HOST, "data.path")
"""Keys in which a joining host may differ from the run, as it may in the paths in `data.mixture`;
the texts themselves are compared."""


def require_same_run(config: Config, saved: Config) -> list[tuple[str, Any, Any]]:
    """Reject a configuration that does not continue the saved run, and return what changed.

    Model, initial parameters and data must be equal. The plan, the recipe, the stage partition, the
    averaging of replicas, the optimizer, the length of training, the checkpoints and the hosts may
    change. Returns key, new value and old value of each change in stage partition, computation,
    averaging and optimizer, because a default of another version may have caused it.

    Raises:
        InputError: naming the key.
    """
    new, old = to_tree(config), to_tree(saved)
    changes = [
        change
        for section in ("optimizer", "averaging")
        for change in _differences(section, new[section], old[section])
    ]
    for section in FIXED_SECTIONS:
        for name, now, before in _differences(section, new[section], old[section]):
            if name in FREE_TO_CHANGE:
                changes.append((name, now, before))
                continue
            raise InputError(
                name,
                now,
                f"must be {before!r}, as in the run to be resumed",
                f"Set {name}={json.dumps(before)}, or start another run with another run_dir",
            )
    return changes


def require_same_on_all_hosts(config: Config, of_run: Config) -> None:
    """Reject settings of a joining host that differ from the run's, where hosts may not differ.

    Raises:
        InputError: naming the key.
    """
    local, expected = _shared_settings(config), _shared_settings(of_run)
    for section, value in local.items():
        for name, local_value, run_value in _differences(section, value, expected[section]):
            raise InputError(
                name,
                local_value,
                f"must be {run_value!r}, as on all hosts of the run",
                f"Remove it: hosts may differ only in {', '.join(DIFFERS_BY_HOST)}, and the paths "
                "in data.mixture",
            )


def _without(config: Config, names: Sequence[str]) -> dict[str, Any]:
    """Return the configuration as a mapping, without the keys of these names."""
    tree = to_tree(config)
    for name in names:
        *sections, key = name.split(".")
        del functools.reduce(dict.__getitem__, sections, tree)[key]
    return tree


def _shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal on all hosts, as a mapping."""
    tree = _without(config, DIFFERS_BY_HOST)
    for source in tree["data"]["mixture"] or ():
        del source["path"]
    return tree


def identity(config: Config) -> Mapping[str, str]:
    """Return the settings that identify a run, by key."""
    tree = _without(config, FREE_TO_CHANGE)
    return _as_texts({name: tree[name] for name in ("run_dir", *FIXED_SECTIONS)})


def settings(config: Config) -> Mapping[str, str]:
    """Return the settings in which all hosts that start a run must agree, by key."""
    return _as_texts(_without(config, OF_EACH_HOST))


def _as_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of all keys as short texts, for comparison and for messages."""
    texts = {}
    for path, value in leaves(tree):
        text = value if isinstance(value, str) else json.dumps(value)
        texts[path] = text if len(text) <= LONGEST_TEXT else json_digest(value)
    return texts


def json_digest(value: Any) -> str:
    """Return a short digest of a JSON value, the same on every machine; YAML dates as written."""
    import hashlib  # Slow to load, and not needed for most commands.

    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _differences(name: str, new: Any, old: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(new, dict) and isinstance(old, dict):
        differences = []
        for key in dict.fromkeys([*old, *new]):
            differences += _differences(f"{name}.{key}", new.get(key), old.get(key))
        return differences
    return [(name, new, old)] if new != old else []
