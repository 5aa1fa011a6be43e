"""The planning methods, all with the same interface, and how they make a plan.

A method takes a case and a `Search` and returns placement and paths, and the order of operations
on every node if it searched that too; `make_plan` simulates them, which gives the order where the
method left it open and the prediction, and checks the rules. `plan_best` does it for an open case.

Without a search, `without_nodes` makes the plan that a run goes on with when it loses nodes.

`METHODS` tells of the methods without loading them: commands and configurations need the names.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from skippipe_sched.methods.planning import make_plan, plan_best, with_prediction
    from skippipe_sched.problem.case import Case

__all__ = ["DEFAULT_METHOD", "METHODS", "make_plan", "plan_best", "with_prediction"]


class Method(NamedTuple):
    """A method: what it is, and in which module which function makes its routes."""

    about: str
    module: str
    function: str = "routes"

    def load(self) -> Callable[..., Any]:
        """Load the function from a case and a search to `Routes`."""
        return getattr(import_module(f"{__name__}.{self.module}"), self.function)


METHODS = {
    "joint": Method("placement, paths and order searched together (ours)", "joint"),
    "full-joint": Method(
        "the same search for full paths: what planning brings without skipping",
        "joint",
        "full_routes",
    ),
    "full": Method("DT-FM's placement, every microbatch visits every stage", "full"),
    "balanced": Method("partial paths on the case's own order of nodes, greedily", "balanced"),
    "dtfm-skip": Method("DT-FM's placement, random partial paths", "dtfm_skip"),
    "dtfm-skip-swaps": Method("the same with random swaps", "dtfm_skip", "routes_with_swaps"),
    "skippipe-no-tc2": Method(
        "DT-FM's placement, the paper's search of paths, blind to collisions",
        "skippipe",
        "routes_without_tc2",
    ),
    "skippipe": Method("the same search of paths that do not collide", "skippipe"),
}
DEFAULT_METHOD = "joint"


def path_length_of(method: str, case: Case) -> int:
    """Count the stages that each path visits in the plans of a method."""
    return len(case.stages) if method in ("full", "full-joint") else case.path_length


def __getattr__(name: str) -> Any:
    """Load what makes plans when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.planning"), name)
