"""Plans from a case, or from the candidates of an open case."""

from __future__ import annotations

from collections.abc import Sequence

from skippipe_sched.errors import InputError
from skippipe_sched.methods.registry import METHODS
from skippipe_sched.methods.routes import Routes
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.problem.rules import require_rules
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import forecast

# Share of the budget for quick plans of all candidates of an open case.
CHOICE_SHARE = 0.3


def plan_best(cases: Sequence[Case], method: str, search: Search) -> Plan:
    """Plan the best of the `cases` that an open case may become, promising ones first.

    It is the one with the fewest seconds per microbatch in a quick plan, the first of equal ones. A
    single case needs no quick plan.

    Raises:
        InputError: if no case has a plan under its rules, that of the most promising one.
    """
    if len(cases) == 1:
        return make_plan(cases[0], method, search)
    share = CHOICE_SHARE / len(cases)
    found: list[tuple[float, Case]] = []
    refusals = []
    for case in cases:
        try:
            plan = make_plan(case, method, search.part(share))
        except InputError as refusal:
            refusals.append(refusal)
        else:
            found.append((plan.predicted.iteration_s / sum(case.microbatches), case))
    if not found:
        raise refusals[0]
    _, best = min(found, key=lambda judged: judged[0])
    return make_plan(best, method, search.part(1 - CHOICE_SHARE))


def make_plan(case: Case, method: str, search: Search | None = None) -> Plan:
    """Plan `case` by one of `METHODS`; the same seed and budget give the same plan.

    Raises:
        InputError: if the case's rules leave the method no plan, or the case leaves stages out.
    """
    if case.left_out:
        problem = "is not supported by planning methods, only by repair plans (`repair_plan`)"
        remedy = "Remove this key, and these stages from case.stages, stage_cost and stage_bytes"
        raise InputError("case.left_out", list(case.left_out), problem, remedy)
    return with_prediction(case, method, METHODS[method].load()(case, search or Search()))


def with_prediction(case: Case, method: str, routes: Routes) -> Plan:
    """Turn the routes of a method into a plan, simulated and checked.

    Raises:
        InputError: if it breaks a rule of the case.
    """
    # Slow to load, because of SciPy, and not needed for reading plans.
    from skippipe_sched.timing.bound import lower_bound_s

    timeline = forecast(case, routes.stages, routes.paths, routes.order)
    predicted = timeline.predicted(lower_bound_s(case, min(len(path) for path in routes.paths)))
    return require_rules(Plan(method, routes.stages, routes.paths, timeline.order, predicted, case))
