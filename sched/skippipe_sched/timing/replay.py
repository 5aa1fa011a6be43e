"""Times of all events for nodes with given orders, in one iteration or in many in a row.

With an order no choice is left: each operation starts at the latest of a few earlier times. A
directed link has one source, which runs one operation at a time, and so has a node's connection:
transfers follow one another there in the order of its operations. So operations are processed once,
each after all that it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, Operation, microbatch_chain, stage_of_nodes
from skippipe_sched.timing.hops import hop_parts, passed
from skippipe_sched.timing.timeline import TimedOperation, TimeFactors, Transfer, unit_factors

# Data that stays on a node arrives at once, and uses no queue.
NO_HOP = (0.0, -math.inf, -math.inf, 0.0, 0.0)


class Work:
    """Operations of an iteration, each after all that it depends on, with its successor.

    `following` is the index of the operation that needs the result, or its own index for the last
    of a chain; `uplink` and `link` are the numbers, among all `queues`, of the connection and the
    link on which the result queues, -1 if on none.
    """

    def __init__(
        self,
        case: Case,
        stages: Sequence[Sequence[int]],
        paths: Sequence[NodePath],
        order: Sequence[Sequence[Operation]],
    ):
        """Sort the operations of `order`.

        Raises:
            InputError: if nodes wait for each other forever.
        """
        self.case, self.stages = case, stages
        chains = [microbatch_chain(m, path) for m, path in enumerate(paths)]
        position = {op: index for chain in chains for index, op in enumerate(chain)}
        self.after = {source: target for chain in chains for source, target in pairwise(chain)}
        self.size = len(paths), max(map(len, chains)), len(stages)
        self.operations = self._sorted(order, {chain[0] for chain in chains}, len(position))
        place = {operation: index for index, operation in enumerate(self.operations)}
        self.node = [operation.node for operation in self.operations]
        # The last operation of a chain is its own target: nothing is sent.
        self.target = [self.after.get(operation, operation) for operation in self.operations]
        self.following = [place[target] for target in self.target]
        stage_of = stage_of_nodes(stages)
        self.planned_s, self.uplink, self.link = [], [], []
        planned_hops = []
        queues: dict[int | tuple[int, int], int] = {}
        for (kind, _, node), target in zip(self.operations, self.target, strict=True):
            self.planned_s.append(case.duration(kind, node, stage_of[node]))
            hop = NO_HOP
            if target.node != node:
                hop = hop_parts(case, target.kind, node, target.node)
            planned_hops.append(hop)
            keys = node, (node, target.node)
            for of, key, seconds in zip((self.uplink, self.link), keys, hop[1:3], strict=True):
                queued = seconds > -math.inf
                of.append(queues.setdefault(key, len(queues)) if queued else -1)
        self.planned_hops = np.array(planned_hops)
        self.queues = len(queues)
        self.uplink_of = {key: number for key, number in queues.items() if isinstance(key, int)}
        # Seconds for which an iteration's hops occupy each node's connection.
        self.sending_s = [0.0] * len(case.nodes)
        for node, (overhead_s, uplink_s, *_) in zip(self.node, planned_hops, strict=True):
            self.sending_s[node] += max(0.0, overhead_s + uplink_s)
        # Indexes in `TimeFactors` of the factors of operations, and of hops to their successors.
        microbatch = [operation.microbatch for operation in self.operations]
        self.own_factor = microbatch, [position[operation] for operation in self.operations]
        self.hop_factor = microbatch, [position[target] for target in self.target]

    def _sorted(
        self, order: Sequence[Sequence[Operation]], can_start: set[Operation], count: int
    ) -> list[Operation]:
        done: list[Operation] = []
        nexts = [0] * len(order)
        awake = list(range(len(order)))
        while awake:
            node = awake.pop()
            own = order[node]
            while nexts[node] < len(own) and own[nexts[node]] in can_start:
                operation = own[nexts[node]]
                nexts[node] += 1
                done.append(operation)
                following = self.after.get(operation)
                if following is not None:
                    can_start.add(following)
                    awake.append(following.node)
        if len(done) == count:
            return done
        before = {target: source for source, target in self.after.items()}
        heads = [own[next_] for own, next_ in zip(order, nexts, strict=True) if next_ < len(own)]
        waits = "; ".join(f"the {head} waits for the {before[head]}" for head in heads)
        raise InputError(
            "plan.order",
            [[head.kind, head.microbatch] for head in heads],
            f"these operations deadlock: {waits}",
            "Reorder the operations of one of these nodes",
        )


class Replay:
    """Consecutive iterations of some work, from a start at 0 s.

    `free_s` is the end of each node's last iteration, `queue_free_s` that of each connection and
    link. For the last iteration, `arrived_s`, `start_s` and `sent_s` are the times when the input
    of each operation arrived, when it started, and when its result was on the link. `free_from` and
    the like are the numbers of the resources that determined these times: nodes, then connections
    and links, in their state at the last `mark`.
    """

    def __init__(self, work: Work, stretch: TimeFactors | None = None):
        """Start at 0 s, with all nodes and links free."""
        operations = len(work.operations)
        self.work = work
        self.free_s = [0.0] * len(work.case.nodes)
        # The last entry is for all hops that never wait.
        self.queue_free_s = [-math.inf] * (work.queues + 1)
        self.arrived_s, self.start_s, self.sent_s = ([0.0] * operations for _ in range(3))
        self.arrived_from = [0] * operations
        self.began_s: list[float] = []
        self.set_factors(stretch or unit_factors(*work.size))
        self.mark()

    def set_factors(self, stretch: TimeFactors) -> None:
        """Set the factors on all planned times from now on."""
        work = self.work
        self.seconds = (stretch.operations[work.own_factor] * work.planned_s).tolist()
        hops = stretch.hops[work.hop_factor][:, None] * work.planned_hops
        self.hops = list(map(tuple, hops.tolist()))
        self.ring_factor = stretch.averagings

    def mark(self) -> None:
        """Reset the origins of all times to the current state of nodes and links."""
        nodes = len(self.free_s)
        self.free_from = list(range(nodes))
        self.queue_from = list(range(nodes, nodes + len(self.queue_free_s)))

    def run(self) -> None:
        """Run one more iteration."""
        # The innermost loop of all planning in mode `outer`: local lists, and few calls.
        self.began_s = [*self.free_s]
        work, free_s, free_from = self.work, self.free_s, self.free_from
        arrived_s, arrived_from = self.arrived_s, self.arrived_from
        starts, sent_s, hops = self.start_s, self.sent_s, self.hops
        queue_free_s, queue_from = self.queue_free_s, self.queue_from
        uplinks, links = work.uplink, work.link
        arrived_s[:] = [-math.inf] * len(arrived_s)
        for place, (node, seconds, following) in enumerate(
            zip(work.node, self.seconds, work.following, strict=True)
        ):
            time_s, origin = arrived_s[place], arrived_from[place]
            if free_s[node] >= time_s:
                time_s, origin = free_s[node], free_from[node]
            starts[place] = time_s
            time_s += seconds
            free_s[node], free_from[node] = time_s, origin
            if following == place:
                continue
            uplink, link, hop = uplinks[place], links[place], hops[place]
            uplink_s, link_s = queue_free_s[uplink], queue_free_s[link]
            sent_s[place], queue_free_s[uplink], queue_free_s[link], arrived_s[following] = passed(
                time_s, uplink_s, link_s, hop
            )
            if uplink_s > time_s:
                origin = queue_from[uplink]
            sent_from = queue_from[link] if time_s < link_s == sent_s[place] else origin
            queue_from[uplink], queue_from[link] = origin, sent_from
            # The slower of the connection and the link decides.
            is_later = sent_s[place] + hop[3] > queue_free_s[uplink]
            arrived_from[following] = sent_from if is_later else origin

    def uplink_free_s(self, node: int) -> float:
        """Return when all traffic on a node's shared connection is sent [s]."""
        return self.queue_free_s[self.work.uplink_of.get(node, -1)]

    def runs(self, zero_s: float = 0.0) -> tuple[TimedOperation, ...]:
        """List the operations of the last iteration by their starts, counted from `zero_s`.

        An operation without a predecessor arrives as soon as its node has ended the previous
        iteration.
        """
        node, seconds = self.work.node, self.seconds
        # Operations of no duration come before those that may start at the same moment because of
        # them.
        in_order = sorted(
            range(len(node)),
            key=lambda place: (self.start_s[place], (node[place] + 1) * (seconds[place] > 0.0)),
        )
        runs = []
        for place in in_order:
            start_s, arrived_s = self.start_s[place], self.arrived_s[place]
            if arrived_s == -math.inf:
                arrived_s = self.began_s[node[place]]
            times = (arrived_s, start_s, start_s + seconds[place])
            runs.append(
                TimedOperation(self.work.operations[place], *(time_s - zero_s for time_s in times))
            )
        return tuple(runs)

    def transfers(self, zero_s: float = 0.0) -> tuple[Transfer, ...]:
        """List the transfers of the last iteration by their starts, counted from `zero_s`."""
        transfers = []
        for place, (source, target) in enumerate(
            zip(self.work.operations, self.work.target, strict=True)
        ):
            if target.node != source.node:
                ready_s = self.start_s[place] + self.seconds[place]
                times = ready_s, self.sent_s[place], self.arrived_s[self.work.following[place]]
                own = (time_s - zero_s for time_s in times)
                transfers.append(Transfer(source.node, target.node, target, *own))
        return tuple(sorted(transfers, key=lambda transfer: transfer.start_s))
