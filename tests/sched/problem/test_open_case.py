"""Cases with something left to choose: what they may become, and which of these is taken."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.methods import make_plan, plan_best, planning
from skippipe_sched.problem.case import load_case, parse_case
from skippipe_sched.problem.links import COLUMNS
from skippipe_sched.problem.open_case import MOST_CANDIDATES, candidates, load_cases
from skippipe_sched.problem.plan import parse_plan
from skippipe_sched.search.budget import Search

from tests.harness.messages import refusal
from tests.sched.examples import PAPER, same_place

PAPER_SOURCE = dict(load_case(Path(PAPER)).source)


def open_case(nodes: int, **changes: Any) -> dict[str, Any]:
    """Sizes for three stages on nodes of one place, and six microbatches, unless changed."""
    source = dict(same_place([nodes]).source) | {"stages": "auto", "stage_count": 3}
    source |= {"path_length": 2, "microbatches": 6} | changes
    if "microbatches_per_data_node" not in changes:
        del source["microbatches_per_data_node"]
    return {key: value for key, value in source.items() if value is not ...}


def test_a_case_that_leaves_nothing_open_is_its_own_only_candidate():
    (case,) = load_cases(Path(PAPER))
    assert case.source == load_case(Path(PAPER)).source


def test_the_paper_chose_the_balanced_sizes():
    first, *others = candidates(PAPER_SOURCE | {"stages": "auto", "stage_count": 6})
    assert first.stages == (5, 3, 3, 3, 3, 3)
    assert first.source == PAPER_SOURCE
    # One replica moved: into the data stage, out of it, or between two of the equal inner ones.
    assert {(c.stages[0], *sorted(c.stages[1:])) for c in others} == {
        (6, 2, 3, 3, 3, 3),
        (4, 3, 3, 3, 3, 4),
        (5, 2, 3, 3, 3, 4),
    }


@st.composite
def open_cases(draw: st.DrawFn, most_nodes: int = 40):
    stage_count = draw(st.integers(1, 4))
    given = open_case(
        draw(st.integers(stage_count, most_nodes)),
        stage_count=stage_count,
        stage_cost=draw(st.lists(st.integers(1, 4), min_size=stage_count, max_size=stage_count)),
    )
    given["path_length"] = draw(st.sampled_from(["auto", 1, stage_count]))
    if stage_count > 1:
        given["microbatches"] = draw(st.integers(1, 20))
    else:
        given["microbatches"] = 40
    return given


@given(open_cases())
def test_every_candidate_is_a_whole_case_with_the_same_work(given):
    found = candidates(given)
    assert 1 <= len(found) <= MOST_CANDIDATES
    assert len({(case.stages, case.path_length) for case in found}) == len(found)
    stage_count = given["stage_count"]
    for case in found:
        assert len(case.stages) == stage_count
        assert sum(case.stages) == len(case.nodes) == given["nodes"]
        assert sum(case.microbatches) == given["microbatches"]
        if given["path_length"] == "auto":
            assert stage_count / 2 <= case.path_length <= stage_count
        again = parse_case(json.loads(json.dumps(dict(case.source))))
        assert (again.stages, again.path_length) == (case.stages, case.path_length)
        assert again.source == case.source


@given(open_cases(most_nodes=10))
def test_no_sizes_give_the_busiest_stage_less_to_do_than_the_first_candidate(given):
    case = candidates(given)[0]
    stages = len(case.stages)
    inner_visits = (case.path_length - 1) / max(1, stages - 1)
    passes = [1 + case.backward_ratio + case.loss_ratio]
    passes += [inner_visits * (1 + case.backward_ratio)] * (stages - 1)

    def busiest(sizes):
        work = zip(passes, case.stage_cost, sizes, strict=True)
        return max(passed * cost / size for passed, cost, size in work)

    others = [
        sizes
        for sizes in product(range(1, given["nodes"] + 1), repeat=stages)
        if sum(sizes) == given["nodes"] and sizes[0] <= given["microbatches"]
    ]
    assert busiest(case.stages) == pytest.approx(min(map(busiest, others)))


@pytest.mark.parametrize(
    ("ratio", "lengths"),
    [
        (..., {3, 4, 5, 6}),
        ([0, 0], {6}),
        ([0.33, 0.33], {4}),
        ([0.3, 0.67], {2, 3, 4}),
        ([0.8, 1], {1}),
    ],
)
def test_path_lengths_follow_the_skip_ratio(ratio, lengths):
    given = PAPER_SOURCE | {"path_length": "auto", "skip_ratio": ratio}
    if ratio is ...:
        del given["skip_ratio"]
    found = candidates(given)
    assert {case.path_length for case in found} == lengths
    assert {case.stages for case in found} == {(5, 3, 3, 3, 3, 3)}
    assert not {"skip_ratio", "stage_count"} & found[0].source.keys()


def test_a_thousand_nodes_have_candidates_that_differ_noticeably():
    given = PAPER_SOURCE | {"nodes": 1000, "stages": "auto", "stage_count": 6}
    first, *others = candidates(given)
    assert sum(first.stages) == 1000
    assert all(abs(other.stages[0] - first.stages[0]) != 1 for other in others)


def test_a_link_table_beside_the_case_is_in_every_candidate(tmp_path):
    rows = [",".join(COLUMNS), "here,there,10,1"]
    (tmp_path / "mine.csv").write_text("\n".join(rows), encoding="utf-8")
    given = open_case(6, locations=["here", "there"], links="mine.csv")
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    for case in load_cases(tmp_path / "case.yaml"):
        assert case.source["links"] == [["here", "there", 10, 1]]


# Choosing.


def test_the_case_whose_quick_plan_is_quickest_is_chosen_and_its_plan_loads():
    cases = candidates(open_case(7, path_length="auto", skip_ratio=[0, 0.4]))
    judged = [make_plan(case, "balanced").predicted.iteration_s for case in cases]
    plan = plan_best(cases, "balanced", Search())
    assert plan.predicted.iteration_s == min(judged) < max(judged)
    assert parse_plan(json.loads(json.dumps(plan.to_json()))).case.source == plan.case.source


def test_cases_with_more_microbatches_may_take_longer(monkeypatch):
    """With a number per data node, more data nodes do more work in an iteration."""
    small = same_place([1, 2], microbatches_per_data_node=6)
    large = same_place([2, 1], microbatches_per_data_node=6)
    for large_s, chosen in ((19.0, large), (21.0, small), (20.0, small)):
        seconds = {small: 10.0, large: large_s}
        quick = {case: SimpleNamespace(predicted=SimpleNamespace(iteration_s=s), case=case)
                 for case, s in seconds.items()}  # fmt: skip
        monkeypatch.setattr(planning, "make_plan", lambda case, *_, quick=quick: quick[case])
        assert plan_best([small, large], "joint", Search()).case is chosen


def test_a_refused_case_is_not_chosen_and_the_first_refusal_tells_why_none_is():
    rules = {"max_jump": 0}
    cases = candidates(open_case(6, path_length="auto", skip_ratio=[0, 0.4], rules=rules))
    assert {case.path_length for case in cases} == {2, 3}
    assert plan_best(cases, "balanced", Search()).case.path_length == 3
    with refusal("case.rules.max_jump = 0: no paths"):
        plan_best([case for case in cases if case.path_length == 2], "balanced", Search())


# What is wrong.


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stage_count": 7}, "stage_count = 7...only 5 nodes...Write 5 or less, or add 2"),
        ({"stage_count": ...}, "stage_count = None: is missing...Add stage_count:"),
        ({"stage_count": 0}, "stage_count = 0...at least 1...Write 1"),
        ({"stages": [2, 3]}, "stage_count = 3: unknown key...Remove it"),
        ({"skip_ratio": [0, 0.5]}, "skip_ratio = [0, 0.5]: unknown key...Remove it"),
        ({"path_length": 4}, "path_length = 4...only 3 stages...Write 3 or less"),
        ({"path_length": ...}, "path_length = None: is missing...Add path_length:"),
        ({"memory": ...}, "memory = None: is missing...Add memory:"),
        ({"stage_bytes": [1, 2]}, "stage_bytes = [1, 2]...2 entries for 3 stages...one number"),
        (
            {"microbatches": ..., "microbatches_per_data_node": [1, 1]},
            "microbatches_per_data_node = [1, 1]...stages: auto leaves...open...Write one number",
        ),
        (
            {"stage_count": 1, "path_length": 1, "microbatches": 3},
            "microbatches = 3...5 data nodes...Write 5",
        ),
        (
            {"path_length": "auto", "skip_ratio": [0.4, 0.6]},
            "skip_ratio = [0.4, 0.6]: no path...Write [0.33, 0.6], which allows paths of 2 stages",
        ),
        *(
            ({"path_length": "auto", "skip_ratio": ratio}, f"skip_ratio{told}")
            for ratio, told in (
                ([0, 50], " = [0, 50]...share...from 0 to 1"),
                ([0.5], " = [0.5]...share...two numbers"),
                (0.5, " = 0.5...list...Write [first"),
                ([-1, 1], "[0] = -1...at least...0"),
            )
        ),
    ],
)
def test_a_case_without_a_choice_is_refused(change, told):
    with refusal(f"case.{told}"):
        candidates(open_case(5, **change))
