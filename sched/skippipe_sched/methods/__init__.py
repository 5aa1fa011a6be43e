"""The planning methods: one module each, all with the same interface, listed in `METHODS`.

A method takes a case and a `Search` and returns placement and paths, and the order of operations
on every node if it searched that too; `make_plan` simulates them, which gives the order where the
method left it open and the prediction, and checks the rules.
"""

from __future__ import annotations

from collections.abc import Callable

from skippipe_sched.bound import lower_bound_s
from skippipe_sched.case import Case
from skippipe_sched.methods import balanced, full
from skippipe_sched.methods.routes import Routes
from skippipe_sched.plan import Plan, Predicted
from skippipe_sched.rules import require
from skippipe_sched.search import Search
from skippipe_sched.simulate import simulate

METHODS: dict[str, Callable[[Case, Search], Routes]] = {
    "full": full.routes,
    "balanced": balanced.routes,
}


def make_plan(case: Case, method: str, search: Search | None = None) -> Plan:
    """A plan of `case` by one of `METHODS`; the same seed and budget give the same plan.

    Raises:
        InputError: if the case's rules leave the method no plan.
    """
    routes = METHODS[method](case, search or Search())
    timeline = simulate(case, routes.stages, routes.paths, routes.order)
    predicted = Predicted(
        iteration_s=timeline.iteration_s,
        pipeline_s=timeline.pipeline_s,
        averaging_s=timeline.averaging_s,
        lower_bound_s=lower_bound_s(case, min(len(path) for path in routes.paths)),
    )
    return require(Plan(method, routes.stages, routes.paths, timeline.order, predicted, case))
