"""Schedule of training with skipping: the plans of a run, and the plan of each iteration.

Paths may change from iteration to iteration; the placement of stages on nodes does not. All plans
of a run share the placement of its own plan, and are made before the first iteration: one for each
phase of training, several if paths are redrawn, and one in which every microbatch visits every
stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from skippipe_sched.errors import InputError
from skippipe_sched.problem.averaging import EXACT
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline

from skippipe_jax.config import AveragingConfig, RecipeConfig

OWN, FULL = "plan", "full"
"""Names of the run's own plan, and of the plan with full paths."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Plans of a run by name, its own among them, and the choice of a plan for each iteration.

    Phases of the recipe are counted in iterations, as `RecipeConfig.in_steps` returns them.
    """

    recipe: RecipeConfig
    plans: Mapping[str, Plan]

    def name(self, iteration: int) -> str:
        """Return the name of the plan of an iteration; iterations count from 0."""
        recipe = self.recipe
        if recipe.full_every is not None and (iteration + 1) % recipe.full_every == 0:
            return FULL
        begun = [phase for phase in recipe.phases or () if phase.from_step <= iteration]
        if begun and not begun[-1].skips(iteration):
            return FULL
        name = begun[-1].name if begun else OWN
        if recipe.redraw_every is None:
            return name
        redrawn = sorted(other for other in self.plans if other.startswith(_redraw(name)))
        return redrawn[iteration // recipe.redraw_every % len(redrawn)]

    def plan(self, iteration: int) -> Plan:
        """Return the plan of an iteration; iterations count from 0."""
        return self.plans[self.name(iteration)]

    def visited_shares(self, steps: int) -> Float[np.ndarray, " stages"]:
        """Return the share of the first `steps` iterations' microbatches that visit each stage."""
        taken = Counter(map(self.name, range(steps)))
        shares = [stage_shares(self.plans[name]) for name in taken]
        return np.average(shares, axis=0, weights=list(taken.values()))

    def total_s(self, steps: int, averaging: AveragingConfig) -> float:
        """Predict the seconds of the first `steps` iterations, each by its plan."""
        kinds = Counter(
            (self.name(step), averaging.is_outer and averaging.is_exact(step + 1))
            for step in range(steps)
        )
        return sum(
            count * simulate_plan(with_exact_averaging(plan) if exact else plan).iteration_s
            for (name, exact), count in kinds.items()
            for plan in (self.plans[name],)
        )

    def longest_s(self, averaging: AveragingConfig) -> float:
        """Return the predicted seconds of the longest iteration."""
        seconds = [plan.predicted.iteration_s for plan in self.plans.values()]
        if averaging.is_outer and averaging.exact_steps > 0:
            exact = map(with_exact_averaging, self.plans.values())
            seconds += [simulate_plan(plan).iteration_s for plan in exact]
        return max(seconds)


def with_exact_averaging(plan: Plan) -> Plan:
    """Return the plan for an iteration in which replicas average gradients."""
    return replace(plan, case=replace(plan.case, averaging=EXACT))


def timeline_of(plan: Plan, averaging: AveragingConfig, step: int) -> Timeline:
    """Simulate the iteration of a step by its plan; steps count from 1."""
    is_exact = averaging.is_outer and averaging.is_exact(step)
    return simulate_plan(with_exact_averaging(plan) if is_exact else plan)


def best_plan(cases: Sequence[Case], method: str, search: Search) -> Plan:
    """Plan one of the cases, as `plan_best` does.

    Raises:
        InputError: if no case has a plan under its rules.
    """
    # Imported here, as the search needs SciPy and a reader of schedules does not.
    from skippipe_sched.methods.planning import plan_best

    return plan_best(cases, method, search)


def stage_shares(plan: Plan) -> Float[np.ndarray, " stages"]:
    """Return the share of an iteration's microbatches that visit each stage."""
    visits = Counter(plan.stage_of[node] for path in plan.microbatches for node in path)
    counts = np.array([visits[stage] for stage in range(len(plan.stages))], np.float32)
    return counts / np.float32(len(plan.microbatches))


def make_schedule(
    recipe: RecipeConfig,
    own: Plan,
    method: str,
    seed: int,
    budget_s: float,
    say: Callable[[str], None],
) -> Schedule:
    """Make the schedule of a run with this plan; search for each other plan for `budget_s` seconds.

    `say` receives messages about long searches and about plans that are dropped.

    Raises:
        InputError: naming the part of the recipe for which there is no plan.
    """
    if recipe.max_searches:
        say(f"planning for the recipe: {recipe.max_searches} plans, at most {budget_s:g} s each")
    plans = {OWN: own}
    for part in _parts(recipe, own.case):
        drawn = [own] if not part.changes else []
        while len(drawn) < part.redraws:
            search = Search(seed + len(drawn), budget_s, own.stages)
            drawn.append(_planned(part, own.case, method, search))
        if recipe.redraw_every is None or part.name == FULL:
            [plans[part.name]] = drawn
        else:
            plans |= _redrawn(part.name, drawn, recipe.longest_redraw, say)
    return Schedule(recipe, plans)


class _Part(NamedTuple):
    """Kind of iteration: name of its plan, and the field and value of the recipe that require it.

    `changes` has the path length and the rules that differ from the run's own case.
    """

    name: str
    field: str
    value: Any
    redraws: int
    changes: Mapping[str, int]


def _parts(recipe: RecipeConfig, case: Case) -> Iterator[_Part]:
    if recipe.starts_with_own_plan:
        yield _Part(OWN, "recipe.redraws", recipe.redraws, recipe.redraws, {})
    for number, phase in enumerate(recipe.phases or ()):
        if phase.skipping == 0:
            continue
        length = phase.stages_visited(len(case.stages))
        asked = {"path_length": length, "max_swaps": phase.max_swaps}
        now = {"path_length": case.path_length, "max_swaps": case.rules.max_swaps}
        changes = {key: n for key, n in asked.items() if n is not None and n != now[key]}
        yield _Part(phase.name, f"recipe.phases[{number}]", asdict(phase), recipe.redraws, changes)
    if recipe.has_full_steps:
        in_order = {"path_length": len(case.stages), "max_swaps": 0, "max_jump": 0}
        asked = "phases" if recipe.full_every is None else "full_every"
        yield _Part(FULL, f"recipe.{asked}", getattr(recipe, asked), 1, in_order)


def _planned(part: _Part, case: Case, method: str, search: Search) -> Plan:
    rules = {key: value for key, value in part.changes.items() if key != "path_length"}
    changed = {
        "path_length": part.changes.get("path_length", case.path_length),
        "rules": {**case.source.get("rules", {}), **rules},
    }
    try:
        plan = best_plan([parse_case({**case.source, **changed})], method, search)
    except InputError as error:
        problem = f"cannot be planned: {error.field} = {error.value!r}: {error.problem}"
        raise InputError(part.field, part.value, problem, error.remedy) from error
    lengths = sorted({len(path) for path in plan.microbatches})
    if "path_length" in part.changes and lengths != [part.changes["path_length"]]:
        raise InputError(
            part.field,
            part.value,
            f"plan.method = {method} makes only paths of {lengths[-1]} stages",
            "Set another plan.method, for example joint",
        )
    return plan


def _redrawn(
    name: str, drawn: Sequence[Plan], longest: float | None, say: Callable[[str], None]
) -> dict[str, Plan]:
    """Name the distinct plans that take at most `longest` times as long as the best."""
    least_s = min(plan.predicted.iteration_s for plan in drawn)
    longest_s = math.inf if longest is None else longest * least_s
    kept = {
        plan.microbatches: plan for plan in drawn if plan.predicted.iteration_s <= longest_s
    }.values()
    if len(kept) < len(drawn):
        slower = "" if longest is None else f"take more than {longest_s:.3g} s or "
        say(
            f"{name}: using {len(kept)} of {len(drawn)} redrawn plans; "
            f"the others {slower}are duplicates"
        )
    return {f"{_redraw(name)}{number:03}": plan for number, plan in enumerate(kept)}


def _redraw(name: str) -> str:
    """Return the prefix of the names of plans that are redrawn for the plan of this name."""
    return f"{name}_draw_"
