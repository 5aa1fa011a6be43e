"""Iterations without a barrier: against a naive reference, by hand, and what must always hold."""

import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.averaging import WIDTHS
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.plan import Operation
from skippipe_sched.timing import steady
from skippipe_sched.timing.averaging import quickest_averaging_s
from skippipe_sched.timing.dispatch import dispatch
from skippipe_sched.timing.replay import Work
from skippipe_sched.timing.simulate import forecast, simulate
from skippipe_sched.timing.steady import steady_timeline

from tests.sched.examples import (
    case_with,
    chains_of,
    in_order,
    operations,
    outer,
    policies,
    routed_cases,
    same_place,
)

GIBIBYTE = 2**30
ROUNDING = 1 + 1e-9
# Seconds of an operation's chain on a data node alone: F 1 s, L half a second, B 2 s.
ALONE_S = 3.5


@st.composite
def examples(draw: st.DrawFn):
    """Routed cases with averaging behind the iterations, by rings that are too long at times."""
    case, stages, paths = draw(routed_cases())
    policy = {"mode": "outer"} | draw(policies())
    size = draw(st.sampled_from([0, 2**24, 2**33]))
    given = {**case.source, "averaging": policy, "stage_bytes": size}
    return parse_case(given), stages, paths


def work_of(case, stages, paths):
    return Work(case, stages, paths, dispatch(case, stages, paths))


def with_bytes(case: Case, stage_bytes: float) -> Case:
    return replace(case, stage_bytes=(stage_bytes,) * len(case.stages))


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


# The reference: when things happen is looked up, back to the start, by what must hold.


class Reference:
    """Iterations count from 1; `ended(k, node)` and `ring_end(k, stage)` are what is asked for."""

    def __init__(self, case, stages, paths, order):
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
            setattr(self, name, cache(getattr(self, name)))

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
            return -np.inf
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
        when, ahead = self.ahead(k, operation, lambda own: self.is_far(own))
        if when > 0:
            begun = max(begun, self.left(when, ahead) + self.case.hop_overhead_s)
        node = self.case.nodes[operation.node]
        size = self.case.hop_bytes(self.after[operation].kind)
        return begun + size / min(node.uplink, node.downlink)

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
            node = self.case.nodes[operation.node]
            size = self.case.hop_bytes(self.after[operation].kind)
            begun -= size / min(node.uplink, node.downlink)
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


@given(examples())
@settings(max_examples=60)
def test_iterations_end_when_the_reference_says(example):
    case, stages, paths = example
    alone = simulate(case, stages, paths)
    expected = Reference(case, stages, paths, alone.order)
    run = steady._Iterations(work_of(case, stages, paths))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        for k in range(1, 2 * case.averaging.every + 3):
            run.iterate()
            ended = [expected.ended(k, node) for node in range(len(case.nodes))]
            assert run.free_s == pytest.approx(ended)
    finally:
        sys.setrecursionlimit(limit)


@given(routed_cases(), st.integers(2, 4))
@settings(max_examples=40)
def test_without_rings_iterations_follow_as_in_one_long_one(example, iterations):
    """Where nothing is averaged: the same orders, one after another, in a simulation."""
    case, stages, paths = example
    stages = tuple((node,) for nodes in stages for node in nodes)  # Each a stage of its own.
    case = replace(
        outer(case),
        stages=(1,) * len(stages),
        stage_bytes=(0.0,) * len(stages),
        stage_cost=(1.0,) * len(stages),
    )
    alone = simulate(case, stages, paths)
    order = [
        [
            Operation(own.kind, own.microbatch + k * len(paths), own.node)
            for k in range(iterations)
            for own in node
        ]
        for node in alone.order
    ]
    together = simulate(case, stages, paths * iterations, order)
    ends = {run.operation: run.end_s for run in together.runs}
    run = steady._Iterations(work_of(case, stages, paths))
    for k in range(iterations):
        run.iterate()
        for node, own in enumerate(alone.order):
            if own:
                last = own[-1]._replace(microbatch=own[-1].microbatch + k * len(paths))
                assert run.free_s[node] == ends[last]


# By hand.


def replicas(ring_s: float, speeds=(1.0, 1.0), **averaging) -> tuple[Case, tuple, tuple]:
    """Data nodes alone, on which an iteration takes 3.5 s, and a ring as many as are said."""
    case = same_place(
        [len(speeds)],
        nodes=[{"forward_s": speed} for speed in speeds],
        same_location={"latency_ms": 0, "bandwidth_GiB_per_s": 1},
        stage_bytes=ring_s * GIBIBYTE / (len(speeds) - 1) * averaging.get("fragments", 1),
    )
    case = outer(case, **{"fragments": 1, "dtype": "float32"} | averaging)
    return case, in_order([len(speeds)]), tuple((node,) for node in range(len(speeds)))


@pytest.mark.parametrize(
    ("ring_s", "speeds", "averaging", "pipeline_s", "iteration_s", "late_s"),
    [
        pytest.param(3.4, (1, 1), (2, 1, 1), 3.5, 3.5, 0, id="within its delay"),
        pytest.param(5, (1, 1), (2, 1, 1), 3.5, (5 + 3.5) / 2, 1.5, id="once in a cycle"),
        pytest.param(5, (1, 1), (3, 1, 2), 3.5, 3.5, 0, id="within two iterations"),
        pytest.param(5, (1, 1), (2, 2, 1), 3.5, 5, 1.5, id="no time between rings"),
        pytest.param(1, (1, 2), (2, 1, 1), 7, 7, 0, id="a quicker replica waits for the other"),
        pytest.param(0, (1, 2, 0.5), (1, 1, 0), 7, 7, 0, id="a barrier without delay"),
        pytest.param(2, (1, 2, 0.5), (1, 1, 0), 7, 9, 2, id="a barrier and a ring"),
        # Each is a tenth of a second longer than what it has, and eleven may be under way.
        pytest.param(3.6, (1, 1), (12, 12, 11), 3.5, 3.6, 0.1, id="rings come to set the pace"),
    ],
)
def test_rings_cost_what_they_take_longer_than_their_delay(
    ring_s, speeds, averaging, pipeline_s, iteration_s, late_s
):
    every, fragments, delay = averaging
    example = replicas(ring_s, speeds, every=every, fragments=fragments, delay=delay)
    timeline = forecast(*example)
    assert timeline.averaging_s == pytest.approx(ring_s)
    assert timeline.pipeline_s == pytest.approx(pipeline_s)
    assert timeline.iteration_s == pytest.approx(iteration_s)
    assert timeline.late_s == pytest.approx(late_s)


def test_rings_of_a_stage_follow_one_another():
    """Sent after iterations 1 and 3 of 3, and due two later: a ring waits for the one before it."""
    case, stages, paths = replicas(6.0, every=3, fragments=2, delay=2)
    run = steady._Iterations(work_of(case, stages, paths))
    ends = []
    for _ in range(5):
        run.iterate()
        ends.append(max(run.free_s))
    # Sent at 3.5 and due at 10.5: in time. Sent at 10.5, over at 16.5, due at 17.5.
    assert ends[:3] == pytest.approx([3.5, 7.0, 10.5])
    (ring,) = run.rings
    assert (ring.start_s[1], ring.end_s[1]) == pytest.approx((10.5, 16.5))
    # Sent after iteration 4, at 14, while that ring is under way.
    assert (ring.start_s[0], ring.end_s[0]) == pytest.approx((16.5, 22.5))


def test_the_shown_iteration_has_the_rings_that_run_beside_it():
    """After a cycle of two: from 7 s on, whatever the ring is still at."""
    timeline = forecast(*replicas(5.0, every=2, delay=1))
    assert [(run.operation.kind, run.start_s) for run in timeline.runs] == [
        *(("F", 0), ("F", 0), ("L", 1), ("L", 1), ("B", 1.5), ("B", 1.5))
    ]
    assert [(own.start_s, own.end_s) for own in timeline.averagings] == [(0.0, 5.0)]
    assert timeline.end_s == 5.0
    # Without a delay it is the iteration at whose end they run.
    timeline = forecast(*replicas(5.0, every=2, delay=0))
    assert [(own.start_s, own.end_s) for own in timeline.averagings] == [(3.5, 8.5)]


def test_iterations_overlap_where_nodes_allow_it():
    """An inner node of two data nodes is never idle: its first forward waits for no last one."""
    case = same_place([2, 1], nodes=[{"forward_s": s} for s in (1, 1, 10)], path_length=2)
    stages, paths = ((0, 1), (2,)), ((0, 2), (1, 2))
    timeline = forecast(outer(case), stages, paths)
    assert timeline.iteration_s == pytest.approx(2 * (10 + 20))
    assert timeline.iteration_s < simulate(case, stages, paths).pipeline_s - 3
    # Of what comes next the first data node does its part while the other one still waits.
    ends = {run.operation.node: run.end_s for run in timeline.runs}
    assert ends[1] - ends[0] > 3


# What always holds.


@given(examples())
@settings(max_examples=150)
def test_what_must_hold_of_every_steady_state(example):
    case, stages, paths = example
    alone = simulate(case, stages, paths)
    timeline = forecast(case, stages, paths)
    rings = [ring_s(case, stages, paths, stage) for stage in range(len(stages))]
    policy = case.averaging
    assert timeline.averaging_s == pytest.approx(max(rings))
    assert timeline.pipeline_s <= timeline.iteration_s * ROUNDING
    assert max(timeline.busy_s) <= timeline.pipeline_s * ROUNDING
    assert policy.fragments * max(rings) / policy.every <= timeline.iteration_s * ROUNDING
    # With a barrier around each iteration all would be as in the one by itself, and no sooner.
    assert timeline.pipeline_s <= alone.pipeline_s * ROUNDING
    assert timeline.late_s >= 0
    assert timeline.order == alone.order
    assert sorted(run.operation for run in timeline.runs) == sorted(operations(chains_of(paths)))


@given(examples())
@settings(max_examples=60)
def test_the_mean_is_that_of_a_long_run(example):
    case, stages, paths = example
    run = steady._Iterations(work_of(case, stages, paths))
    ends = []
    cycles = 240 // case.averaging.every
    for _ in range(cycles * case.averaging.every):
        run.iterate()
        ends.append(max(run.free_s))
    half = cycles // 2 * case.averaging.every
    mean_s = (ends[-1] - ends[half - 1]) / (len(ends) - half)
    found_s = forecast(case, stages, paths).iteration_s
    # The last cycles may be in the middle of what repeats itself in several.
    assert found_s == pytest.approx(mean_s, rel=0.02)


@given(examples())
@settings(max_examples=60)
def test_a_timeline_of_the_steady_state_is_whole(example):
    case, stages, paths = example
    timeline = forecast(case, stages, paths)
    runs = {run.operation: run for run in timeline.runs}
    transfers = {sent.operation: sent for sent in timeline.transfers}
    for listed in (timeline.runs, timeline.transfers, timeline.averagings):
        assert [own.start_s for own in listed] == sorted(own.start_s for own in listed)
    for chain in chains_of(paths):
        for source, target in pairwise(chain):
            if source.node == target.node:
                assert runs[target].arrived_s == pytest.approx(runs[source].end_s)
                continue
            sent = transfers.pop(target)
            assert (sent.source, sent.target) == (source.node, target.node)
            assert sent.ready_s == pytest.approx(runs[source].end_s)
            assert sent.start_s >= sent.ready_s - 1e-9
            hop_s = case.hop_duration(target.kind, source.node, target.node)
            if case.contention == "node":
                assert sent.end_s - sent.start_s >= hop_s - case.hop_overhead_s - 1e-9
            else:
                assert sent.end_s - sent.start_s == pytest.approx(hop_s)
            assert runs[target].arrived_s == pytest.approx(sent.end_s)
    assert not transfers
    for order in timeline.order:
        for earlier, later in pairwise(order):
            assert runs[later].start_s >= runs[earlier].end_s - 1e-9
    for run in timeline.runs:
        assert run.start_s >= run.arrived_s - 1e-9
        assert run.start_s >= 0.0
    averaging = [s for s, nodes in enumerate(stages) if len(nodes) > 1]
    assert sorted(own.stage for own in timeline.averagings) == averaging
    for own in timeline.averagings:
        expected_s = ring_s(case, stages, paths, own.stage)
        assert own.end_s - own.start_s == pytest.approx(expected_s)
        assert own.start_s >= 0.0
    assert timeline.end_s == max(own.end_s for own in (*timeline.runs, *timeline.averagings))


@given(examples())
@settings(max_examples=80)
def test_a_ring_too_long_for_its_delay_makes_iterations_longer_and_is_late(example):
    case, stages, paths = example
    assume(len(stages[0]) > 1)
    free = forecast(with_bytes(case, 0), stages, paths)
    policy = case.averaging
    # Rings of data nodes alone take longer than two cycles do without them.
    cycle_s = 2 * policy.every * simulate(case, stages, paths).pipeline_s + 10
    numbers = 2 * GIBIBYTE * cycle_s
    size = policy.fragments * numbers * WIDTHS["float32"] / WIDTHS[policy.dtype]
    timeline = forecast(with_bytes(case, size), stages, paths)
    assert quickest_averaging_s(with_bytes(case, size), 0, tuple(stages[0])) > cycle_s
    assert timeline.iteration_s > free.iteration_s
    assert timeline.late_s > 0


@given(examples())
@settings(max_examples=100)
def test_quicker_rings_make_no_iteration_longer_and_none_late_that_was_in_time(example):
    """Twice the bandwidth and twice the activations: hops take as long, and rings half as long."""
    case, stages, paths = example
    source = dict(case.source)
    twice = parse_case(
        source
        | {
            "bandwidth_factor": 2 * source.get("bandwidth_factor", 1.0),
            "activation_bytes": 2 * case.activation_bytes,
            "gradient_bytes": 2 * case.gradient_bytes,
        }
    )
    nodes = (replace(n, uplink=2 * n.uplink, downlink=2 * n.downlink) for n in twice.nodes)
    twice = replace(twice, nodes=tuple(nodes))
    assert np.array_equal(twice.forward_hop_s, case.forward_hop_s)
    order = simulate(case, stages, paths).order
    slower, quicker = (forecast(own, stages, paths, order) for own in (case, twice))
    assert quicker.iteration_s <= slower.iteration_s * ROUNDING
    assert quicker.late_s <= slower.late_s + 1e-9


@given(examples())
@settings(max_examples=80)
def test_if_nobody_waits_for_a_ring_it_could_as_well_be_free(example):
    case, stages, paths = example
    free = steady._run_until_steady(steady._Iterations(work_of(case, stages, paths),
                                              without_rings=True))[0]  # fmt: skip
    timeline = forecast(case, stages, paths)
    assert timeline.pipeline_s == pytest.approx(free)
    rings = [ring_s(case, stages, paths, stage) for stage in range(len(stages))]
    if max(rings) == 0:
        assert (timeline.iteration_s, timeline.late_s) == (timeline.pipeline_s, 0)


# How it is found.


def test_the_slowest_circle_is_found():
    origins = [1, 0, 2, 1, 3]
    longer_s = np.array([3.0, 5.0, 3.5, 9.0, 9.0])
    # 0 and 1 wait for each other, 2 for itself; 3 and 4 wait for others, and nothing for them.
    assert steady._slowest_cycle_s(origins, longer_s) == 4.0


def test_what_drifts_for_long_does_not_delay_what_is_said():
    """The second node is quicker by a ten-thousandth: it would come to wait after 70,000 s."""
    case, stages, paths = replicas(1.0, (1.0, 0.9999), every=2, delay=1)
    run = steady._Iterations(work_of(case, stages, paths))
    iteration_s, late_s = steady._run_until_steady(run)
    assert iteration_s == pytest.approx(ALONE_S)
    assert late_s == 0
    assert run.number <= 4 * case.averaging.every


def test_if_no_cycle_settles_the_later_half_must_do(monkeypatch):
    monkeypatch.setattr(steady, "_slowest_cycle_s", lambda *_: 0.0)
    timeline = forecast(*replicas(5.0, every=2, delay=1))
    assert timeline.iteration_s == pytest.approx((5.0 + ALONE_S) / 2)
    assert timeline.late_s == pytest.approx(1.5)


def test_a_steady_timeline_is_of_the_order_it_is_given():
    case = outer(case_with(microbatches_per_data_node=2), every=1, fragments=1, delay=0)
    stages, paths = ((0,), (1,)), ((0, 1), (0, 1))
    alone = simulate(case, stages, paths)
    assert steady_timeline(work_of(case, stages, paths)).order == alone.order
    # One data node: its iterations follow one another as if there were a barrier.
    assert forecast(case, stages, paths).iteration_s == pytest.approx(alone.pipeline_s)
