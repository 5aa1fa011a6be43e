"""Which nodes go where when a stage has lost all of its own: the cut stays, with fewer replicas."""

from __future__ import annotations

from collections.abc import Collection

from skippipe_sched.errors import InputError
from skippipe_sched.methods.without_nodes import stages_of
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement


def refilled(
    plan: Plan,
    kept: Collection[int],
    without_text: Collection[int] = (),
    left_out: Collection[int] = (),
) -> Placement:
    """The nodes `kept` of each stage, after one has been moved to each stage that has none left.

    No fewer moves would do. Each is from the stage that has most nodes then, and among equal ones
    from an inner stage, as data nodes need the run's text. Of that stage goes the node that
    serves a stage alone best: the fastest, then the one with most memory, then the nearest to all
    others. None `without_text` is moved to the data stage, and none to stages that stay
    `left_out`. Nodes have their numbers in `plan`;
    `plan_without` makes the plan of the placement.

    Raises:
        InputError: if there are fewer nodes than stages, or none that could become a data node.
    """
    stages = [list(nodes) for nodes in stages_of(plan, kept)]
    nodes = [node for replicas in stages for node in replicas]
    needed = len(stages) - len(left_out)
    if len(nodes) < needed:
        raise InputError(
            "nodes",
            sorted(nodes),
            f"only {len(nodes)} are left, and each of the {needed} stages needs one",
            f"Start {needed - len(nodes)} of the lost ones again, or make a new plan with "
            "fewer stages",
        )
    case = plan.case
    round_trip_s = case.round_trip_s

    def alone(node: int) -> tuple[float, int, float]:
        far_s = float((round_trip_s[node, nodes] + round_trip_s[nodes, node]).sum())
        return case.nodes[node].forward_s, -case.nodes[node].memory, far_s

    for place, replicas in enumerate(stages):
        if not replicas and place not in left_out:
            barred = set(without_text) if place == 0 else set[int]()
            givers = [own for own in range(len(stages)) if set(stages[own]) - barred]
            giver = max(
                givers, key=lambda stage: (len(stages[stage]), stage > 0, -stage), default=None
            )
            if giver is None:
                raise InputError(
                    "nodes",
                    sorted(nodes),
                    "none of those that are left has the text that the data stage reads",
                    "Start one of the lost data nodes again",
                )
            moved = min((node for node in stages[giver] if node not in barred), key=alone)
            stages[giver].remove(moved)
            replicas.append(moved)
    return tuple(map(tuple, stages))
