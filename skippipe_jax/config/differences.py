"""What a configuration says that the defaults do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from skippipe_jax.config.model import PRESETS
from skippipe_jax.config.parsing import to_tree
from skippipe_jax.config.run import Config


def differences(config: Config) -> dict[str, Any]:
    """The keys of a configuration that are not as by default, as a mapping that gives it again.

    Shapes that a model preset gives are left out.
    """
    default = to_tree(Config())
    if config.model.preset is not None:
        default["model"] |= PRESETS[config.model.preset]
    return _different(to_tree(config), default)


def summary(config: Config) -> str:
    """Return the differences from the defaults as YAML, and where the whole configuration is."""
    shown = yaml.safe_dump(
        differences(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    return f"# What is not as by default; in full it is in {config.run_dir}/config.yaml.\n{shown}"


def _different(tree: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        other = default[key]
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := _different(value, other):
                found[key] = inner
        elif value != other:
            found[key] = value
    return found
