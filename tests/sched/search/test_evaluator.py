"""The search's timing model is the simulator's, and a move of the search keeps every rule.

Kernels are interpreted here: test_compiled.py shows that they do the same compiled.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.methods.routes import place_in_order
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
from skippipe_sched.search.compiled import interpreting
from skippipe_sched.search.evaluator import evaluate, evaluate_prepared, prepare, replay
from skippipe_sched.search.moves import MOVES, SWAP, propose, random_state, revert, undo_for
from skippipe_sched.timing.averaging import added_s, quickest_averaging_s, rings_of_iteration
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import balanced_cases, outer, policies


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with interpreting():
        yield


def candidate_for(case, stages, paths):
    nodes = np.array([node for stage in stages for node in stage])
    return candidate_of(problem_of(case), nodes, np.argsort(nodes)[np.array(paths)])


def stages_and_paths(case, candidate):
    nodes = candidate.node_of_slot
    paths = tuple(map(tuple, nodes[candidate.paths].tolist()))
    return place_in_order(case, nodes.tolist()), paths


def evaluated(case, candidate, judge=evaluate, order=None, limit=np.inf, mean_weight=0.0):
    """What the candidate costs in an order, or where dispatch decides."""
    problem = problem_of(case)
    scratch = scratch_for(problem, *candidate.paths.shape)
    return judge(problem, candidate, order or no_order(), scratch, limit, mean_weight)


@given(balanced_cases(speeds=(0.251, 0.57, 1.093, 1.5077), most_microbatches=1))
def test_dispatch_is_the_simulators_where_nothing_happens_at_once(example):
    case, stages, paths = example
    # No two nodes are alike, or what they do could end at the same instant.
    nodes = [
        node | {"forward_s": (1 + place / 73) * node["forward_s"]}
        for place, node in enumerate(case.source["nodes"])
    ]
    case = parse_case({**case.source, "nodes": nodes})
    candidate = candidate_for(case, stages, paths)
    dispatched_s = simulate(case, *stages_and_paths(case, candidate)).iteration_s
    assert evaluated(case, candidate) == pytest.approx(dispatched_s)


@given(balanced_cases())
def test_a_round_trip_of_the_quick_estimate_is_that_of_a_microbatch_alone(example):
    case, stages, paths = example
    problem, candidate = problem_of(case), candidate_for(*example)
    for microbatch, path in enumerate(paths):
        trip_s = simulate(case, stages, [path]).pipeline_s / problem.memory[path[0]]
        found_s = annealing._round_trip_s(problem, candidate, microbatch)
        assert found_s == pytest.approx(trip_s)


@given(balanced_cases(), st.none() | policies(), st.integers(0, 2**30), st.integers(1, 30))
def test_every_move_keeps_the_rules_and_can_be_taken_back(example, policy, seed, moves):
    case, *placed = example
    case = case if policy is None else outer(case, **policy)
    candidate = candidate_for(case, *placed)
    problem, undo, state = problem_of(case), undo_for(candidate), random_state(seed)
    for number in range(moves):
        before = copy_of(candidate)
        move = (seed + number) % MOVES
        made = propose(problem, candidate, undo, move, state)
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
            revert(problem, candidate, undo, move, made)
            for now, then in zip(candidate, before, strict=True):
                assert np.array_equal(now, then)


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
    balanced_cases(),
    st.none() | policies(),
    st.sampled_from([0, 2**26, 2**33]),
    st.integers(0, 2**30),
    st.integers(0, 60),
)
def test_a_candidate_costs_what_the_simulator_says_in_the_same_order(
    example, policy, size, seed, swaps
):
    """And infinity where it locks or is too slow; with what rings behind the iterations add."""
    case, *placed = example
    if policy is not None:
        case = parse_case(dict(outer(case, **policy).source) | {"stage_bytes": size})
    candidate = candidate_for(case, *placed)
    problem, undo, state = problem_of(case), undo_for(candidate), random_state(seed)
    for _ in range(swaps):
        if not propose(problem, candidate, undo, SWAP, state):
            revert(problem, candidate, undo, SWAP, False)
    stages, paths = stages_and_paths(case, candidate)
    order = order_for(candidate)
    iteration_s = evaluated(case, candidate, order=order)
    if iteration_s == np.inf:
        # The simulator's dispatch looks ahead, so it ends even these.
        assert np.isfinite(simulate(case, stages, paths).iteration_s)
        return
    timeline = simulate(case, stages, paths, as_operations(order, candidate, paths))
    expected_s = timeline.iteration_s
    ends_s = [
        max((run.end_s for run in timeline.runs if run.operation.node == node), default=0.0)
        for node in stages[0]
    ]
    mean_s = np.mean(ends_s)
    if policy is not None:
        added = rings_add(case, stages, paths, timeline)
        expected_s = timeline.pipeline_s + max(added)
        mean_s += sum(added)
    assert iteration_s == pytest.approx(expected_s)
    assert evaluated(case, candidate, replay, order) == pytest.approx(expected_s)
    assert evaluated(case, candidate, limit=1.01 * iteration_s) == iteration_s
    assert evaluated(case, candidate, limit=0.99 * iteration_s) == np.inf
    cost_s = evaluated(case, candidate, mean_weight=0.3)
    assert cost_s == pytest.approx(iteration_s + 0.3 * mean_s)
    assert evaluated(case, candidate, limit=1.001 * cost_s, mean_weight=0.3) == cost_s
    assert evaluated(case, candidate, limit=0.999 * cost_s, mean_weight=0.3) == np.inf


@given(balanced_cases(), st.none() | policies(), st.integers(0, 2**30), st.integers(1, 30))
def test_only_what_a_move_has_changed_needs_to_be_prepared_again(example, policy, seed, moves):
    case, *placed = example
    case = case if policy is None else outer(case, **policy)
    problem = problem_of(case)
    chain = annealing.chain_from(problem, candidate_for(case, *placed), seed)
    candidate, scratch = chain.candidate, chain.scratch
    prepare(problem, candidate, scratch, scratch.every)
    for number in range(moves):
        move = (seed + number) % MOVES
        made = propose(problem, candidate, chain.undo, move, chain.state)
        if made:
            annealing.prepare_changed(problem, chain, move)
        if not made or number % 2:
            annealing.take_back(problem, chain, move, made)
        cost_s = evaluate_prepared(problem, candidate, no_order(), scratch, np.inf, 0.3)
        assert cost_s == evaluated(case, candidate, mean_weight=0.3)
