"""Which plans are searched for when hosts have changed, and which of them are worth taking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.training.replan.candidates import (
    busy_seconds,
    cases_to_search,
    has_drifted,
    migration_seconds,
    pays_off,
    placement_of,
    recalibrated,
)
from tests.harness.step_metrics import metrics_of
from tests.sched.examples import plan_of

# Two data nodes and three of the other stage; each sends three microbatches.
OWN = plan_of([[0, 1], [2, 3, 4]], [[0, 2], [0, 3], [0, 4], [1, 2], [1, 3], [1, 4]], path_length=2)


def predicting(plan: Plan, iteration_s: float) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, iteration_s=iteration_s))


def test_a_case_keeps_its_microbatches_whatever_its_stages():
    standing = repair_plan(OWN, [0, 2, 3, 4])
    as_it_is, even = cases_to_search(standing, OWN)
    assert as_it_is is standing.case
    assert (as_it_is.stages, even.stages) == ((1, 3), (2, 2))
    assert (as_it_is.microbatches, even.microbatches) == ((6,), (3, 3))
    assert [node.forward_s for node in even.nodes] == [0.1] * 4
    assert cases_to_search(OWN, OWN) == [OWN.case]


def test_nodes_of_a_placement_have_the_numbers_of_the_run():
    # Node 2 is lost, and the node of the plan that was 3 in the run goes to stage 0.
    found = plan_of([[0, 2], [1, 3]], [[0, 1], [2, 3]], path_length=2)
    assert placement_of(found, [0, 1, 3, 4], OWN.stages) == ((0, 3), (1, 2, 4))


def test_a_plan_is_taken_if_it_saves_more_than_it_costs():
    standing, found = predicting(OWN, 1.0), predicting(OWN, 0.9)
    given: Any = {"host_of": [0, 0, 1, 1, 1], "state_bytes": [1e6, 1e6]}
    assert pays_off(found, standing, 0.03, iterations=1, **given), "nothing moves"
    assert not pays_off(found, standing, 0.2, iterations=1, **given)
    swapped = predicting(
        plan_of([[2, 1], [0, 3, 4]], [[1, 0], [1, 3], [1, 4], [2, 0], [2, 3], [2, 4]]), 0.9
    )
    _, bandwidth = OWN.case.link_matrices
    latency_s = OWN.case.link_matrices[0][0, 2]
    taking_s = migration_seconds(swapped, standing, **given)
    assert taking_s == pytest.approx(latency_s + 1e6 / bandwidth[0, 2])
    slow = given | {"state_bytes": [1e12, 1e12]}
    cost_s = migration_seconds(swapped, standing, **slow)
    enough = int(cost_s / 0.1) + 2
    assert pays_off(swapped, standing, 0.03, iterations=enough, **slow)
    assert not pays_off(swapped, standing, 0.03, iterations=enough - 3, **slow)


def test_nodes_count_as_quick_as_they_were_measured_to_be():
    busy_s = simulate_plan(OWN).busy_s
    slower = recalibrated(OWN, [busy * (3 if node == 4 else 1) for node, busy in enumerate(busy_s)])
    assert [node.forward_s for node in slower.case.nodes] == pytest.approx([0.1] * 4 + [0.3])
    iteration_s = simulate_plan(OWN).iteration_s
    assert slower.predicted.iteration_s > iteration_s
    assert simulate_plan(slower).busy_s[4] == pytest.approx(3 * busy_s[4])
    assert recalibrated(OWN, busy_s).predicted.iteration_s == pytest.approx(iteration_s)


def test_a_median_drifts_and_not_a_single_iteration():
    assert not has_drifted([1.0, 1.1, 9.0], 1.0, 0.2)
    assert has_drifted([1.0, 1.3, 1.3], 1.0, 0.2)
    assert has_drifted([0.5, 0.5, 9.0], 1.0, 0.2)


def test_a_node_computes_when_it_is_not_idle():
    lines = [
        metrics_of(1, seconds_per_iteration=2.0, idle_share=[0.5, 0.0]),
        metrics_of(2, seconds_per_iteration=4.0, idle_share=[0.5, 0.5]),
        metrics_of(3, seconds_per_iteration=4.0, idle_share=[0.75, 0.75]),
    ]
    assert busy_seconds(lines) == [1.0, 2.0]
    assert busy_seconds([*lines, metrics_of(4)]) is None
