"""The timing model: an exact discrete-event simulation of one iteration of a plan.

As docs/timing.md has it, a node runs one operation at a time; a transfer takes the hop time of its
link, and with contention `link` transfers on one directed link follow one another, whole hop after
whole hop, in the order in which their data became ready; a microbatch is in flight on a node from
the start of its forward to the end of its backward there.

Where iterations do not wait for averaging, what a plan takes is that of many of them in their order
(`skippipe_sched.timing.steady`); an iteration by itself, which averages nothing, is where that
order comes from.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Float

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation, Plan, microbatch_chain, stage_of_nodes
from skippipe_sched.timing.averaging import quickest_averaging_s
from skippipe_sched.timing.steady import steady_timeline
from skippipe_sched.timing.timeline import (
    Averaging,
    Run,
    Stretch,
    Timeline,
    Transfer,
    no_stretch,
)


def simulate_plan(plan: Plan, stretch: Stretch | None = None) -> Timeline:
    """One iteration of a plan in the plan's own order, with `stretch` slower than planned.

    Where iterations do not wait for averaging, it is one of many in their steady state.

    Raises:
        InputError: if the order breaks a memory limit or locks nodes against each other.
    """
    require_memory(plan)
    return forecast(plan.case, plan.stages, plan.microbatches, plan.order, stretch)


def simulate_alone(plan: Plan, stretch: Stretch | None = None) -> Timeline:
    """As `simulate_plan`, but with no iteration before and after it: see `simulate`.

    Raises:
        InputError: as `simulate_plan` does.
    """
    require_memory(plan)
    return simulate(plan.case, plan.stages, plan.microbatches, plan.order, stretch)


def forecast(
    case: Case,
    stages: Sequence[Sequence[int]],
    paths: Sequence[NodePath],
    order: Sequence[Sequence[Operation]] | None = None,
    stretch: Stretch | None = None,
) -> Timeline:
    """As `simulate`; where iterations do not wait for averaging, one of many in that order.

    Raises:
        InputError: if nodes given an `order` wait for each other for ever.
    """
    alone = simulate(case, stages, paths, order, stretch)
    if not case.averaging.is_outer:
        return alone
    return steady_timeline(case, stages, paths, alone, stretch)


def simulate(
    case: Case,
    stages: Sequence[Sequence[int]],
    paths: Sequence[NodePath],
    order: Sequence[Sequence[Operation]] | None = None,
    stretch: Stretch | None = None,
) -> Timeline:
    """One iteration by itself, from the first forward to the last averaging.

    Averaging that goes on behind the iterations that follow takes no time in it: that of a stage
    lies where its last backward ends.

    With `order`, each node runs its operations in that order. Without, a free node takes among the
    operations whose input has arrived: backward before the others, then first come first served;
    it starts a forward only within its memory limit, and only if all microbatches in flight can
    still end afterwards, so that nodes never lock against each other. With `stretch`, everything
    takes as much longer as that says.

    Raises:
        InputError: if nodes given an `order` wait for each other for ever.
    """
    return _Simulation(case, stages, paths, order, stretch).run()


def require_memory(plan: Plan) -> None:
    """Refuse an order that puts more microbatches in flight on a node than its memory holds."""
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


_ARRIVAL, _END = 0, 1


class _Simulation:
    """The state of one simulation: events to come, and what each node and link is doing."""

    def __init__(
        self,
        case: Case,
        stages: Sequence[Sequence[int]],
        paths: Sequence[NodePath],
        order: Sequence[Sequence[Operation]] | None,
        stretch: Stretch | None,
    ):
        self.case = case
        self.stages = stages
        self.paths = paths
        self.chains = [microbatch_chain(m, path) for m, path in enumerate(paths)]
        self.position = [0] * len(paths)
        self.stretch = stretch or no_stretch(len(paths), max(map(len, self.chains)), len(stages))
        self.queues = None if order is None else [deque(operations) for operations in order]
        self.arrived: list[dict[Operation, float]] = [{} for _ in case.nodes]
        self.busy = [False] * len(case.nodes)
        self.free_slots = [node.memory for node in case.nodes]
        self.holds: list[set[int]] = [set() for _ in paths]
        # Paths that visit stages in ascending order take memory in one order and cannot lock.
        self.stage_of = stage_of_nodes(stages)
        self.can_lock = order is None and any(
            self.stage_of[a] > self.stage_of[b] for path in paths for a, b in pairwise(path)
        )
        self.link_free_s: dict[tuple[int, int], float] = {}
        self.events: list[tuple[float, int, int, Operation]] = []
        self.event_count = 0
        self.runs: list[Run] = []
        self.transfers: list[Transfer] = []

    def run(self) -> Timeline:
        for chain in self.chains:
            self.push(0.0, _ARRIVAL, chain[0])
        while self.events:
            now = self.events[0][0]
            touched: set[int] = set()
            while self.events and self.events[0][0] == now:
                _, _, event, operation = heapq.heappop(self.events)
                if event == _ARRIVAL:
                    self.arrived[operation.node][operation] = now
                else:
                    self.end(operation, now)
                touched.add(operation.node)
            # The others need no look: a forward held back as unsafe stays so until something
            # happens on its node, as one of those it would lock with must pass there first.
            for node in sorted(touched):
                self.start_next(node, now)
        self.require_finished()
        return Timeline(
            len(self.case.nodes),
            tuple(self.runs),
            tuple(sorted(self.transfers, key=lambda transfer: transfer.start_s)),
            self.averagings(),
        )

    def push(self, time_s: float, event: int, operation: Operation) -> None:
        heapq.heappush(self.events, (time_s, self.event_count, event, operation))
        self.event_count += 1

    def start_next(self, node: int, now: float) -> None:
        """Start the node's next operation, if it is free and may run one."""
        operation = None if self.busy[node] else self.choose(node)
        if operation is None:
            return
        arrived_s = self.arrived[node].pop(operation)
        if self.queues is not None:
            self.queues[node].popleft()
        if operation.kind == "F":
            self.free_slots[node] -= 1
            self.holds[operation.microbatch].add(node)
        self.busy[node] = True
        planned_s = self.case.duration(operation.kind, node, self.stage_of[node])
        end_s = now + self.stretched(planned_s, self.stretch.operations, operation)
        self.runs.append(Run(operation, arrived_s, now, end_s))
        self.push(end_s, _END, operation)

    def stretched(
        self,
        planned_s: float,
        factors: Float[np.ndarray, "microbatches positions"],
        operation: Operation,
    ) -> float:
        microbatch = operation.microbatch
        return planned_s * factors.item(microbatch, self.position[microbatch])

    def choose(self, node: int) -> Operation | None:
        arrived = self.arrived[node]
        if self.queues is not None:
            head = self.queues[node][0] if self.queues[node] else None
            return head if head in arrived else None
        # Arrivals are kept in the order in which they came.
        for operation in arrived:
            if operation.kind == "B":
                return operation
        for operation in arrived:
            if operation.kind == "L" or self.may_start(operation):
                return operation
        return None

    def may_start(self, forward: Operation) -> bool:
        """Whether a forward keeps the node's memory limit and leaves a way for all to end."""
        if self.free_slots[forward.node] == 0:
            return False
        return not self.can_lock or self.is_safe(forward)

    def is_safe(self, forward: Operation) -> bool:
        """The banker's algorithm: can the microbatches in flight end one by one after `forward`?"""
        free = list(self.free_slots)
        free[forward.node] -= 1
        holds = {m: set(nodes) for m, nodes in enumerate(self.holds) if nodes}
        holds.setdefault(forward.microbatch, set()).add(forward.node)
        needs = {m: set(self.paths[m]) - held - self.released(m) for m, held in holds.items()}
        while holds:
            ending = next((m for m in holds if all(free[node] > 0 for node in needs[m])), None)
            if ending is None:
                return False
            for node in holds.pop(ending):
                free[node] += 1
        return True

    def released(self, microbatch: int) -> set[int]:
        chain = self.chains[microbatch][: self.position[microbatch]]
        return {operation.node for operation in chain if operation.kind == "B"}

    def end(self, operation: Operation, now: float) -> None:
        microbatch = operation.microbatch
        self.busy[operation.node] = False
        if operation.kind == "B":
            self.free_slots[operation.node] += 1
            self.holds[microbatch].discard(operation.node)
        self.position[microbatch] += 1
        chain = self.chains[microbatch]
        if self.position[microbatch] == len(chain):
            return
        following = chain[self.position[microbatch]]
        if following.node == operation.node:
            self.push(now, _ARRIVAL, following)
            return
        link = (operation.node, following.node)
        start_s = now
        if self.case.contention == "link":
            start_s = max(now, self.link_free_s.get(link, 0.0))
        planned_s = self.case.hop_duration(following.kind, *link)
        end_s = start_s + self.stretched(planned_s, self.stretch.hops, following)
        self.link_free_s[link] = end_s
        self.transfers.append(Transfer(*link, following, now, start_s, end_s))
        self.push(end_s, _ARRIVAL, following)

    def require_finished(self) -> None:
        if len(self.runs) == sum(len(chain) for chain in self.chains):
            return
        assert self.queues is not None, "dispatch without an order starts only what can end"
        heads = [queue[0] for queue in self.queues if queue]
        waits = "; ".join(
            f"the {head} waits for the "
            f"{self.chains[head.microbatch][self.chains[head.microbatch].index(head) - 1]}"
            for head in heads
        )
        raise InputError(
            "plan.order",
            [[head.kind, head.microbatch] for head in heads],
            f"these operations wait for each other for ever: {waits}",
            "Reorder the operations of one of these nodes",
        )

    def averagings(self) -> tuple[Averaging, ...]:
        ends = [0.0] * len(self.case.nodes)
        for run in self.runs:
            ends[run.operation.node] = run.end_s
        averagings = []
        for stage, nodes in enumerate(self.stages):
            if not nodes:
                continue  # It is left out.
            start_s = max(ends[node] for node in nodes)
            planned_s = 0.0
            if not self.case.averaging.is_outer:
                planned_s = quickest_averaging_s(self.case, stage, tuple(nodes))
            end_s = start_s + planned_s * self.stretch.averagings.item(stage)
            averagings.append(Averaging(stage, start_s, end_s))
        return tuple(sorted(averagings, key=lambda averaging: averaging.start_s))
