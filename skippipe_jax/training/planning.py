"""Plans of a run: read from a file, or made for a given or measured case. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError, exit_on_signals
from skippipe_sched.figures.amounts import duration_text
from skippipe_sched.methods import DEFAULT_METHOD
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.open_case import candidates, load_cases
from skippipe_sched.problem.plan import Plan, load_plan
from skippipe_sched.problem.rules import require_rules
from skippipe_sched.search.budget import DEFAULT_BUDGET_S, Search

from skippipe_jax import log
from skippipe_jax.config import Config, PlanConfig
from skippipe_jax.models.planned_case import candidate_cases, configured_cases
from skippipe_jax.program.schedule import FULL, Schedule, best_plan, make_schedule


def make_plan(
    case: Mapping[str, Any] | str | Path,
    method: str = DEFAULT_METHOD,
    *,
    seed: int = 0,
    budget_s: float = DEFAULT_BUDGET_S,
) -> Plan:
    """Make a plan for a case, given as a mapping or as the path of a YAML file.

    `budget_s` limits the seconds of the search; the first search on a machine first compiles for
    half a minute. The link table of a mapping is looked up in the current folder.

    Raises:
        InputError: if the case is invalid, or has no plan under its rules.
    """
    PlanConfig(method=method, seed=seed, budget_s=budget_s)  # Checks the arguments.
    cases = candidates(dict(case)) if isinstance(case, Mapping) else load_cases(Path(case))
    return best_plan(cases, method, Search(seed, budget_s))


def with_plan(config: Config, hosts: int) -> Config:
    """Return the configuration; a single host without a plan gets `plan.measure`."""
    if hosts > 1 or not config.plan.is_missing:
        return config
    return replace(config, plan=replace(config.plan, measure=True))


def make_plans(config: Config, config_folder: Path, measured: Mapping[str, Any] | None) -> Schedule:
    """Make the run's own plan, for the `measured` case if there is one, and those of its recipe.

    Raises:
        InputError: as in `plan_of`, or if a plan of the recipe breaks a rule.
    """
    if measured is not None:
        cases = candidate_cases(config, dict(measured))
        own = _planned(config.plan, cases, "the measured cluster")
    else:
        own = plan_of(config, config_folder)
    search = config.plan.method, config.plan.seed, config.plan.budget_s
    with exit_on_signals():  # numba calls back from C, where exceptions get lost.
        return make_schedule(config.recipe_in_steps, own, *search, log.output)


def log_planned_time(config: Config, schedule: Schedule, done: int = 0) -> None:
    """Print the planned time of the remaining iterations, after `done` of them.

    Suggests a preset if stages are skipped in the whole run. Prints the time only if nodes were
    measured, so that each has its own `forward_s`. The lines are YAML comments, as the
    configuration is printed before them.
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
            "# stages are skipped until the last step, which lowers the quality of the full model: "
            "with recipe.preset = quality all microbatches visit all stages in the last 60%"
        )


def plan_of(config: Config, config_folder: Path) -> Plan:
    """Return the plan that a configuration names, or make one for the case that it names.

    Raises:
        InputError: if it names neither a plan nor a case, or the plan breaks a rule of its case.
    """
    if config.plan.file is not None:
        return require_rules(load_plan(Path(config.plan.file)))
    return _planned(config.plan, configured_cases(config, config_folder), "plan.case")


def _planned(config: PlanConfig, cases: Sequence[Case], what: str) -> Plan:
    # A single node needs no search.
    method = "balanced" if all(len(case.nodes) == 1 for case in cases) else config.method
    if method != "balanced":  # `balanced` is instant.
        log.info(f"planning for {what} with {method}, at most {config.budget_s:g} s")
    with exit_on_signals():  # numba calls back from C, where exceptions get lost.
        return best_plan(cases, method, Search(config.seed, config.budget_s))


def check_deadline(config: Config, longest_s: float) -> None:
    """Refuse a `network.deadline_s` that a planned iteration may exceed."""
    if config.network.deadline_s <= longest_s:
        raise InputError(
            "network.deadline_s",
            config.network.deadline_s,
            f"must be above the planned time of an iteration, {longest_s:.3g} s: a host may wait "
            "for most of it",
            f"Set it to {2 * longest_s:.0f} or more",
        )
