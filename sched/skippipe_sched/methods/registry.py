"""Descriptions of the planning methods, which load no method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from skippipe_sched.problem.case import Case


class Method(NamedTuple):
    """A method: its description, and the module whose function `routes` it calls with `options`."""

    about: str
    module: str
    options: Mapping[str, bool] = MappingProxyType({})

    def load(self) -> Callable[..., Any]:
        """Load the function that maps a case and a search to `Routes`."""
        return partial(
            import_module(f"skippipe_sched.methods.{self.module}").routes, **self.options
        )


METHODS = {
    "joint": Method("joint search for placement, paths and order (ours)", "joint"),
    "full-joint": Method(
        "the same search for full paths: the effect of planning without skipping",
        "joint",
        {"skips": False},
    ),
    "full": Method("DT-FM's placement; every microbatch visits every stage", "full"),
    "balanced": Method("greedy partial paths; nodes placed in the order of the case", "balanced"),
    "dtfm-skip": Method("DT-FM's placement; random partial paths", "dtfm_skip"),
    "dtfm-skip-swaps": Method("dtfm-skip with random swaps", "dtfm_skip", {"swaps": True}),
    "skippipe-no-tc2": Method(
        "skippipe without TC2: the path search ignores collisions", "skippipe", {"meetings": False}
    ),
    "skippipe": Method("DT-FM's placement; the paper's path search (no collisions)", "skippipe"),
}
DEFAULT_METHOD = "joint"


def path_length_of(method: str, case: Case) -> int:
    """Return the number of stages that each path visits in the plans of a method."""
    return len(case.stages) if method in ("full", "full-joint") else case.path_length


def begins_from_plans(method: str) -> bool:
    """Return whether a method can start its search from a known plan."""
    return METHODS[method].module == "joint"
