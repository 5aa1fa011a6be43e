"""The paper's figure of iteration time: its shares and correlations, its plans, its picture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.timing.simulate import simulate_plan

from experiments.paper import cases, iteration_time
from experiments.paper.iteration_time import Job, Scope, case_of, correlation, figures_of, gain
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
    assert overlapping_texts(figure) == []


@pytest.mark.nightly
def test_the_committed_picture_can_be_read():
    path = Path(iteration_time.__file__).parent / "results" / f"{iteration_time.NAME}.json"
    committed = json.loads(path.read_text(encoding="utf-8"))
    assert len(committed["runs"]) > 100
    assert overlapping_texts(iteration_time.draw(committed)) == []


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
    assert figures["correlation"]["cluster1"]["all"]["bytes"]["spearman"] is None
    assert figures["correlation"]["gcp20"]["all"]["bytes"]["spearman"] is not None
    assert figures["search"]["budgets"][0]["budget_s"] == 0.05


@pytest.mark.nightly
def test_the_shaped_network_is_the_committed_measurement(measured: tuple[dict[str, Any], Path]):
    figures, _ = measured
    measured_s = {row["method"]: row["measured_s"] for row in figures["shaped_network"]["methods"]}
    split = figures["gain"]["shaped network"]
    assert split["full_s"] == measured_s["full"]
    # There the same search for full paths found none that are quicker than DT-FM's.
    assert split["planning_first"]["planning_s"] < 0


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


def test_both_orders_share_out_the_whole_gain():
    split = gain({"full": 100.0, "full-joint": 80.0, "skippipe": 60.0, "joint": 45.0})
    assert split["of_full"] == 0.45
    assert split["planning_first"] == {
        "planning_s": 20.0,
        "skipping_s": 35.0,
        "planning_share": pytest.approx(20 / 55, abs=1e-4),
    }
    assert split["skipping_first"]["planning_s"] == 15.0
    assert split["skipping_first"]["skipping_s"] == 40.0


def row(seconds: float, size: float, length: int) -> dict[str, Any]:
    sizes = {"pipeline_bytes": size, "averaging_bytes": 1.0}
    return {"iteration_s": seconds, "path_length": length} | sizes


def test_correlation_with_and_without_full_paths():
    rows = [row(9.0, 90.0, 6), row(8.0, 80.0, 6), row(1.0, 3.0, 4), row(2.0, 2.0, 4)]
    found = correlation([*rows, row(3.0, 1.0, 4)])
    assert found["all"]["plans"] == 5
    assert found["all"]["bytes"]["spearman"] == pytest.approx(0.6)
    assert found["skipping"]["bytes"]["spearman"] == -1.0
    assert correlation([row(1.0, 1.0, 4)] * 3 + [row(2.0, 1.0, 6)])["all"]["bytes"] == {
        "spearman": None
    }


def test_in_the_datacentre_hops_cost_latency_and_bytes_alone():
    case = case_of(Job("datacentre", "joint", 0, 1.0, memory=6))
    assert case.forward_hop_s[0, 1] == pytest.approx(0.001 + 1 / 64)
    assert {node.memory for node in case.nodes} == {6}
    assert case_of(Job("gcp20", "joint", 0, 1.0)).source == cases.load("gcp20").source
