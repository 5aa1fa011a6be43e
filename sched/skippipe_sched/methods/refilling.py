"""Which nodes go where when a stage has lost all of its own: the cut stays, with fewer replicas."""

from __future__ import annotations

from collections.abc import Collection

from skippipe_sched.errors import InputError
from skippipe_sched.methods.without_nodes import stages_of
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement


def refilled(plan: Plan, kept: Collection[int]) -> Placement:
    """The nodes `kept` of each stage, after one has been moved to each stage that has none left.

    No fewer moves would do. Each is from the stage that has most nodes then, and among equal ones
    from an inner stage, as data nodes need the run's text. Of that stage goes the node that
    serves a stage alone best: the fastest, then the one with most memory, then the nearest to all
    others. Nodes have their numbers in `plan`; `plan_without` makes the plan of the placement.

    Raises:
        InputError: if there are fewer nodes than stages.
    """
    stages = [list(nodes) for nodes in stages_of(plan, kept)]
    nodes = [node for replicas in stages for node in replicas]
    if len(nodes) < len(stages):
        raise InputError(
            "nodes",
            sorted(nodes),
            f"only {len(nodes)} are left, and each of the {len(stages)} stages needs one",
            f"Start {len(stages) - len(nodes)} of the lost ones again, or make a new plan with "
            "fewer stages",
        )
    case = plan.case
    round_trip_s = case.hop_s + case.hop_s.T

    def alone(node: int) -> tuple[float, int, float]:
        far_s = float(round_trip_s[node, nodes].sum())
        return case.nodes[node].forward_s, -case.nodes[node].memory, far_s

    for replicas in stages:
        if not replicas:
            giver = max(
                range(len(stages)), key=lambda stage: (len(stages[stage]), stage > 0, -stage)
            )
            moved = min(stages[giver], key=alone)
            stages[giver].remove(moved)
            replicas.append(moved)
    return tuple(map(tuple, stages))
