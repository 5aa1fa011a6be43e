from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.serving.case import load_serving_case, parse_serving_case

from tests.sched.serving.cases import service

SERVICE = {
    "hosts": [
        {"location": "here", "room_bytes": 20, "step_s": 1},
        {"location": "there", "room_bytes": 30, "step_s": [1, 2, 3]},
    ],
    "links": [["here", "there", 100, 1], ["there", "here", 200, 2]],
    "stage_bytes": [10, 10, 20],
    "activation_bytes": 2**30,
    "groups": 2,
    "slots": 3,
}


def test_a_case_is_read_with_the_links_of_its_locations():
    case = parse_serving_case(SERVICE | {"head_s": "1min"})
    assert case.step_s.tolist() == [[1, 1, 1], [1, 2, 3]]
    assert (case.hosts, case.stages, case.groups, case.slots) == (2, 3, 2, 3)
    assert case.hop_s.tolist() == [[0, 0.1 + 1], [0.2 + 0.5, 0]]
    assert case.sending_s.tolist() == [[0, 1], [0.5, 0]]
    assert case.head_s == 60


def test_a_link_table_lies_beside_the_case(tmp_path: Path):
    (tmp_path / "links.csv").write_text(
        "location_a,location_b,latency_ms,bandwidth_Mbit_per_s\nhere,there,5,8\n"
    )
    (tmp_path / "case.yaml").write_text(str(SERVICE | {"links": "links.csv"}))
    case = load_serving_case(tmp_path / "case.yaml")
    assert case.latency_s[1, 0] == 0.005
    assert case.bandwidth[0, 1] == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hosts": []}, "case.hosts"),
        ({"hosts": [{"location": "here", "room_bytes": 20}]}, "case.hosts[0].step_s"),
        ({"hosts": [{"location": "here", "room_bytes": 5, "step_s": 1}]}, "case.room_bytes[0]"),
        (
            {"hosts": [{"location": "here", "room_bytes": 20, "step_s": [1, 2]}]},
            "case.hosts[0].step_s",
        ),
        (
            {"hosts": [{"location": "here", "room_bytes": 20, "step_s": [1, "fast", 1]}]},
            "case.hosts[0].step_s[1]",
        ),
        ({"links": []}, "case.links"),
        ({"stage_bytes": [10, 0, 10]}, "case.stage_bytes[1]"),
        ({"activation_bytes": -1}, "case.activation_bytes"),
        ({"groups": 0}, "case.groups"),
        ({"slots": 1.5}, "case.slots"),
        ({"speed": 1}, "case.speed"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(changes, field: str):
    with pytest.raises(InputError) as refused:
        parse_serving_case(SERVICE | changes)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step_s": np.ones(3)}, "case.step_s"),
        ({"step_s": np.ones((0, 3))}, "case.hosts"),
        ({"step_s": np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1.0]])}, "case.step_s[1][2]"),
        ({"room_bytes": np.ones(2)}, "case.room_bytes"),
        ({"room_bytes": np.array([0.5, 1, 1])}, "case.room_bytes[0]"),
        ({"latency_s": np.full((3, 3), np.nan)}, "case.latency_s[0][0]"),
        ({"bandwidth": np.zeros((3, 3))}, "case.bandwidth[0][0]"),
        ({"head_s": -1.0}, "case.head_s"),
    ],
)
def test_arrays_that_are_wrong_are_named(changes, field: str):
    with pytest.raises(InputError) as refused:
        service(**changes)
    assert refused.value.field == field
