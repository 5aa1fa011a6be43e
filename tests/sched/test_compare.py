"""All methods side by side: each row holds what its own plan simulates to."""

import json
import signal
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
from skippipe_sched.compare import PlanningFailure, Row, compare, picture, row_of, table, to_json
from skippipe_sched.figures.flows import link_traffic
from skippipe_sched.methods import make_plan
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan

from tests.sched.examples import case_with, in_order
from tests.sched.figures.pictures import Picture, number, require_alone

SPREAD = {
    "nodes": 6,
    "locations": ["Iowa", "Belgium", "Taiwan"],
    "links": "gcp12",
    "activation_bytes": 2**25,
    "stage_bytes": 2**26,
    "stages": [2, 2, 2],
    "path_length": 2,
    "microbatches_per_data_node": 2,
}
METHODS = ("balanced", "full")


def search_of(method: str) -> Search:
    return Search({"balanced": 3, "full": 4}[method], 0.3, placement=in_order(SPREAD["stages"]))


@cache
def compared() -> tuple[Row, Row]:
    balanced, full = compare(case_with(**SPREAD), METHODS, search_of)
    assert isinstance(balanced, Row)
    assert isinstance(full, Row)
    return balanced, full


def test_a_row_holds_what_a_plan_simulates_to():
    plan = make_plan(case_with(**SPREAD), "balanced", search_of("balanced"))
    timeline = simulate_plan(plan)
    row = row_of(plan, timeline, 1.5)
    assert (row.method, row.search_s, row.ratio_to_full) == ("balanced", 1.5, None)
    assert row.iteration_s == timeline.iteration_s
    assert row.pipeline_s == timeline.pipeline_s
    assert row.averaging_s == timeline.averaging_s
    assert row.lower_bound_s == plan.predicted.lower_bound_s
    assert row.gap == pytest.approx(timeline.iteration_s / row.lower_bound_s - 1)
    computing_s = sum(run.end_s - run.start_s for run in timeline.runs)
    assert row.idle_share == pytest.approx(1 - computing_s / (6 * timeline.pipeline_s))
    location = [node.location for node in plan.case.nodes]
    far = [t for t in timeline.transfers if location[t.source] != location[t.target]]
    # The replicas of a stage lie in different locations here, and each of two sends it whole.
    assert all(location[a] != location[b] for a, b in plan.stages)
    assert row.wide_area_bytes == len(far) * 2**25 + 6 * 2**26
    busiest = max(link_traffic(plan, timeline), key=lambda flow: flow.busy_s)
    assert row.busiest_link_s == busiest.busy_s
    assert row.busiest_link == (
        f"node {busiest.source} ({location[busiest.source]}) → "
        f"node {busiest.target} ({location[busiest.target]})"
    )


def test_an_interrupt_ends_one_search_and_keeps_its_plan():
    interrupts = iter([signal.SIGINT])

    def interrupt_once(_: Search) -> None:
        for interrupt in interrupts:
            signal.raise_signal(interrupt)

    # Whoever starts the tests in the background lets them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    searches = {method: search_of(method) for method in METHODS}
    searches["full"].watch = interrupt_once
    rows = compare(case_with(**SPREAD), METHODS, lambda method: searches[method])
    assert all(isinstance(row, Row) for row in rows)
    assert searches["full"].end.interrupted
    assert not searches["balanced"].end.interrupted
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_methods_are_measured_against_full():
    balanced, full = compared()
    assert (balanced.method, full.method) == METHODS
    assert min(balanced.search_s, full.search_s) > 0
    assert full.ratio_to_full == 1
    assert balanced.ratio_to_full == balanced.iteration_s / full.iteration_s
    (alone,) = compare(case_with(**SPREAD), ["balanced"], search_of)
    assert isinstance(alone, Row)
    assert alone.ratio_to_full is None


def test_a_method_that_refuses_the_case_says_why_and_the_others_go_on():
    case = case_with(**SPREAD, rules={"max_jump": 0})
    refusal, full = compare(case, METHODS, search_of)
    assert isinstance(refusal, PlanningFailure)
    assert refusal.method == "balanced"
    assert refusal.reason.startswith("case.rules.max_jump = 0: ")
    assert isinstance(full, Row)


def test_one_node_has_no_links():
    case = case_with(nodes=1, locations=["here"], links=[], stages=[1], path_length=1)
    plan = make_plan(case, "full", Search(placement=((0,),)))
    row = row_of(plan, simulate_plan(plan), 0.0)
    assert row.busiest_link is None
    assert row.busiest_link_s == row.wide_area_bytes == row.idle_share == 0
    assert table([row]).splitlines()[1].endswith(" -")


def test_the_table_is_aligned_and_holds_the_figures():
    balanced, full = compared()
    refusal = PlanningFailure("joint", "case.memory = 0: must be at least 1. Write more.")
    head, *lines = table([balanced, refusal, full]).splitlines()
    assert lines[-1] == f"joint: {refusal.reason}"
    assert [line.split()[0] for line in lines] == ["balanced", "full", "joint:"]
    for text in (
        f"{full.iteration_s:.2f} s",
        "1.000",
        f"{full.gap:z.1%}",
        f"{full.idle_share:.0%}",
        full.busiest_link or "",
    ):
        assert text in lines[1]
    for heading in ("iteration", "pipeline", "averaging", "of full", "wide area", "search", "gap"):
        end = head.index(heading) + len(heading)
        assert all(line[end - 1] != " " and line[end] == " " for line in lines[:-1])


def test_json_is_json():
    balanced, _ = compared()
    refusal = PlanningFailure("joint", "no")
    rows = json.loads(json.dumps(to_json([balanced, refusal]), allow_nan=False))
    assert rows[0]["method"] == "balanced"
    assert rows[0]["iteration_s"] == balanced.iteration_s
    assert set(rows[0]) == set(Row.__annotations__) - {"late_s"}  # Nothing is, where all wait.
    assert rows[1] == {"method": "joint", "reason": "no"}


def test_bars_are_as_long_as_iterations_and_bounds_stand_in_their_rows():
    balanced, full = compared()
    # A row without averaging has no second part.
    third = replace(full, method="joint", iteration_s=full.pipeline_s, ratio_to_full=None)
    rows = [balanced, full, third]
    drawn = Picture(picture(rows, "<spread>"))
    assert drawn.texts[0].startswith("<spread>")
    scales = set()
    for row, (bar, tip) in zip(rows, drawn.marks("g"), strict=True):
        assert tip.startswith(f"{row.method}: iteration")
        parts = bar.findall("rect")
        assert [part.get("class") for part in parts] == ["pipeline", "rest"][: len(parts)]
        assert len(parts) == 1 + (row.iteration_s > row.pipeline_s)
        length = sum(number(part, "width") for part in parts)
        scales.add(round(length / row.iteration_s, 1))
        pipeline = number(parts[0], "width") / length
        assert pipeline == pytest.approx(row.pipeline_s / row.iteration_s, rel=1e-3)
        (bound,) = bar.findall("line")
        share = (number(bound, "x1") - number(parts[0], "x")) / length
        assert share == pytest.approx(row.lower_bound_s / row.iteration_s, rel=1e-2)
    assert len(scales) == 1
    for row in (balanced, full):
        assert any(f"{row.ratio_to_full:.3f} of full" in text for text in drawn.texts)


def test_a_refusal_stands_in_the_picture_within_the_paper():
    balanced, _ = compared()
    reason = "case.stages = " + "a long story, " * 30
    for rows in ([balanced, PlanningFailure("joint", reason)], [PlanningFailure("joint", reason)]):
        drawn = Picture(picture(rows, "spread"))
        (text,) = [t for t in drawn.root.iter("text") if t.get("class") == "refused"]
        assert reason.startswith((text.text or "").rstrip("…"))
        assert text.findtext("title") == reason
        assert number(text, "x") + 6.2 * len(text.text or "") <= drawn.width
        assert len(drawn.marks("g")) == len(rows) - 1


def test_figures_stay_within_the_paper():
    balanced, _ = compared()
    wide = replace(balanced, ratio_to_full=1.234, gap=12.345, iteration_s=1234.5, pipeline_s=1e3)
    svg = picture([wide], "spread")
    figures = next(t for t in Picture(svg).root.iter("text") if "of full" in (t.text or ""))
    assert number(figures, "x") + 6.2 * len(figures.text or "") <= 900
    require_alone(svg, 20_000)


# Averaging behind the iterations.


def test_rows_of_a_steady_state_say_whose_rings_are_late():
    rows = []
    for size in (2**20, 2**36):
        averaging = {"mode": "outer", "every": 4, "fragments": 2}
        case = case_with(**SPREAD | {"stage_bytes": size, "averaging": averaging})
        plan = make_plan(case, "balanced", search_of("balanced"))
        timeline = simulate_plan(plan)
        rows.append(row_of(plan, timeline, 1.0))
        assert rows[-1].iteration_s == timeline.iteration_s == plan.predicted.iteration_s
        assert rows[-1].late_s == timeline.late_s == plan.predicted.late_s
        assert rows[-1].gap >= 0
    in_time, late = rows
    assert (in_time.late_s, late.late_s > 0) == (0, True)
    assert [row["late_s"] for row in to_json(rows)] == [0, late.late_s]
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert lines[3] == f"balanced: a ring exceeds its delay by {late.late_s:.2f} s"
    ElementTree.fromstring(picture(rows, "spread"))
