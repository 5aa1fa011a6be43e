"""The planning methods: one module each, all with the same interface, listed in `METHODS`.

A method takes a case and a seed and returns placement and paths; `make_plan` simulates them, which
gives the order of every node and the prediction, and checks the rules. A new search adds a module
here and a line below.
"""

from __future__ import annotations

from collections.abc import Callable

from skippipe_sched.bound import lower_bound_s
from skippipe_sched.case import Case
from skippipe_sched.methods import balanced, full
from skippipe_sched.methods.routes import Routes
from skippipe_sched.plan import Plan, Predicted
from skippipe_sched.rules import require
from skippipe_sched.simulate import simulate

METHODS: dict[str, Callable[[Case, int], Routes]] = {
    "full": full.routes,
    "balanced": balanced.routes,
}


def make_plan(case: Case, method: str, seed: int) -> Plan:
    """A plan of `case` by one of `METHODS`; the same seed gives the same plan.

    Raises:
        InputError: if the case's rules leave the method no plan.
    """
    routes = METHODS[method](case, seed)
    timeline = simulate(case, routes.stages, routes.paths)
    predicted = Predicted(
        iteration_s=timeline.iteration_s,
        pipeline_s=timeline.pipeline_s,
        averaging_s=timeline.averaging_s,
        lower_bound_s=lower_bound_s(case, min(len(path) for path in routes.paths)),
    )
    return require(Plan(method, routes.stages, routes.paths, timeline.order, predicted, case))
