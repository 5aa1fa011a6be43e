"""The compiled timing model is the simulator's, and a move of the search keeps every rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.rules import violations
from skippipe_sched.search import annealing
from skippipe_sched.search.arrays import (
    as_operations,
    candidate_of,
    copy_of,
    no_order,
    order_for,
    problem_of,
    scratch_for,
)
from skippipe_sched.search.compiled import fast
from skippipe_sched.search.evaluator import evaluate, replay
from skippipe_sched.search.moves import (
    MOVES,
    SWAP,
    propose,
    random_state,
    revert,
    undo_for,
)
from skippipe_sched.timing.averaging import added_s, quickest_averaging_s, rings_of_iteration
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import cases, in_order, outer, policies


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


def evaluated(case, candidate, order=None, limit=np.inf):
    """What the candidate costs in an order, or where dispatch decides."""
    problem = problem_of(case)
    scratch = scratch_for(problem, *candidate.paths.shape)
    judge = evaluate if order is None else replay
    return fast(judge)(problem, candidate, order or no_order(), scratch, limit, 0.0)


def recorded(case, candidate):
    problem, order = problem_of(case), order_for(candidate)
    scratch = scratch_for(problem, *candidate.paths.shape)
    iteration_s = fast(evaluate)(problem, candidate, order, scratch, np.inf, 0.0)
    _, paths = stages_and_paths(case, candidate)
    return iteration_s, order, as_operations(order, candidate, paths)


def test_dispatch_is_the_simulators_where_nothing_happens_at_once():
    @given(cases(speeds=(0.251, 0.57, 1.093, 1.5077)), st.integers(0, 2**30))
    @settings(max_examples=60)
    def run(case, seed):
        # No two nodes are alike, or what they do could end at the same instant.
        nodes = [
            node | {"forward_s": (1 + place / 73) * node["forward_s"]}
            for place, node in enumerate(case.source["nodes"])
        ]
        case = parse_case({**case.source, "nodes": nodes})
        candidate = placed(case, seed)
        if candidate is None or sum(case.microbatches) > len(case.microbatches):
            return
        stages, paths = stages_and_paths(case, candidate)
        assert recorded(case, candidate)[0] == pytest.approx(
            simulate(case, stages, paths).iteration_s
        )

    run()


@given(cases(), st.integers(0, 2**30))
@settings(max_examples=60)
def test_a_round_trip_of_the_quick_estimate_is_that_of_a_microbatch_alone(case, seed):
    candidate = placed(case, seed)
    if candidate is None:
        return
    problem = problem_of(case)
    stages, paths = stages_and_paths(case, candidate)
    for microbatch, path in enumerate(paths):
        trip_s = simulate(case, stages, [path]).pipeline_s / problem.memory[path[0]]
        found_s = fast(annealing._round_trip_s)(problem, candidate, microbatch)
        assert found_s == pytest.approx(trip_s)


@given(cases(), st.none() | policies(), st.integers(0, 2**30), st.integers(1, 30))
@settings(max_examples=100)
def test_every_move_keeps_the_rules_and_can_be_taken_back(case, policy, seed, moves):
    case = case if policy is None else outer(case, **policy)
    candidate = placed(case, seed)
    if candidate is None:
        return
    problem, undo, state = problem_of(case), undo_for(candidate), random_state(seed)
    for number in range(moves):
        before = copy_of(candidate)
        move = (seed + number) % MOVES
        made = fast(propose)(problem, candidate, undo, move, state)
        if made:
            stages, paths = stages_and_paths(case, candidate)
            assert violations(case, stages, paths) == []
            # A ring of many replicas is a local optimum, and may follow from where it began.
            rings_s = [quickest_averaging_s(case, s, nodes) for s, nodes in enumerate(stages)]
            assert candidate.averaging_s == pytest.approx(rings_s)
            again = candidate_of(problem, candidate.node_of_slot, candidate.paths)
            assert np.array_equal(again.visits, candidate.visits)
            assert np.array_equal(again.averaging_s, candidate.averaging_s)
        if not made or number % 2:
            fast(revert)(problem, candidate, undo, move, made)
            for now, then in zip(candidate, before, strict=True):
                assert np.array_equal(now, then)


@given(cases(), st.integers(0, 2**30), st.integers(0, 60))
@settings(max_examples=100)
def test_a_candidate_that_locks_or_is_too_slow_costs_infinity(case, seed, moves):
    candidate = placed(case, seed)
    if candidate is None:
        return
    problem, undo, state = problem_of(case), undo_for(candidate), random_state(seed)
    for _ in range(moves):
        if not fast(propose)(problem, candidate, undo, SWAP, state):
            fast(revert)(problem, candidate, undo, SWAP, False)
    iteration_s, _, operations = recorded(case, candidate)
    stages, paths = stages_and_paths(case, candidate)
    if iteration_s == np.inf:
        # The simulator's dispatch looks ahead, so it ends even these.
        assert np.isfinite(simulate(case, stages, paths).iteration_s)
        return
    assert simulate(case, stages, paths, operations).iteration_s == pytest.approx(iteration_s)
    assert evaluated(case, candidate, limit=1.01 * iteration_s) == iteration_s
    assert evaluated(case, candidate, limit=0.99 * iteration_s) == np.inf


# Averaging behind the iterations.


def rings_add(case, stages, paths, timeline):
    """What the rings of each stage add to an iteration that is like one by itself."""
    rings, added = rings_of_iteration(case.averaging), []
    for stage, nodes in enumerate(stages):
        runs = [run for run in timeline.runs if run.operation.node in nodes]
        worked_s = max((run.end_s for run in runs), default=0.0)
        worked_s -= min((run.start_s for run in runs), default=0.0)
        seconds = quickest_averaging_s(case, stage, tuple(nodes))
        if case.leaves_location(nodes):
            visits = [sum(node in path for path in paths) for node in nodes]
            loads_s = case.visit_load_s[list(nodes)]
            seconds += rings.delay * max(loads_s * visits)
        added.append(added_s(rings, seconds, timeline.pipeline_s, worked_s))
    return added


@given(
    cases(),
    st.none() | policies(),
    st.sampled_from([0, 2**26, 2**33]),
    st.integers(0, 2**30),
)
@settings(max_examples=200)
def test_an_iteration_by_itself_and_what_rings_add_are_as_in_python(case, policy, size, seed):
    """Ascending paths cannot lock, so both dispatch alike but for what happens at the same instant;
    in the same order of operations they must agree."""
    if policy is not None:
        case = parse_case(dict(outer(case, **policy).source) | {"stage_bytes": size})
    candidate = placed(case, seed)
    if candidate is None:
        return
    stages, paths = stages_and_paths(case, candidate)
    iteration_s, order, operations = recorded(case, candidate)
    timeline = simulate(case, stages, paths, operations)
    expected_s = timeline.iteration_s
    if policy is not None:
        expected_s = timeline.pipeline_s + max(rings_add(case, stages, paths, timeline))
    assert iteration_s == pytest.approx(expected_s)
    assert evaluated(case, candidate, order) == pytest.approx(expected_s)
    assert evaluated(case, candidate, limit=1.01 * iteration_s) == iteration_s
    assert evaluated(case, candidate, limit=0.99 * iteration_s) == np.inf
