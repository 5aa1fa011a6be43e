"""Iterations without a barrier: against a naive reference, by hand, and what must always hold."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.problem.case import parse_case
from skippipe_sched.timing import steady
from skippipe_sched.timing.dispatch import dispatch
from skippipe_sched.timing.replay import Work
from skippipe_sched.timing.simulate import forecast, simulate

from tests.sched.examples import (
    chains_of,
    operations,
    outer,
    policies,
    replicas,
    routed_cases,
    same_place,
)
from tests.sched.timing.reference import Reference, ring_s

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


@given(examples())
def test_iterations_are_as_the_reference_says(example):
    case, stages, paths = example
    expected = Reference(case, stages, paths, simulate(case, stages, paths).order)
    run = steady._Iterations(work_of(case, stages, paths))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        for k in range(1, 2 * case.averaging.every + 3):
            run.iterate()
            ended = [expected.ended(k, node) for node in range(len(case.nodes))]
            assert run.free_s == pytest.approx(ended)
            expected.require(k, run.runs(), run.transfers())
    finally:
        sys.setrecursionlimit(limit)


# By hand.


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
    # If nobody waits for a ring it could as well be free.
    free = steady._Iterations(work_of(case, stages, paths), without_rings=True)
    assert timeline.pipeline_s == pytest.approx(steady._run_until_steady(free)[0])
    assert timeline.late_s >= 0
    if max(rings) == 0:
        assert (timeline.iteration_s, timeline.late_s) == (timeline.pipeline_s, 0)
    # The shown iteration has all that is in one, and the rings beside it.
    assert timeline.order == alone.order
    assert sorted(run.operation for run in timeline.runs) == sorted(operations(chains_of(paths)))
    assert len(timeline.transfers) == len(alone.transfers)
    averaging = [s for s, nodes in enumerate(stages) if len(nodes) > 1]
    assert sorted(own.stage for own in timeline.averagings) == averaging
    shown = (*timeline.runs, *timeline.averagings)
    for own in timeline.averagings:
        assert own.end_s - own.start_s == pytest.approx(rings[own.stage])
    assert min(own.start_s for own in shown) == 0
    assert timeline.end_s == max(own.end_s for own in shown)


@given(examples())
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
