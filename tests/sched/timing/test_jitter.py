"""Replays with random delays: exact where a delay is known, the same luck for every plan."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.fields import MAX_SEED
from skippipe_sched.problem.case import load_case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.jitter import draw_time_factors, replay_with_jitter
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import TimeFactors

from tests.harness.messages import refusal
from tests.sched.examples import (
    PAPER,
    PUBLISHED,
    case_with,
    outer,
    planned,
    policies,
    routed_cases,
    same_place,
)


def _dispatched(case, stages=((0,), (1,)), paths=((0, 1),)) -> Plan:
    return planned(case, stages, paths)[0]


def _ones(microbatches, stages) -> TimeFactors:
    ones = np.ones((microbatches, 2 * stages + 1))
    return TimeFactors(ones, ones.copy(), np.ones(stages))


# F 1 s, L half a second, B 2 s, and a hop 1 s each way: the chain F F L B B takes 10.5 s.


@pytest.mark.parametrize(
    ("position", "longer_s"), list(enumerate([1, 1, 0.5, 2, 2])), ids=["F0", "F1", "L", "B1", "B0"]
)
def test_an_operation_that_takes_twice_as_long_ends_the_chain_later_by_itself(position, longer_s):
    plan = _dispatched(case_with())
    stretch = _ones(1, 2)
    stretch.operations[0, position] = 2
    timeline = simulate_plan(plan, stretch)
    assert timeline.pipeline_s == 10.5 + longer_s
    run = timeline.runs[position]
    assert run.end_s - run.start_s == 2 * longer_s


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_a_hop_three_times_as_long_brings_the_operation_at_its_position_later(position):
    plan = _dispatched(case_with())
    stretch = _ones(1, 2)
    stretch.hops[0, position] = 3
    timeline = simulate_plan(plan, stretch)
    assert timeline.pipeline_s == 12.5
    lasting = [transfer.end_s - transfer.start_s for transfer in timeline.transfers]
    assert lasting == [3 if position == other else 1 for other in (1, 2, 3, 4)]


def test_a_stage_averages_longer_and_nothing_else_changes():
    case = case_with(nodes=3, stages=[2, 1], stage_bytes=2**30)
    plan = _dispatched(case, ((0, 1), (2,)), ((0, 2), (1, 2)))
    stretch = _ones(2, 2)
    stretch.averagings[0] = 1.5
    planned, stretched = simulate_plan(plan), simulate_plan(plan, stretch)
    assert stretched.runs == planned.runs
    assert stretched.averaging_s == pytest.approx(1.5 * planned.averaging_s)


@given(routed_cases(), st.integers(0, MAX_SEED))
@settings(max_examples=25)
def test_where_links_do_not_contend_every_draw_takes_longer_and_more_jitter_longer_yet(
    example, seed
):
    """In a strict order all times are sums and maxima of what is stretched.

    Where links contend, a delay may let a transfer that matters go first.
    """
    case, stages, paths = example
    plan = _dispatched(*example)
    assert replay_with_jitter(plan, 0.0, 3).tolist() == [plan.predicted.iteration_s] * 3
    plan = _dispatched(replace(case, contention="none"), stages, paths)
    planned_s = plan.predicted.iteration_s
    little, much = replay_with_jitter(plan, 0.1, 4, seed), replay_with_jitter(plan, 0.5, 4, seed)
    assert (little >= planned_s).all()
    assert (much >= little).all()
    # Everything at the longest factor would be a bound: the same iteration, so many times as long.
    size = len(paths), len(stages)
    for draw, iteration_s in enumerate(much):
        stretch = draw_time_factors(*size, 0.5, seed, draw)
        arrays = (stretch.operations, stretch.hops, stretch.averagings)
        assert iteration_s <= planned_s * max(array.max() for array in arrays) * (1 + 1e-9)


def test_the_luck_belongs_to_seed_draw_microbatch_and_position():
    stretch = draw_time_factors(30, 6, 0.3, seed=5, draw=2)
    again = draw_time_factors(40, 6, 0.3, seed=5, draw=2)
    assert stretch.operations.shape == stretch.hops.shape == (30, 13)
    np.testing.assert_array_equal(stretch.operations, again.operations[:30])
    np.testing.assert_array_equal(stretch.hops, again.hops[:30])
    np.testing.assert_array_equal(stretch.averagings, again.averagings)
    for seed, draw in ((5, 3), (6, 2), (2, 5)):
        other = draw_time_factors(30, 6, 0.3, seed, draw)
        assert not np.isclose(other.operations, stretch.operations).any()
    assert not np.isclose(stretch.operations, stretch.hops).any()


def test_the_luck_is_exponential_with_the_mean_of_the_jitter():
    factors = draw_time_factors(2000, 6, 0.3, seed=0, draw=0).hops
    assert factors.min() >= 1
    assert factors.mean() == pytest.approx(1.3, abs=0.01)
    assert np.median(factors) == pytest.approx(1 + 0.3 * np.log(2), abs=0.01)


def test_draws_are_a_prefix_of_more_draws_and_two_hundred_take_some_seconds():
    case = load_case(Path(PAPER))
    plan = _dispatched(case, PUBLISHED.stages, PUBLISHED.microbatches)
    started = time.process_time()
    iterations = replay_with_jitter(plan, 0.3, 200, seed=1)
    assert time.process_time() - started < 10
    assert replay_with_jitter(plan, 0.3, 5, seed=1).tolist() == iterations[:5].tolist()
    assert len(set(iterations)) == 200
    median, late = np.percentile(iterations, [50, 95])
    assert simulate_plan(plan).iteration_s < median < late


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"jitter": -0.1}, "--jitter = -0.1"),
        ({"jitter": float("nan")}, "--jitter = nan"),
        ({"draws": 0}, "--draws = 0"),
        ({"seed": -1}, "--seed = -1"),
    ],
)
def test_arguments_without_sense_are_refused(wrong, told):
    plan = _dispatched(case_with())
    with refusal(told):
        replay_with_jitter(plan, **({"jitter": 0.3, "draws": 2, "seed": 0} | wrong))


# Iterations that follow one another.


@given(routed_cases(), policies())
@settings(max_examples=25)
def test_without_jitter_a_run_takes_what_its_steady_state_says(example, policy):
    case, stages, paths = example
    plan = _dispatched(outer(case, **policy), stages, paths)
    draws = 40 * policy["every"]
    mean_s = replay_with_jitter(plan, 0.0, draws).mean()
    assert mean_s == pytest.approx(simulate_plan(plan).iteration_s, rel=0.05)


def test_iterations_of_a_run_have_a_luck_each_and_hide_some_of_it():
    """Data nodes by themselves that wait for each other a cycle later, if at all."""
    case = same_place([3], microbatches_per_data_node=2)
    stages, paths = ((0, 1, 2),), ((0,), (1,), (2,)) * 2
    exact = _dispatched(case, stages, paths)
    plan = _dispatched(outer(case, every=10, fragments=1, delay=9), stages, paths)
    draws_s = replay_with_jitter(plan, 0.5, 200, seed=3)
    assert len(draws_s) == 200
    assert len(set(draws_s.round(9))) > 100
    assert replay_with_jitter(plan, 0.5, 200, seed=3).tolist() == draws_s.tolist()
    # The mean of the slowest is below that of the slowest in each.
    assert (
        simulate_plan(plan).iteration_s
        < draws_s.mean()
        < replay_with_jitter(exact, 0.5, 200, 3).mean()
    )


def test_what_is_stretched_always_is_so_in_every_iteration():
    plan = _dispatched(outer(case_with(), every=2, fragments=1))
    stretch = _ones(1, 2)
    stretch.operations[0, 2] = 3
    assert simulate_plan(plan, stretch).iteration_s == pytest.approx(10.5 + 2 * 0.5)
