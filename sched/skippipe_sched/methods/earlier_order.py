"""The order of an earlier plan, for paths that differ from its own on some nodes.

A search finds orders in which nodes wait where that pays, which the simulator's dispatch never
does. So a plan that goes on with most of its paths keeps what it can of its order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation, Plan, microbatch_chain
from skippipe_sched.timing.simulate import simulate_alone

Order = tuple[tuple[Operation, ...], ...]


def start_times(plan: Plan) -> list[list[float]]:
    """When each operation of each microbatch's chain starts in an iteration of a plan alone [s].

    Raises:
        InputError: if the plan's own order cannot be run.
    """
    start_s = {run.operation: run.start_s for run in simulate_alone(plan).runs}
    return [
        [start_s[operation] for operation in microbatch_chain(microbatch, path)]
        for microbatch, path in enumerate(plan.microbatches)
    ]


def earlier_order(
    start_s: Sequence[Sequence[float]], case: Case, paths: Sequence[NodePath]
) -> Order | None:
    """What each node runs, in order, if everything starts as it once did, or as soon after it.

    `start_s` are the start times of a plan whose paths visit the same stages (`start_times`);
    `paths` are those of now, on the nodes of `case`. All operations are gone through by their
    time. A forward on a node whose memory is full waits until a backward ends there, and all the
    rest of its microbatch is then as much later. That may lock where paths swap: None then.
    """
    chains = [microbatch_chain(microbatch, path) for microbatch, path in enumerate(paths)]
    order: list[list[Operation]] = [[] for _ in case.nodes]
    free_slots = [node.memory for node in case.nodes]
    waiting: list[list[tuple[float, int]]] = [[] for _ in case.nodes]
    position = [0] * len(chains)
    late_s = [0.0] * len(chains)
    coming = [(times[0], microbatch) for microbatch, times in enumerate(start_s)]
    heapq.heapify(coming)
    now_s = 0.0
    while coming:
        due_s, microbatch = heapq.heappop(coming)
        now_s = max(now_s, due_s)
        operation = chains[microbatch][position[microbatch]]
        node = operation.node
        if operation.kind == "F":
            if free_slots[node] == 0:
                heapq.heappush(waiting[node], (due_s, microbatch))
                continue
            free_slots[node] -= 1
        late_s[microbatch] += now_s - due_s
        order[node].append(operation)
        if operation.kind == "B":
            free_slots[node] += 1
            if waiting[node]:
                heapq.heappush(coming, heapq.heappop(waiting[node]))
        position[microbatch] += 1
        if position[microbatch] < len(chains[microbatch]):
            due_s = start_s[microbatch][position[microbatch]] + late_s[microbatch]
            heapq.heappush(coming, (due_s, microbatch))
    locked = any(waiting)
    return None if locked else tuple(map(tuple, order))
