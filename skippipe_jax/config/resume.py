"""What may change when a run is resumed, and what would make it another run."""

from __future__ import annotations

import json
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax.config.parsing import to_tree
from skippipe_jax.config.run import Config

# How the model is cut into stages and computed, and when batches are made ready; neither parameters
# nor batches depend on these.
FREE_TO_CHANGE = ("model.stage_layers", "model.recompute", "model.attention", "data.prefetch")


def require_same_run(config: Config, saved: Config) -> list[tuple[str, Any, Any]]:
    """Refuse to resume a run under a configuration that would make it another run.

    Model, first parameters and data must be as they were. The plan, the recipe, how the model is
    cut into stages, how the optimizer goes on, how long to train, how often to save, and on which
    hosts to run may change. Returns what has changed in how the model is cut and computed, data
    made ready, and the optimizer goes on, which a default of another version may have changed: key,
    new and old value.
    """
    new, old = to_tree(config), to_tree(saved)
    changes = _differences("optimizer", new["optimizer"], old["optimizer"])
    for section in ("seed", "init_from", "model", "data"):
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


def _differences(name: str, new: Any, old: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(new, dict) and isinstance(old, dict):
        found = []
        for key in dict.fromkeys([*old, *new]):
            found += _differences(f"{name}.{key}", new.get(key), old.get(key))
        return found
    return [(name, new, old)] if new != old else []
