"""Order of the operations on nodes where a plan gives none.

A free node chooses among the operations whose input has arrived: backward before the others, then
first come first served. It starts a forward only within its memory limit, and only if all
microbatches in flight can still end afterwards, so that nodes never deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation, microbatch_chain, stage_of_nodes
from skippipe_sched.timing.hops import Queues

_ARRIVAL, _END = 0, 1


def dispatch(
    case: Case, stages: Sequence[Sequence[int]], paths: Sequence[NodePath]
) -> tuple[tuple[Operation, ...], ...]:
    """Choose each node's order of operations in an iteration that starts with all nodes free."""
    return _Dispatch(case, stages, paths).run()


class _Dispatch:
    """Pending events, and the state of each node and link."""

    def __init__(self, case: Case, stages: Sequence[Sequence[int]], paths: Sequence[NodePath]):
        self.case = case
        self.paths = paths
        self.chains = [microbatch_chain(m, path) for m, path in enumerate(paths)]
        self.position = [0] * len(paths)
        self.arrived: list[dict[Operation, float]] = [{} for _ in case.nodes]
        self.busy = [False] * len(case.nodes)
        self.free_slots = [node.memory for node in case.nodes]
        self.holds: list[set[int]] = [set() for _ in paths]
        # Paths that visit stages in ascending order take memory in one order and cannot deadlock.
        self.stage_of = stage_of_nodes(stages)
        self.can_lock = any(
            self.stage_of[a] > self.stage_of[b] for path in paths for a, b in pairwise(path)
        )
        self.queues = Queues(case)
        self.events: list[tuple[float, int, int, Operation]] = []
        self.event_count = 0
        self.order: list[list[Operation]] = [[] for _ in case.nodes]

    def run(self) -> tuple[tuple[Operation, ...], ...]:
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
            # Other nodes need no check: a forward held back as unsafe stays so until an event on
            # its node, because a microbatch that it would deadlock with must pass there first.
            for node in sorted(touched):
                self.start_next(node, now)
        assert sum(map(len, self.order)) == sum(map(len, self.chains)), "deadlock"
        return tuple(map(tuple, self.order))

    def push(self, time_s: float, event: int, operation: Operation) -> None:
        heapq.heappush(self.events, (time_s, self.event_count, event, operation))
        self.event_count += 1

    def start_next(self, node: int, now: float) -> None:
        """Start the node's next operation, if it is free and may run one."""
        operation = None if self.busy[node] else self.choose(node)
        if operation is None:
            return
        del self.arrived[node][operation]
        if operation.kind == "F":
            self.free_slots[node] -= 1
            self.holds[operation.microbatch].add(node)
        self.busy[node] = True
        self.order[node].append(operation)
        seconds = self.case.duration(operation.kind, node, self.stage_of[node])
        self.push(now + seconds, _END, operation)

    def choose(self, node: int) -> Operation | None:
        arrived = self.arrived[node]
        # Arrivals are kept in the order of their arrival.
        for operation in arrived:
            if operation.kind == "B":
                return operation
        for operation in arrived:
            if operation.kind == "L" or self.may_start(operation):
                return operation
        return None

    def may_start(self, forward: Operation) -> bool:
        """Return whether a forward keeps the node's memory limit and lets all microbatches end."""
        free = self.free_slots[forward.node]
        # A forward that leaves a slot free blocks no other microbatch, and can itself end last.
        return free > 1 or (free == 1 and (not self.can_lock or self.is_safe(forward)))

    def is_safe(self, forward: Operation) -> bool:
        """Return by the banker's algorithm whether all in flight can end after `forward`."""
        free = list(self.free_slots)
        free[forward.node] -= 1
        holds = {m: set(nodes) for m, nodes in enumerate(self.holds) if nodes}
        holds.setdefault(forward.microbatch, set()).add(forward.node)
        needs = {m: {*self.paths[m][self.position[m] :]} - held for m, held in holds.items()}
        while holds:
            ending = next((m for m in holds if all(free[node] > 0 for node in needs[m])), None)
            if ending is None:
                return False
            for node in holds.pop(ending):
                free[node] += 1
        return True

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
        if following.node != operation.node:
            _, now = self.queues.send(following.kind, operation.node, following.node, now)
        self.push(now, _ARRIVAL, following)
