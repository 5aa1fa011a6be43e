"""The paper's figure of iteration time: its shares and correlations, its plans, its picture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.timing.simulate import simulate_plan

from experiments.paper import cases, iteration_time
from experiments.paper.iteration_time import Job, Scope, case_of, figures_of
from experiments.paper.study_command import RESULTS
from tests.harness.pictures import overlapping_texts

TINY = Scope(
    cases=("cluster1", "gcp20"),
    seeds=1,
    budget_s=0.05,
    in_flight_cases=("datacentre",),
    in_flight=(3, 4),
    in_flight_seeds=1,
    budgets_s=(0.05, 0.1),
)
METHODS = 7
COMMITTED = RESULTS / f"{iteration_time.NAME}.json"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iteration_time, "QUICK", TINY)
        return iteration_time.measure(True, folder), folder / iteration_time.NAME


@pytest.mark.nightly
def test_what_was_planned_is_not_planned_again(measured: tuple[dict[str, Any], Path]):
    figures, folder = measured
    # Of the two limits in flight one is the paper's, and of the two budgets one that all have.
    assert len(figures["runs"]) == len([*folder.iterdir()]) == 2 * METHODS + 2 * 3 + 1
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iteration_time, "QUICK", TINY)
        assert iteration_time.measure(True, folder.parent) == figures
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.nightly
def test_the_figures_survive_json_and_are_drawn(measured: tuple[dict[str, Any], Path]):
    figures = json.loads(json.dumps(measured[0]))
    # Searches this short take what the machine happens to: on one spot, now and then.
    for row in figures["search"]["budgets"]:
        row["processor_s"] = 2 * row["budget_s"]
    figure = iteration_time.draw(figures)
    assert len(figure.axes) == 5
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    for drawn in (figure, iteration_time.draw(committed)):
        assert overlapping_texts(drawn) == []


def test_committed_figures_are_those_of_the_committed_plans():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    keys = Job.__dataclass_fields__
    row_of = {Job(**{key: row[key] for key in keys}): row for row in committed["runs"]}
    found = json.loads(json.dumps(iteration_time.figures_of_runs(iteration_time.FULL, row_of)))
    assert common(committed, found) == found


def common(old: Any, new: Any) -> Any:
    """Return the entries of older figures that newer ones have too; some are no longer written."""
    if isinstance(new, dict):
        return {key: common(old[key], value) for key, value in new.items()}
    return old


@pytest.mark.nightly
def test_medians_and_bounds_of_what_was_measured(measured: tuple[dict[str, Any], Path]):
    figures, _ = measured
    for own in figures["cases"].values():
        assert own["full"]["of_full"] == 1
        assert len(own) == METHODS
    for row in figures["runs"]:
        assert row["lower_bound_s"] <= row["iteration_s"] + 1e-3
        after = row["iteration_s"] - row["pipeline_s"]
        assert 0 <= after <= row["averaging_s"] + 1e-3
    assert figures["search"]["budgets"][0]["budget_s"] == 0.05


def test_the_published_plans_take_what_is_known():
    published = iteration_time._published()
    assert published["skippipe"]["iteration_s"] == pytest.approx(69.44, abs=0.01)
    assert published["skippipe"]["pipeline_s"] == pytest.approx(32.92, abs=0.01)
    assert published["full"]["pipeline_s"] == pytest.approx(105.26, abs=0.03)


def test_bytes_between_locations_are_those_of_every_hop():
    plan = cases.published_plan()
    figures = figures_of(plan, simulate_plan(plan))
    places = [node.location for node in plan.case.nodes]
    hops = 0
    for data_node, *others in plan.microbatches:
        way = [data_node, *others, data_node]
        hops += 2 * sum(places[a] != places[b] for a, b in pairwise(way))
    assert figures["pipeline_bytes"] == hops * 33554432
    most = sum(2 * (len(nodes) - 1) * 268468224 for nodes in plan.stages)
    assert 0 < figures["averaging_bytes"] <= most


def test_in_the_datacentre_hops_cost_latency_and_bytes_alone():
    case = case_of(Job("datacentre", "joint", 0, 1.0, memory=6))
    assert case.forward_hop_s[0, 1] == pytest.approx(0.001 + 1 / 64)
    assert {node.memory for node in case.nodes} == {6}
    assert case_of(Job("gcp20", "joint", 0, 1.0)).source == cases.load("gcp20").source
