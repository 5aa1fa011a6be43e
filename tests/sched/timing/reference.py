"""Times of a run by definition: each is looked up, back to the start, by what must hold."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.averaging import quickest_averaging_s

from tests.sched.examples import chains_of


class Locked(Exception):
    """Operations wait for each other for ever."""


def remembered(function: Callable[..., float]) -> Callable[..., float]:
    """Compute each value once; raise `Locked` where one needs itself."""
    values: dict[tuple, float | None] = {}

    def value(*given: Any) -> float:
        if given not in values:
            values[given] = None
            values[given] = function(*given)
        known = values[given]
        if known is None:
            raise Locked
        return known

    return value


class Reference:
    """Iterations in the given orders; they count from 1.

    Of iteration k: `ended(k, node)` and `ring_end(k, stage)`; of each operation its start, when
    its input has arrived, when its result has left the node and when it is on the link.
    """

    def __init__(self, case: Case, stages, paths, order):
        self.case, self.stages, self.order, self.paths = case, stages, order, paths
        chains = chains_of(paths)
        self.before = {b: a for chain in chains for a, b in pairwise(chain)}
        self.after = {a: b for b, a in self.before.items()}
        self.stage_of = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
        self.on_node = {b: a for node in order for a, b in pairwise(node)}
        policy = case.averaging
        self.offsets = {
            ((fragment + 1) * policy.every // policy.fragments) % policy.every
            for fragment in range(policy.fragments)
        }
        for name in ("start", "arrived", "left", "sent", "own_end", "ended", "ring_end"):
            setattr(self, name, remembered(getattr(self, name)))

    def require(self, k: int, runs, transfers) -> None:
        """Check the operations and transfers of iteration k, and the order of both lists."""
        every = [operation for node in self.order for operation in node]
        for listed in (runs, transfers):
            starts = [own.start_s for own in listed]
            assert starts == sorted(starts)
        found = {run.operation: (run.arrived_s, run.start_s, run.end_s) for run in runs}
        assert len(found) == len(runs)
        assert sorted(found) == sorted(every)
        for own, times in found.items():
            expected = self.arrived(k, own), self.start(k, own), self.end(k, own)
            assert times == pytest.approx(expected)
        hops = {own: self.before[own] for own in every if own in self.before}
        sent = {own: (before.node, own.node) for own, before in hops.items()}
        sent = {own: ends for own, ends in sent.items() if ends[0] != ends[1]}
        assert {own.operation: (own.source, own.target) for own in transfers} == sent
        assert len(transfers) == len(sent)
        for own in transfers:
            source = hops[own.operation]
            times = self.end(k, source), self.sent(k, source), self.arrived(k, own.operation)
            assert (own.ready_s, own.start_s, own.end_s) == pytest.approx(times)

    def is_sending(self, k):
        return k > 0 and k % self.case.averaging.every in self.offsets

    def start(self, k, operation):
        before = self.on_node.get(operation)
        free = self.ended(k - 1, operation.node) if before is None else self.end(k, before)
        return max(self.arrived(k, operation), free)

    def end(self, k, operation):
        stage = self.stage_of[operation.node]
        return self.start(k, operation) + self.case.duration(operation.kind, operation.node, stage)

    def arrived(self, k, operation):
        source = self.before.get(operation)
        if source is None:
            return self.ended(k - 1, operation.node)
        if source.node == operation.node:
            return self.end(k, source)
        if self.case.contention != "node":
            hop_s = self.case.hop_duration(operation.kind, source.node, operation.node)
            return self.sent(k, source) + hop_s
        link, downlink = self.rates(source)
        slower_s = self.case.hop_bytes(operation.kind) / min(link.bandwidth, downlink)
        through = self.sent(k, source) + slower_s
        return max(self.left(k, source), through) + link.latency_s

    def rates(self, source):
        """The link to where an operation's result is needed, and what limits it there."""
        nodes = [self.case.nodes[own.node] for own in (source, self.after[source])]
        places = [node.location for node in nodes]
        far = places[0] != places[1]
        return self.case.link_table.link(*places), nodes[1].downlink if far else np.inf

    def is_far(self, source):
        places = {self.case.nodes[own.node].location for own in (source, self.after[source])}
        return len(places) > 1

    def ahead(self, k, operation, also):
        """The last operation before of this node whose result goes the same way, and when."""
        there = [own for own in self.order[operation.node] if own in self.after and also(own)]
        place = there.index(operation)
        return (k, there[place - 1]) if place else (k - 1, there[-1])

    def left(self, k, operation):
        """When all bytes have left the node, over its connection if that is shared."""
        begun = self.end(k, operation) + self.case.hop_overhead_s
        if not self.is_far(operation):
            return begun
        when, ahead = self.ahead(k, operation, self.is_far)
        if when > 0:
            begun = max(begun, self.left(when, ahead) + self.case.hop_overhead_s)
        return begun + self.connection_s(operation)

    def connection_s(self, operation):
        """How long a far result takes on the connection of its node."""
        node = self.case.nodes[operation.node]
        size = self.case.hop_bytes(self.after[operation].kind)
        return size / min(node.uplink, node.downlink)

    def sent(self, k, operation):
        """After what its node has sent to the same one before, in this iteration or the last."""
        if self.case.contention == "none":
            return self.end(k, operation)
        target = self.after[operation].node
        when, ahead = self.ahead(k, operation, lambda own: self.after[own].node == target)
        if self.case.contention == "link":
            free = -np.inf if when == 0 else self.arrived(when, self.after[ahead])
            return max(self.end(k, operation), free)
        begun = self.left(k, operation)
        if self.is_far(operation):
            begun -= self.connection_s(operation)
        if when > 0:
            on_link = self.case.hop_bytes(self.after[ahead].kind) / self.rates(ahead)[0].bandwidth
            begun = max(begun, self.sent(when, ahead) + on_link)
        return begun

    def own_end(self, k, node):
        own = self.order[node]
        return self.end(k, own[-1]) if own else self.ended(k - 1, node)

    def ended(self, k, node):
        if k == 0:
            return 0.0
        sending = k - self.case.averaging.delay
        stage = self.stage_of[node]
        if not self.is_sending(sending) or len(self.stages[stage]) < 2:
            return self.own_end(k, node)
        return max(self.own_end(k, node), self.ring_end(sending, stage))

    def ring_end(self, k, stage):
        there = self.own_end if self.case.averaging.delay == 0 else self.ended
        ready = max(there(k, node) for node in self.stages[stage])
        earlier = [j for j in range(1, k) if self.is_sending(j)]
        if earlier:
            ready = max(ready, self.ring_end(earlier[-1], stage))
        return ready + ring_s(self.case, self.stages, self.paths, stage)


def ring_s(case, stages, paths, stage):
    """What a ring takes beside the hops that share the connections of its nodes."""
    nodes = tuple(stages[stage])
    seconds = quickest_averaging_s(case, stage, nodes)
    place = [node.location for node in case.nodes]
    if case.contention != "node" or len({place[node] for node in nodes}) == 1:
        return seconds
    sending_s = [0.0] * len(case.nodes)
    for chain in chains_of(paths):
        for source, target in pairwise(chain):
            if place[source.node] != place[target.node]:
                node = case.nodes[source.node]
                bytes_s = case.hop_bytes(target.kind) / min(node.uplink, node.downlink)
                sending_s[source.node] += case.hop_overhead_s + bytes_s
    # A stage has no more than one ring under way.
    delay = min(case.averaging.delay, case.averaging.every / case.averaging.fragments)
    return seconds + delay * max(sending_s[node] for node in nodes)
