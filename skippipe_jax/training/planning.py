"""The plans of a run: read from a file, or made for a case that was given or measured. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError, signals_that_end
from skippipe_sched.figures.amounts import duration_text
from skippipe_sched.methods import DEFAULT_METHOD
from skippipe_sched.problem.auto import candidates, load_cases
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.problem.rules import require
from skippipe_sched.search.budget import DEFAULT_BUDGET_S, Search

from skippipe_jax import log
from skippipe_jax.config import Config, PlanConfig
from skippipe_jax.models.planned_case import candidates_of, cases_of
from skippipe_jax.program.schedule import FULL, Schedule, best_plan, make_schedule


def make_plan(
    case: Mapping[str, Any] | str | Path,
    method: str = DEFAULT_METHOD,
    *,
    seed: int = 0,
    budget_s: float = DEFAULT_BUDGET_S,
) -> Plan:
    """Make a plan for a case, which is given as a mapping or as the path of a YAML file.

    `budget_s` are the seconds that the search may take; the first search on a machine compiles for
    half a minute before. The link table of a mapping lies in the current folder.

    Raises:
        InputError: if the case is none, or has no plan under its rules.
    """
    PlanConfig(method=method, seed=seed, budget_s=budget_s)  # which refuses what is none
    cases = candidates(dict(case)) if isinstance(case, Mapping) else load_cases(Path(case))
    return best_plan(cases, method, Search(seed, budget_s))


def with_plan(config: Config, hosts: int) -> Config:
    """Return the configuration, by which a host that is alone is measured if it names no plan."""
    if hosts > 1 or not config.plan.is_missing:
        return config
    return replace(config, plan=replace(config.plan, measure=True))


def make_plans(config: Config, config_folder: Path, measured: Mapping[str, Any] | None) -> Schedule:
    """Make the run's own plan, for the case that was measured if one was, and those of its recipe.

    Raises:
        InputError: as `plan_of` does, or if a plan of the recipe breaks a rule.
    """
    if measured is not None:
        cases = candidates_of(config, dict(measured))
        own = _planned(config.plan, cases, "what was measured")
    else:
        own = plan_of(config, config_folder)
    search = config.plan.method, config.plan.seed, config.plan.budget_s
    with signals_that_end():  # numba calls back from C, where exceptions get lost.
        return make_schedule(config.recipe_in_steps, own, *search, log.output)


def tell_time(config: Config, schedule: Schedule, done: int = 0) -> None:
    """Tell the planned time of the iterations that are left, `done` of them being over.

    Suggest a preset where all of the run skip stages. The time is told where nodes were measured:
    each has seconds of its own then. The lines are comments: what is printed before them is the
    configuration, as YAML.
    """
    steps = config.train.steps
    last = schedule.plan(steps - 1)
    nodes = last.case.source["nodes"]
    is_measured = isinstance(nodes, list) and all("forward_s" in node for node in nodes)
    if is_measured and done < steps:
        left_s = schedule.total_s(steps, config.averaging)
        left_s -= schedule.total_s(done, config.averaging)
        which = f"the last {steps - done} of {steps}" if done else f"all {steps}"
        log.output(f"# by the timing model, {which} iterations take {duration_text(left_s)}")
    skips = any(len(path) < len(last.stages) for path in last.microbatches)
    if skips and FULL not in schedule.plans:
        log.output(
            "# stages are skipped until the end, which costs the full model quality: with "
            "recipe.preset = quality all microbatches visit all stages in the last 60%"
        )


def plan_of(config: Config, config_folder: Path) -> Plan:
    """Return the plan that a configuration names, or one made for the case that it names.

    Raises:
        InputError: if it names neither, or the plan breaks a rule of its case.
    """
    if config.plan.file is not None:
        return require(load_plan(Path(config.plan.file)))
    return _planned(config.plan, cases_of(config, config_folder), "plan.case")


def _planned(config: PlanConfig, cases: Sequence[Case], what: str) -> Plan:
    # For one node there is nothing to search.
    method = "balanced" if all(len(case.nodes) == 1 for case in cases) else config.method
    if method != "balanced":  # Which is instant.
        log.info(f"planning for {what} by {method}, {config.budget_s:g} s at most")
    with signals_that_end():  # numba calls back from C, where exceptions get lost.
        return best_plan(cases, method, Search(config.seed, config.budget_s))


def check_deadline(config: Config, longest_s: float) -> None:
    """Refuse a deadline that passes while everything goes as planned."""
    if config.network.deadline_s <= longest_s:
        raise InputError(
            "network.deadline_s",
            config.network.deadline_s,
            f"a host may have to wait for most of an iteration, which takes "
            f"{longest_s:.3g} s by the plan",
            f"Write {2 * longest_s:.0f} or more",
        )
