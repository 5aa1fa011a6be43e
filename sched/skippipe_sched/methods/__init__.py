"""Planning methods with a common interface, and the functions that make a plan.

A method takes a case and a `Search` and returns placement and paths, and maybe the order of
operations. `make_plan` checks and simulates them, `plan_best` does so for an open case, and
`repair` plans without a search for a run that loses nodes. `METHODS` describes methods without
loading them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skippipe_sched.methods.registry import (
    DEFAULT_METHOD,
    METHODS,
    begins_from_plans,
    path_length_of,
)

if TYPE_CHECKING:
    from skippipe_sched.methods.planning import make_plan, plan_best, with_prediction

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "begins_from_plans",
    "make_plan",
    "path_length_of",
    "plan_best",
    "with_prediction",
]


def __getattr__(name: str) -> Any:
    """Load the functions that make plans on first access."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.planning"), name)
