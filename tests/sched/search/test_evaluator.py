"""The compiled timing model is the simulator's, and a move of the search keeps every rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.problem.rules import violations
from skippipe_sched.search import settling
from skippipe_sched.search.arrays import (
    Stretches,
    as_operations,
    candidate_of,
    copy_of,
    no_order,
    no_stretch,
    order_for,
    problem_of,
    scratch_for,
)
from skippipe_sched.search.chance import random_state
from skippipe_sched.search.evaluator import evaluate
from skippipe_sched.search.moves import MOVES, PRIORITY, SWAP, propose, revert, undo_for
from skippipe_sched.timing.jitter import draw_stretch
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import cases, in_order


def placed(case, seed):
    """A candidate with random balanced paths on a random placement."""
    random = np.random.default_rng(seed)
    nodes = random.permutation(len(case.nodes))
    stages = tuple(tuple(nodes[list(slots)].tolist()) for slots in in_order(case.stages))
    try:
        paths = np.argsort(nodes)[np.array(random_paths(case, stages, random))]
    except InputError:
        return None  # The case's jump limit leaves no balanced paths.
    return candidate_of(problem_of(case), nodes, paths)


def stages_and_paths(case, candidate):
    nodes = candidate.node_of_slot
    stages = tuple(tuple(nodes[list(slots)].tolist()) for slots in in_order(case.stages))
    return stages, tuple(map(tuple, nodes[candidate.paths].tolist()))


def evaluated(case, candidate, order=None, stretch=None, limit=np.inf):
    """What the candidate costs in an order, or where dispatch decides."""
    problem = problem_of(case)
    scratch = scratch_for(problem, *candidate.paths.shape)
    ordered = order is not None
    rest = (ordered, stretch or no_stretch(), scratch, limit, 0.0)
    return evaluate(problem, candidate, order or no_order(), *rest)


def recorded(case, candidate):
    problem, order = problem_of(case), order_for(candidate)
    scratch = scratch_for(problem, *candidate.paths.shape)
    iteration_s = evaluate(problem, candidate, order, False, no_stretch(), scratch, np.inf, 0.0)
    _, paths = stages_and_paths(case, candidate)
    return iteration_s, order, as_operations(order, candidate, paths)


@given(cases(), st.integers(0, 2**30))
@settings(max_examples=150, deadline=None)
def test_dispatch_takes_as_long_as_the_simulator_says(case, seed):
    candidate = placed(case, seed)
    if candidate is None:
        return
    stages, paths = stages_and_paths(case, candidate)
    iteration_s, order, operations = recorded(case, candidate)
    # Ascending paths cannot lock, so both dispatch alike but for what happens at the same instant;
    # in the same order of operations they must agree.
    assert simulate(case, stages, paths, operations).iteration_s == pytest.approx(iteration_s)
    assert evaluated(case, candidate, order) == pytest.approx(iteration_s)


def test_dispatch_is_the_simulators_where_nothing_happens_at_once():
    @given(cases(speeds=(0.251, 0.57, 1.093, 1.5077)), st.integers(0, 2**30))
    @settings(max_examples=60, deadline=None)
    def run(case, seed):
        candidate = placed(case, seed)
        if candidate is None or sum(case.microbatches) > len(case.microbatches):
            return
        stages, paths = stages_and_paths(case, candidate)
        assert recorded(case, candidate)[0] == pytest.approx(
            simulate(case, stages, paths).iteration_s
        )

    run()


@given(cases(), st.integers(0, 2**30), st.floats(0, 2))
@settings(max_examples=100, deadline=None)
def test_a_stretched_iteration_takes_as_long_as_the_simulator_says(case, seed, jitter):
    candidate = placed(case, seed)
    if candidate is None:
        return
    stages, paths = stages_and_paths(case, candidate)
    _, order, operations = recorded(case, candidate)
    luck = draw_stretch(len(paths), len(stages), jitter, seed, 0)
    expected_s = simulate(case, stages, paths, operations, luck).iteration_s
    stretch = Stretches(luck.operations, luck.hops, luck.averagings)
    assert evaluated(case, candidate, order, stretch) == pytest.approx(expected_s)


@given(cases(), st.integers(0, 2**30))
@settings(max_examples=60, deadline=None)
def test_a_round_trip_of_the_quick_estimate_is_that_of_a_microbatch_alone(case, seed):
    candidate = placed(case, seed)
    if candidate is None:
        return
    problem = problem_of(case)
    stages, paths = stages_and_paths(case, candidate)
    for microbatch, path in enumerate(paths):
        trip_s = simulate(case, stages, [path]).pipeline_s / problem.memory[path[0]]
        found_s = settling._round_trip_s(problem, candidate, microbatch)
        assert found_s == pytest.approx(trip_s)


@given(cases(), st.integers(0, 2**30), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_every_move_keeps_the_rules_and_can_be_taken_back(case, seed, moves):
    candidate = placed(case, seed)
    if candidate is None:
        return
    problem, undo, state = problem_of(case), undo_for(candidate), random_state(seed)
    for number in range(moves):
        before = copy_of(candidate)
        move = (seed + number) % MOVES
        made = propose(problem, candidate, undo, move, state)
        if made:
            assert violations(case, *stages_and_paths(case, candidate)) == []
            again = candidate_of(problem, candidate.node_of_slot, candidate.paths)
            assert np.array_equal(again.visits, candidate.visits)
            assert np.array_equal(again.averaging_s, candidate.averaging_s)
        if not made or number % 2:
            revert(problem, candidate, undo, move, made)
            for now, then in zip(candidate, before, strict=True):
                assert np.array_equal(now, then)


@given(cases(), st.integers(0, 2**30), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_candidate_that_locks_or_is_too_slow_costs_infinity(case, seed, moves):
    candidate = placed(case, seed)
    if candidate is None:
        return
    problem, undo, state = problem_of(case), undo_for(candidate), random_state(seed)
    for _ in range(moves):
        for move in (SWAP, PRIORITY):
            made = propose(problem, candidate, undo, move, state)
            if not made:
                revert(problem, candidate, undo, move, made)
    iteration_s, _, operations = recorded(case, candidate)
    stages, paths = stages_and_paths(case, candidate)
    if iteration_s == np.inf:
        # The simulator's dispatch looks ahead, so it ends even these.
        assert np.isfinite(simulate(case, stages, paths).iteration_s)
        return
    assert simulate(case, stages, paths, operations).iteration_s == pytest.approx(iteration_s)
    assert evaluated(case, candidate, limit=1.01 * iteration_s) == iteration_s
    assert evaluated(case, candidate, limit=0.99 * iteration_s) == np.inf
