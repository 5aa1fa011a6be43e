"""How long an iteration takes on the nodes that are there: planned once, or likened to others."""

from pathlib import Path

import numpy as np
import pytest
from skippipe_sched.churn.iteration_times import IterationTimes, max_planned_placements
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.methods.routes import place_in_order
from skippipe_sched.problem.plan import load_plan

from tests.sched.examples import LOCATIONS, case_with, outer, planned

PAPER = Path("experiments/paper/plans/skip33.json")


def without(plan, lost):
    return tuple(tuple(node for node in stage if node not in lost) for stage in plan.stages)


@pytest.fixture(scope="module")
def paper_plan():
    return load_plan(PAPER)


def test_a_placement_is_planned_as_the_runtime_does_and_once(paper_plan):
    told = []
    times = IterationTimes(paper_plan, 9, told.append)
    assert times(paper_plan.stages) == paper_plan.predicted.iteration_s
    placement = without(paper_plan, {3, 7})
    kept = set(range(20)) - {3, 7}
    assert times(placement) == repair_plan(paper_plan, kept).predicted.iteration_s
    assert times(placement) == times(placement)
    assert (times.planned, times.estimated_placements, told) == (2, 0, [1, 2])


def test_a_placement_with_a_moved_node_or_a_skipped_stage_is_planned(paper_plan):
    moved = [*without(paper_plan, {2, 14, 18})]
    moved[1], moved[4] = moved[1][:-1], moved[1][-1:]
    skipped = [*without(paper_plan, {9})]
    skipped[4] = ()
    for placement, left_out in ((tuple(moved), []), (tuple(skipped), [4])):
        kept = [node for stage in placement for node in stage]
        plan = repair_plan(paper_plan, kept, placement, left_out)
        assert IterationTimes(paper_plan, 9)(placement) == plan.predicted.iteration_s


@pytest.fixture(scope="module")
def many_nodes():
    """Random paths of 36 microbatches over 60 nodes in five regions."""
    case = case_with(
        nodes=60,
        locations=LOCATIONS,
        links="gcp12",
        activation_bytes=2**25,
        stage_bytes=2**26,
        stages=[12, 12, 12, 12, 12],
        path_length=4,
        microbatches_per_data_node=3,
        memory=3,
    )
    stages = place_in_order(case)
    plan, _ = planned(case, stages, random_paths(case, stages, np.random.default_rng(0)))
    return plan


def test_beyond_the_most_a_placement_is_likened_to_those_that_are_planned(many_nodes):
    """Within a sixth in the mean, of sets of live nodes that hardly ever come twice."""
    random = np.random.default_rng(0)
    placements = [
        without(many_nodes, set(random.choice(60, random.integers(1, 5), replace=False)))
        for _ in range(40)
    ]
    times = IterationTimes(many_nodes, 30)
    seconds = np.array([times(placement) for placement in placements])
    assert times.planned == 30
    likened = {*placements[30:]} - {*placements[:30]}
    assert times.estimated_placements == len(likened) > 5
    exact = np.array([times.planned_s(placement) for placement in placements[30:]])
    assert np.abs(seconds[30:] / exact - 1).mean() < 1 / 6


def test_nodes_of_one_stage_and_location_are_alike(many_nodes):
    """One planned placement is enough for another that lacks as many nodes at the same places."""
    here = [node for node in many_nodes.stages[2] if many_nodes.case.nodes[node].location == "Iowa"]
    times = IterationTimes(many_nodes, 2)
    times(many_nodes.stages)
    seconds = [times(without(many_nodes, {node})) for node in here[:2]]
    assert seconds[0] == seconds[1]
    assert times.estimated_placements == 1


def test_what_is_planned_is_less_for_a_plan_of_more_operations(paper_plan, many_nodes):
    assert max_planned_placements(paper_plan) > max_planned_placements(many_nodes) > 30


def test_where_nobody_waits_for_averaging_it_is_the_steady_state(many_nodes):
    case = outer(many_nodes.case, every=4, fragments=2)
    plan, timeline = planned(case, many_nodes.stages, many_nodes.microbatches)
    times = IterationTimes(plan, 2)
    assert times(plan.stages) == timeline.iteration_s
    placement = without(plan, {3})
    left = repair_plan(plan, set(range(60)) - {3})
    assert times(placement) == left.predicted.iteration_s
    assert max_planned_placements(plan) < max_planned_placements(many_nodes)
