"""The picture of the paths shows every visit, and leads from each to the next."""

import re
from itertools import pairwise
from xml.etree import ElementTree

from skippipe_sched.figures.paths import paths_picture
from skippipe_sched.problem.plan import Plan, Predicted
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import same_place

SVG = "{http://www.w3.org/2000/svg}"
STAGES = ((0, 1), (2,), (3, 4), (5,))
# In order, skipping two stages, with a swap, and a data node alone.
PATHS = ((0, 2, 4, 5), (1, 5), (0, 3, 2), (1,))


def example() -> Plan:
    case = same_place(
        [2, 1, 2, 1],
        microbatches_per_data_node=2,
        rules={"max_swaps": 1, "max_swap_distance": 1, "max_jump": 2},
    )
    order = simulate(case, STAGES, PATHS).order
    return Plan("example", STAGES, PATHS, order, Predicted(1.0, 1.0, 0.0, 1.0), case)


def test_lines_lead_from_each_visit_to_the_next():
    svg = ElementTree.fromstring(paths_picture(example()))
    columns = {}
    for microbatch, path in enumerate(PATHS):
        bars = [r for r in svg.findall(f"{SVG}rect") if r.get("class") == f"m{microbatch}"]
        assert len(bars) == len(path)
        stages = sorted(stage for stage, nodes in enumerate(STAGES) if {*nodes} & {*path})
        by_x = sorted(bars, key=lambda bar: float(bar.get("x", "")))
        of_stage = dict(zip(stages, by_x, strict=True))
        columns |= {stage: float(bar.get("x", "")) for stage, bar in of_stage.items()}
        (way,) = (g for g in svg.findall(f"{SVG}g") if g.get("class") == f"way m{microbatch}")
        lines = [line.get("d", "") for line in way.findall(f"{SVG}path")]
        visited = [next(s for s, nodes in enumerate(STAGES) if n in nodes) for n in path]
        for (source, target), line in zip(pairwise(visited), lines, strict=True):
            start_x, start_y, *_, end_x, end_y = map(
                float, re.findall(r"-?[\d.]+", line.split("M")[1].split("l")[0])
            )
            a, b = of_stage[source], of_stage[target]
            assert is_end(a, start_x, start_y, right=target > source)
            assert is_end(b, end_x, end_y, right=target < source)
    assert sorted(columns.values()) == [columns[stage] for stage in range(4)]


def is_end(bar: ElementTree.Element, x: float, y: float, *, right: bool) -> bool:
    left, top, width, height = (float(bar.get(k, "")) for k in ("x", "y", "width", "height"))
    return abs(x - left - width * right) < 0.02 and abs(y - top - height / 2) < 0.02


def test_the_boxes_of_nodes_hold_all_their_visits_and_nothing_else():
    svg = ElementTree.fromstring(paths_picture(example()))
    rects = svg.findall(f"{SVG}rect")
    nodes = [r for r in rects if r.get("class") == "node"]
    bars = [r for r in rects if (r.get("class") or "").startswith("m")]
    held = [
        sum(b.get("x") == n.get("x") and 0 < middle(b) - top(n) < height(n) for b in bars)
        for n in nodes
    ]
    in_order = [node for stage in STAGES for node in stage]
    assert held == [sum(node in path for path in PATHS) for node in in_order]
    texts = {text.text for text in svg.findall(f"{SVG}text")}
    assert {f"node {node} · here" for node in in_order} <= texts


def top(rect: ElementTree.Element) -> float:
    return float(rect.get("y", ""))


def height(rect: ElementTree.Element) -> float:
    return float(rect.get("height", ""))


def middle(rect: ElementTree.Element) -> float:
    return top(rect) + height(rect) / 2
