"""Nodes divided among lanes of experts: who is where, what a part is, and when the last is done."""

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.division.lanes import Lane, LaneTraining
from skippipe_sched.division.parts import LaneCut, Whole
from skippipe_sched.division.picture import picture, table
from skippipe_sched.division.search import divide
from skippipe_sched.errors import InputError
from skippipe_sched.problem.rules import require_rules
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.simulate import simulate_plan

CASE: dict[str, Any] = {
    "nodes": 10,
    "locations": ["Iowa", "Belgium", "Taiwan", "Oregon"],
    "links": "gcp12",
    "activation_bytes": 2**22,
    "stage_bytes": [2**24, 2**23, 2**23, 2**23],
    "stage_cost": [1.5, 1, 1, 1],
    "hop_overhead_s": 0.1,
    "forward_s": 0.4,
    "stages": [3, 3, 2, 2],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 4,
    "rules": {"max_swaps": 2, "max_swap_distance": 1, "max_jump": 2},
}
# With as few steps as this, the clock ends no search.
BUDGET_S = 0.2


def lane(name: str, steps: int, size: float = 1.0) -> Lane:
    return Lane(
        name, (LaneTraining(f"{name}-1", steps, size, size), LaneTraining(f"{name}-2", steps))
    )


LANES = (lane("easy", 30, 0.8), lane("hard", 60, 1.2))


def searched(lanes=LANES, case=CASE, budget_s=BUDGET_S):
    return divide(case, lanes, Search(0, budget_s, timed=False))


@pytest.fixture(scope="module")
def found():
    return searched()


def counts_of(division) -> list[int]:
    return [len(part.nodes) for part in division.parts]


@settings(max_examples=4)
@given(
    steps=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    speeds=st.lists(st.sampled_from([0.3, 0.4, 0.8]), min_size=10, max_size=10),
    contention=st.sampled_from(["none", "link"]),
)
def test_every_node_is_in_one_place_and_every_plan_keeps_its_rules(steps, speeds, contention):
    nodes = [{"forward_s": speed} for speed in speeds]
    lanes = [lane(f"lane {number}", count) for number, count in enumerate(steps)]
    found = searched(lanes, CASE | {"nodes": nodes, "contention": contention})
    assert sorted(node for part in found.parts for node in part.nodes) == list(range(10))
    for own, part in zip(lanes, found.parts, strict=True):
        assert part.lane == own
        for plan, seconds in zip(part.plans, part.iteration_s, strict=True):
            require_rules(plan)
            assert seconds == simulate_plan(plan).iteration_s == plan.predicted.iteration_s
            assert sum(plan.case.microbatches) == 6
        ends = [one.steps * s for one, s in zip(own.trainings, part.iteration_s, strict=True)]
        assert part.seconds == pytest.approx(sum(ends))
    assert found.seconds == max(part.seconds for part in found.parts)


def test_the_same_seed_and_budget_give_the_same(found):
    again = searched()
    assert found.to_json() == again.to_json()
    assert [plan.to_json() for part in found.parts for plan in part.plans] == [
        plan.to_json() for part in again.parts for plan in part.plans
    ]


def test_in_one_place_nodes_go_where_the_work_is():
    """Where all links are alike and quick, a lane of four times the work gets more nodes."""
    near = CASE | {"locations": ["Iowa"], "hop_overhead_s": 0, "stage_bytes": 0, "memory": 8}
    near |= {"stage_cost": 1, "microbatches_per_data_node": 4}
    lanes = (lane("much", 40), lane("little", 10))
    much, little = counts_of(searched(lanes, near))
    assert much > little


def test_lanes_are_divided_in_any_order_also_with_as_few_nodes_as_they_need():
    few = CASE | {"nodes": 8, "stages": [2, 2, 2, 2], "memory": 1}
    assert counts_of(searched(LANES[::-1], few)) == [4, 4]


def test_a_part_has_the_links_between_its_nodes():
    whole = Whole(CASE)
    nodes = [1, 2, 4, 7, 9]
    part = whole.part(nodes, LaneCut(1, (2, 1, 1, 1), 2), LaneTraining("any", 1))
    for mine, theirs in zip(part.link_matrices, whole.case.link_matrices, strict=True):
        assert (mine == theirs[nodes][:, nodes]).all()
    assert (part.forward_hop_s == whole.case.forward_hop_s[nodes][:, nodes]).all()
    assert part.rules == whole.case.rules
    assert part.microbatches == (3, 3)


@pytest.mark.parametrize("merged", [1, 2])
def test_fewer_stages_hold_the_whole_model(merged):
    whole = Whole(CASE)
    assert whole.merges == (1, 2)
    sizes = (2,) + (1,) * (4 // merged - 1)
    cut = LaneCut(merged, sizes, 2 // merged)
    part = whole.part(range(cut.nodes), cut, LaneTraining("large", 1, 1.25, 1.5))

    def seconds(case):
        return sum(case.duration("F", 0, stage) for stage in range(len(case.stages)))

    assert seconds(part) == pytest.approx(1.25 * seconds(whole.case))
    assert sum(part.stage_bytes) == pytest.approx(1.5 * sum(whole.case.stage_bytes))
    skipped = 1 - whole.case.path_length / len(whole.case.stages)
    assert 1 - part.path_length / len(part.stages) == skipped
    assert {node.memory for node in part.nodes} == {4 // merged}
    # A swap of merged stages would be one of two, over more of the model than the rules allow.
    assert part.rules.max_swaps == (2 if merged == 1 else 0)
    assert part.rules.max_jump == 2 // merged


def test_stages_are_not_merged_beyond_what_a_node_holds():
    assert Whole(CASE | {"memory": 1}).merges == (1,)
    assert Whole(CASE | {"path_length": 3}).merges == (1,)
    assert Whole(CASE | {"path_length": 4}).merges == (1, 2, 4)
    state_bytes = 4 * 3 * 2**23
    assert Whole(CASE | {"memory_bytes": state_bytes}).merges == (1, 2)
    assert Whole(CASE | {"memory_bytes": state_bytes - 1}).merges == (1,)


def test_a_case_that_leaves_its_sizes_open_is_divided_too():
    given_case = {key: value for key, value in CASE.items() if key != "microbatches_per_data_node"}
    given_case |= {"stages": "auto", "stage_count": 4, "microbatches": 6}
    given_case |= {"path_length": "auto", "skip_ratio": [0.5, 0.5]}
    found = searched(case=given_case)
    for part in found.parts:
        assert len(part.plans[0].stages) == 2 * part.plans[0].case.path_length


REFUSED = {
    "no lanes": ({}, (), "lanes = (): must have at least 1 entries"),
    "no experts": ({}, (Lane("one", ()),), "lanes[0].trainings"),
    "no steps": ({}, (lane("one", 0),), "lanes[0].trainings[0].steps = 0"),
    "no size": ({}, (lane("one", 1, 0.0),), "lanes[0].trainings[0].compute = 0.0"),
    "one name twice": ({}, (lane("one", 1), lane("one", 2)), "lanes[1].name"),
    "too few nodes": (
        {"memory": 1},
        (*LANES, lane("another", 1)),
        "case.nodes = 10: 3 parallel lanes need at least 4 nodes each. Add 2 nodes",
    ),
    "an unknown key": ({"nods": 3}, LANES, "case.nods"),
    "stages left out": ({"left_out": [1]}, LANES, "case.left_out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_in_a_line(name):
    changes, lanes, message = REFUSED[name]
    with pytest.raises(InputError) as refusal:
        divide(CASE | changes, lanes, Search(0, BUDGET_S))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_table_and_picture_tell_of_every_lane(found):
    lines = table(found).splitlines()
    assert [line.split()[0] for line in lines] == ["lane", "easy", "hard"]
    drawn = ElementTree.fromstring(picture(found, "case"))
    classes = [element.get("class", "") for element in drawn.iter()]
    assert sum(name.startswith("expert-") for name in classes) == 2 * len(LANES)
