"""Hops that share the connections of nodes: against a queue of events, by hand, as published."""

import heapq
from collections import defaultdict, deque
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import case_with, chains_of, drawn_order, in_order, routed_cases

GIBIBYTE = 2**30


# The reference: what happens, event after event.


class Events:
    """Nodes, connections and links, each of which does one thing at a time."""

    def __init__(self, case, stages, paths, order):
        self.case = case
        self.stage_of = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
        self.after = {a: b for chain in chains_of(paths) for a, b in pairwise(chain)}
        self.to_run = [deque(own) for own in order]
        self.idle = [True] * len(order)
        self.arrived = {chain[0]: 0.0 for chain in chains_of(paths)}
        self.start = {}
        self.on_link = {}
        self.sent_by = [0.0] * len(order)
        # By node and by pair of nodes: what waits there, and whether it is in use.
        self.waiting = defaultdict(deque)
        self.taken = set()
        self.events, self.number, self.now = [], count(), 0.0

    def after_s(self, seconds, then, *given):
        heapq.heappush(self.events, (self.now + seconds, next(self.number), then, given))

    def run(self):
        for node in range(len(self.to_run)):
            self.work(node)
        while self.events:
            self.now, _, then, given = heapq.heappop(self.events)
            then(*given)

    def work(self, node):
        own = self.to_run[node]
        if self.idle[node] and own and own[0] in self.arrived:
            operation = own.popleft()
            self.idle[node] = False
            self.start[operation] = self.now
            stage = self.stage_of[node]
            self.after_s(self.case.duration(operation.kind, node, stage), self.end, operation)

    def end(self, operation):
        node = operation.node
        self.idle[node] = True
        following = self.after.get(operation)
        if following is not None and following.node == node:
            self.arrive(following)
        elif following is not None:
            self.leave(node, following)
        self.work(node)

    def leave(self, node, following):
        places = [self.case.nodes[end].location for end in (node, following.node)]
        if places[0] == places[1]:
            self.after_s(self.case.hop_overhead_s, self.reach_link, node, following, [1])
        else:
            self.waiting[node].append(following)
            self.use_connection(node)

    def use_connection(self, node):
        if node in self.taken or not self.waiting[node]:
            return
        self.taken.add(node)
        following = self.waiting[node].popleft()
        self.after_s(self.case.hop_overhead_s, self.first_byte, node, following)

    def first_byte(self, node, following):
        here = self.case.nodes[node]
        seconds = self.case.hop_bytes(following.kind) / min(here.uplink, here.downlink)
        # It has arrived when its last byte has gone through all of it: the connection and the link.
        left = [2]
        self.after_s(seconds, self.last_byte, node, following, left)
        self.reach_link(node, following, left)

    def last_byte(self, node, following, left):
        self.taken.remove(node)
        self.sent_by[node] = self.now
        self.through(following, left)
        self.use_connection(node)

    def reach_link(self, node, following, left):
        self.waiting[node, following.node].append((following, left))
        self.use_link((node, following.node))

    def use_link(self, pair):
        if pair in self.taken or not self.waiting[pair]:
            return
        self.taken.add(pair)
        following, left = self.waiting[pair].popleft()
        self.on_link[following] = self.now
        source, target = (self.case.nodes[node] for node in pair)
        size = self.case.hop_bytes(following.kind)
        link = self.case.link_table.link(source.location, target.location)
        slower = link.bandwidth
        if source.location != target.location:
            slower = min(slower, target.downlink)
        self.after_s(size / link.bandwidth, self.free_link, pair)
        self.after_s(size / slower, self.through, following, left)

    def free_link(self, pair):
        self.taken.remove(pair)
        self.use_link(pair)

    def through(self, following, left):
        left[0] -= 1
        if not left[0]:
            source = next(a for a, b in self.after.items() if b == following)
            places = (self.case.nodes[end.node].location for end in (source, following))
            self.after_s(self.case.link_table.link(*places).latency_s, self.arrive, following)

    def arrive(self, following):
        self.arrived[following] = self.now
        self.work(following.node)


@given(routed_cases(contentions=["node"]), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_everything_happens_when_the_events_do(example, chance):
    """In any order that can run, not only that of dispatch."""
    case, stages, paths = example
    order = drawn_order(case, paths, chance)
    timeline = simulate(case, stages, paths, order)
    expected = Events(case, stages, paths, order)
    expected.run()
    assert {run.operation: run.start_s for run in timeline.runs} == expected.start
    assert {run.operation: run.arrived_s for run in timeline.runs} == expected.arrived
    assert {sent.operation: sent.start_s for sent in timeline.transfers} == expected.on_link
    for sent in timeline.transfers:
        least_s = case.hop_duration(sent.operation.kind, sent.source, sent.target)
        assert sent.end_s - sent.ready_s >= least_s - 1e-9
    ends = {node: 0.0 for node in range(len(case.nodes))}
    for run in timeline.runs:
        ends[run.operation.node] = max(ends[run.operation.node], run.end_s)
    for averaging in timeline.averagings:
        nodes = stages[averaging.stage]
        start_s = max(ends[node] for node in nodes)
        if len({case.nodes[node].location for node in nodes}) > 1:
            start_s = max(start_s, *(expected.sent_by[node] for node in nodes))
        assert averaging.start_s == start_s


# By hand.

# A home and two others: an activation of 1 GiB takes its uplink 2 s, and each link 1 s.
HOME = {
    "nodes": [{"uplink_GiB_per_s": 0.5}, {}, {}],
    "locations": ["home", "b", "c"],
    "links": [["home", "b", 1000, 1], ["home", "c", 1000, 1], ["b", "c", 1000, 1]],
    "activation_bytes": GIBIBYTE,
    "gradient_bytes": 0,
    "stages": [1, 2],
    "microbatches_per_data_node": 2,
    "contention": "node",
}


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        pytest.param({}, [(1, 4), (3, 6)], id="the second begins when the first has left"),
        pytest.param({"contention": "link", "nodes": 3}, [(1, 3), (2, 4)], id="not shared"),
        pytest.param({"hop_overhead_s": 0.25}, [(1.25, 4.25), (3.5, 6.5)], id="overhead occupies"),
        pytest.param(
            {"nodes": [HOME["nodes"][0] | {"downlink_GiB_per_s": 0.25}, *HOME["nodes"][1:]]},
            [(1, 6), (5, 10)],
            id="sent no quicker than received",
        ),
        pytest.param(
            {"nodes": [HOME["nodes"][0], {"downlink_GiB_per_s": 0.125}, HOME["nodes"][2]]},
            [(1, 10), (3, 6)],
            id="a slow receiver makes its own hop longer",
        ),
    ],
)
def test_two_hops_of_a_sender(changes, sent):
    """Its forwards end after 1 and 2 s."""
    timeline = simulate(case_with(**HOME | changes), [[0], [1, 2]], [(0, 1), (0, 2)])
    forwards = [own for own in timeline.transfers if (own.source, own.operation.kind) == (0, "F")]
    assert [(own.start_s, own.end_s) for own in forwards] == sent


def test_a_ring_begins_when_the_connections_of_its_replicas_are_empty():
    """The gradients of the inner stage take 8 s to leave, after the last backward."""
    sizes = {"gradient_bytes": GIBIBYTE, "stage_bytes": GIBIBYTE}
    case = case_with(**HOME | sizes | {"nodes": 3, "uplink_GiB_per_s": 0.125})
    timeline = simulate(case, [[0], [1, 2]], [(0, 1), (0, 2)])
    inner = next(own for own in timeline.averagings if own.stage == 1)
    last_s = max(run.end_s for run in timeline.runs if run.operation.node in (1, 2))
    assert inner.start_s == last_s + 8
    # 2 (2-1) / 2 GiB at the eighth of a GiB/s that the connections leave, and 2 s of latency.
    assert inner.end_s - inner.start_s == 8 + 2


# As published: eight ranks in a chain, 200 Mbit/s each, 50 ms for every transfer.


@pytest.mark.parametrize(
    ("microbatches", "activation_bytes", "published_s"),
    [(64, 2048 * 8 * 1024, 100.475), (32, 322 * 16 * 1024, 19.889)],
)
def test_the_published_times_of_a_step_on_home_connections(
    microbatches, activation_bytes, published_s
):
    """All microbatches fit, and computing takes next to nothing, as there."""
    ranks = [f"rank {rank}" for rank in range(8)]
    case = case_with(
        nodes=8,
        locations=ranks,
        links=[[a, b, 0, 100] for place, a in enumerate(ranks) for b in ranks[:place]],
        contention="node",
        uplink_Mbit_per_s=200,
        downlink_Mbit_per_s=200,
        hop_overhead_s=0.05,
        activation_bytes=activation_bytes,
        forward_s=1e-6,
        stages=[1] * 8,
        path_length=8,
        microbatches_per_data_node=microbatches,
        memory=microbatches,
    )
    timeline = simulate(case, in_order([1] * 8), [tuple(range(8))] * microbatches)
    assert timeline.iteration_s == pytest.approx(published_s, rel=0.03)
    # The connection of every rank is busy for most of it, and the bound knows.
    assert lower_bound_s(case, 8) > 0.9 * timeline.iteration_s
