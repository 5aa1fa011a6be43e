"""Timing model: the exact times of all events in one iteration of a plan.

As docs/timing.md describes, a node runs one operation at a time; a transfer takes the hop time of
its link, and may have to queue behind others (`skippipe_sched.timing.hops`); a microbatch is in
flight on a node from the start of its forward to the end of its backward there.

In outer mode, the time of a plan is that of many iterations in its order
(`skippipe_sched.timing.steady`); that order comes from a single iteration, which averages nothing.
`replay` computes the times, `dispatch` the order if a plan leaves it open.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation, Plan
from skippipe_sched.timing.averaging import quickest_averaging_s
from skippipe_sched.timing.dispatch import dispatch
from skippipe_sched.timing.replay import Replay, Work
from skippipe_sched.timing.steady import steady_timeline
from skippipe_sched.timing.timeline import Averaging, TimeFactors, Timeline


def simulate_plan(plan: Plan, stretch: TimeFactors | None = None) -> Timeline:
    """Simulate one iteration of a plan in its own order, with `stretch` slower than planned.

    In outer mode, it is one of many in their steady state.

    Raises:
        InputError: if the order breaks a memory limit or deadlocks nodes.
    """
    require_memory(plan)
    return forecast(plan.case, plan.stages, plan.microbatches, plan.order, stretch)


def forecast(
    case: Case,
    stages: Sequence[Sequence[int]],
    paths: Sequence[NodePath],
    order: Sequence[Sequence[Operation]] | None = None,
    stretch: TimeFactors | None = None,
) -> Timeline:
    """Simulate as `simulate`; in outer mode, return one iteration of many in a row.

    Raises:
        InputError: if nodes given an `order` wait for each other forever.
    """
    work = Work(case, stages, paths, order or dispatch(case, stages, paths))
    if case.averaging.is_outer:
        return steady_timeline(work, stretch)
    return _alone(Replay(work, stretch))


def simulate(
    case: Case,
    stages: Sequence[Sequence[int]],
    paths: Sequence[NodePath],
    order: Sequence[Sequence[Operation]] | None = None,
) -> Timeline:
    """Simulate a single iteration, from the first forward to the last averaging.

    Background averaging takes no time in it: that of a stage is at the end of its last backward.

    With `order`, each node runs its operations in that order; without, in that of `dispatch`.

    Raises:
        InputError: if nodes given an `order` wait for each other forever.
    """
    return _alone(Replay(Work(case, stages, paths, order or dispatch(case, stages, paths))))


def _alone(replay: Replay) -> Timeline:
    replay.run()
    case, ends_s = replay.work.case, replay.free_s
    averagings = []
    for stage, nodes in enumerate(replay.work.stages):
        if not nodes:
            continue  # It is left out.
        start_s = max(ends_s[node] for node in nodes)
        if case.leaves_location(nodes):
            start_s = max(start_s, *(replay.uplink_free_s(node) for node in nodes))
        planned_s = 0.0
        if not case.averaging.is_outer:
            planned_s = quickest_averaging_s(case, stage, tuple(nodes))
        end_s = start_s + planned_s * replay.ring_factor.item(stage)
        averagings.append(Averaging(stage, start_s, end_s))
    in_order = tuple(sorted(averagings, key=lambda averaging: averaging.start_s))
    return Timeline(len(case.nodes), replay.runs(), replay.transfers(), in_order)


def require_memory(plan: Plan) -> None:
    """Raise `InputError` if an order has more microbatches in flight than a node's memory."""
    for node, operations in enumerate(plan.order):
        limit = plan.case.nodes[node].memory
        in_flight = list(accumulate({"F": 1, "L": 0, "B": -1}[run.kind] for run in operations))
        for position, operation in enumerate(operations):
            if in_flight[position] > limit:
                raise InputError(
                    f"plan.order[{node}][{position}]",
                    [operation.kind, operation.microbatch],
                    f"puts {in_flight[position]} microbatches in flight on node {node}, whose "
                    f"memory holds {limit}",
                    f"Put a backward before it, or raise the node's memory in plan.case to "
                    f"{max(in_flight)}",
                )
