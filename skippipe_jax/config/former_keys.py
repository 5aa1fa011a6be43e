"""Keys that configurations had once, and what to write instead of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skippipe_sched.errors import InputError


@dataclass(frozen=True)
class FormerKey:
    """Why a key is none any more, and what to write instead: one sentence each.

    Runs that were saved with it may have it with the value that did nothing.
    """

    problem: str
    remedy: str
    nothing: Any = None


FORMER_KEYS: Mapping[str, FormerKey] = {
    "recipe.average_parameters_every": FormerKey(
        "is no key any more: replicas average what they have changed by the section averaging",
        "Write averaging: {mode: outer}, with this number as every; with fragments: 1, delay: 0, "
        "dtype: float32, rate: 1 and momentum: 0 too, they average parameters as they did, and "
        "each keeps moments of its own",
    ),
    "recipe.skip_scaling": FormerKey(
        "is no key any more: dividing by the share of microbatches that visit a stage made models "
        "worse",
        "Remove it; recipe: {preset: quality} is what keeps the quality of full paths",
        nothing="none",
    ),
}
"""By their places in the configuration."""


def without_former_keys(given: Any, section: str, *, whatever: bool = False) -> Any:
    """Return what is given for a section, without its former keys, which saved runs have.

    Raises:
        InputError: for a former key that says something, unless it may say `whatever` it does.
    """
    if not isinstance(given, dict):
        return given
    former = {
        key: FORMER_KEYS[path] for key in given if (path := f"{section}.{key}") in FORMER_KEYS
    }
    for key, told in former.items():
        if given[key] not in (None, told.nothing) and not whatever:
            raise InputError(f"{section}.{key}", given[key], told.problem, told.remedy)
    return {key: entry for key, entry in given.items() if key not in former}
