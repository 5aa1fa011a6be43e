"""The picture of the paths shows every visit, and leads from each to the next."""

import re
from itertools import pairwise

import pytest
from skippipe_sched.figures.paths import paths_picture

from tests.sched.examples import planned, same_place
from tests.sched.figures.pictures import Picture, number

STAGES = ((0, 1), (2,), (3, 4), (5,))
# In order, skipping two stages, with a swap, and a data node alone.
PATHS = ((0, 2, 4, 5), (1, 5), (0, 3, 2), (1,))


@pytest.fixture(scope="module")
def picture() -> Picture:
    rules = {"max_swaps": 1, "max_swap_distance": 1, "max_jump": 2}
    case = same_place([2, 1, 2, 1], microbatches_per_data_node=2, rules=rules)
    return Picture(paths_picture(planned(case, STAGES, PATHS)[0]))


def test_lines_lead_from_each_visit_to_the_next(picture):
    columns = {}
    for microbatch, path in enumerate(PATHS):
        bars = [r for r in picture.root.findall("rect") if r.get("class") == f"m{microbatch}"]
        assert len(bars) == len(path)
        stages = sorted(stage for stage, nodes in enumerate(STAGES) if {*nodes} & {*path})
        by_x = sorted(bars, key=lambda bar: number(bar, "x"))
        of_stage = dict(zip(stages, by_x, strict=True))
        columns |= {stage: number(bar, "x") for stage, bar in of_stage.items()}
        (way,) = (g for g in picture.root.findall("g") if g.get("class") == f"way m{microbatch}")
        lines = [line.get("d", "") for line in way.findall("path")]
        visited = [next(s for s, nodes in enumerate(STAGES) if n in nodes) for n in path]
        for (source, target), line in zip(pairwise(visited), lines, strict=True):
            start_x, start_y, *_, end_x, end_y = map(
                float, re.findall(r"-?[\d.]+", line.split("M")[1].split("l")[0])
            )
            assert is_end(of_stage[source], start_x, start_y, right=target > source)
            assert is_end(of_stage[target], end_x, end_y, right=target < source)
    assert sorted(columns.values()) == [columns[stage] for stage in range(4)]


def is_end(bar, x: float, y: float, *, right: bool) -> bool:
    left, top, width, height = (number(bar, name) for name in ("x", "y", "width", "height"))
    return abs(x - left - width * right) < 0.02 and abs(y - top - height / 2) < 0.02


def test_the_boxes_of_nodes_hold_all_their_visits_and_nothing_else(picture):
    rects = picture.root.findall("rect")
    bars = [r for r in rects if (r.get("class") or "").startswith("m")]

    def is_within(bar, box) -> bool:
        below = number(bar, "y") + number(bar, "height") / 2 - number(box, "y")
        return bar.get("x") == box.get("x") and 0 < below < number(box, "height")

    held = [sum(is_within(bar, box) for bar in bars) for box in rects if box.get("class") == "node"]
    nodes = [node for stage in STAGES for node in stage]
    assert held == [sum(node in path for path in PATHS) for node in nodes]
    assert {f"node {node} · here" for node in nodes} <= {*picture.texts}
