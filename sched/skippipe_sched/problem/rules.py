"""Rules for paths (CC1-CC3 and TC1), in one checker that all code uses.

SkipPipe (arXiv 2502.19913, section 4) names them; docs/concepts.md explains each. TC2, that
microbatches do not meet, is a goal of the search and not a rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case, Rules
from skippipe_sched.problem.plan import Plan, stage_of_nodes

# Shares of nodes with different speeds are real numbers; this fraction of a visit is rounding.
SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Violation:
    """A broken rule: its name, the field of the plan, and the problem."""

    rule: str
    field: str
    value: object
    problem: str


def sequence_problem(stages: Sequence[int], rules: Rules) -> str | None:
    """Return why a sequence of stages breaks CC1 or CC2; None if it keeps them.

    `stages` are the stages that a path visits in order, stage 0 first.
    """
    if not stages or stages[0] != 0:
        return "CC1: the path does not start at stage 0"
    if len(set(stages)) < len(stages):
        return "CC1: the path visits a stage twice"
    swaps = 0
    highest = 0
    for previous, stage in pairwise(stages):
        skipped = stage - previous - 1
        if skipped > rules.max_jump:
            return (
                f"CC2: the jump from stage {previous} to {stage} skips {skipped} "
                f"stages, more than max_jump = {rules.max_jump}"
            )
        if stage < highest:
            swaps += 1
            if highest - stage > rules.max_swap_distance:
                return (
                    f"CC2: stage {stage} comes after stage {highest}, at a distance of more than "
                    f"max_swap_distance = {rules.max_swap_distance}"
                )
        highest = max(highest, stage)
    if swaps > rules.max_swaps:
        return f"CC2: the path has {swaps} swaps, more than max_swaps = {rules.max_swaps}"
    return None


def fair_shares(case: Case, stage: int, nodes: Sequence[int], visits: int) -> list[float]:
    """Compute TC1's share of `visits` for each replica of a stage: in proportion to its speed.

    The speed is that of the slower of computation and a shared connection (`Case.visit_s`).
    """
    visit_s = case.visit_s(stage)[list(nodes)].tolist()
    fastest_s = min(visit_s)
    speeds = [fastest_s / seconds for seconds in visit_s]
    return [visits * speed / sum(speeds) for speed in speeds]


def share_limits(
    case: Case, stage: int, nodes: Sequence[int], visits: int
) -> tuple[list[int], list[int]]:
    """Compute the least and the most visits of each replica of a stage: its share, rounded."""
    shares = fair_shares(case, stage, nodes, visits)
    low = [math.floor(share + SHARE_TOLERANCE) for share in shares]
    return low, [math.ceil(share - SHARE_TOLERANCE) for share in shares]


def violations(
    case: Case, stages: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]
) -> list[Violation]:
    """List every rule that a placement and its paths break; empty if they keep them all.

    Stages that the case leaves out do not count: the stages before and after are neighbors.
    """
    stage_of = stage_of_nodes(stages)
    remaining = [stage for stage in range(len(stages)) if stage not in case.left_out]
    broken = []

    def is_broken(rule: str, value: object, problem: str, field: str = "plan.microbatches") -> None:
        broken.append(Violation(rule, field, value, problem))

    sizes = tuple(len(nodes) for nodes in stages)
    if sizes != case.stages:
        problem = f"the sizes differ from case.stages = {case.stages}"
        is_broken("placement", sizes, problem, "plan.stages")
    for microbatch, path in enumerate(paths):
        problem = sequence_problem([remaining.index(stage_of[node]) for node in path], case.rules)
        if problem:
            is_broken(problem[:3], path, problem, f"plan.microbatches[{microbatch}]")
    visits = Counter(node for path in paths for node in path)
    stage_visits = [sum(visits[node] for node in nodes) for nodes in stages]
    inner = [stage_visits[stage] for stage in remaining[1:]]
    if inner and max(inner) - min(inner) > 1:
        problem = "CC3: the visit counts of the inner stages differ by more than one"
        is_broken("CC3", inner, problem)
    sent = [visits[node] for node in stages[0]]
    if len(sent) == len(case.microbatches) and tuple(sent) != case.microbatches:
        problem = (
            f"TC1: the data nodes {list(stages[0])} send {sent} microbatches, and the case "
            f"requires {list(case.microbatches)}"
        )
        is_broken("TC1", sent, problem)
    # Additional stages of the placement have no costs in the case, so no shares.
    for stage in [stage for stage in remaining[1:] if stage < len(case.stages)]:
        nodes = stages[stage]
        limits = share_limits(case, stage, nodes, stage_visits[stage])
        for node, low, high in zip(nodes, *limits, strict=True):
            if not low <= visits[node] <= high:
                problem = (
                    f"TC1: node {node} of stage {stage} has {visits[node]} microbatches, "
                    f"its share is {low}" + (f" to {high}" if high > low else "")
                )
                is_broken("TC1", visits[node], problem)
    return broken


def require_rules(plan: Plan) -> Plan:
    """Return the plan if it keeps every rule; raise `InputError` for the first broken one."""
    broken = violations(plan.case, plan.stages, plan.microbatches)
    if broken:
        more = f" ({len(broken) - 1} more)" if len(broken) > 1 else ""
        problem, remedy = broken[0].problem + more, "Change the paths, or the rules in plan.case"
        raise InputError(broken[0].field, broken[0].value, problem, remedy)
    return plan
