"""The map shows everything that the links carry."""

import math
import random
import re
from collections import Counter
from functools import cache
from itertools import combinations, pairwise

import pytest
from skippipe_sched.figures.amounts import seconds_text, size_text
from skippipe_sched.figures.flows import flows_map
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.timeline import Timeline
from skippipe_sched.timing.traffic import link_name, link_traffic, location_traffic

from tests.sched.examples import case_with, in_order, planned, same_place
from tests.sched.figures.pictures import LOCATIONS, Picture, classes, number, require_alone


def spread(
    nodes: int, locations: list[str] = LOCATIONS, links: str | list[list] = "gcp12"
) -> tuple[Plan, Timeline]:
    """Stages of equal size, a microbatch for each data node and shift of its way through them."""
    size = math.isqrt(nodes)
    sizes = [size + nodes % size] + [size] * (nodes // size - 1)
    case = case_with(
        nodes=nodes,
        stages=sizes,
        path_length=len(sizes),
        locations=locations,
        links=links,
        activation_bytes=2**25,
        stage_bytes=2**28,
        microbatches_per_data_node=2,
    )
    stages = in_order(sizes)
    paths = [
        [node, *(group[(node + shift) % len(group)] for group in stages[1:])]
        for shift in range(2)
        for node in stages[0]
    ]
    return planned(case, stages, paths)


class _Map(Picture):
    """A map with arrows, discs and names."""

    def __init__(self, svg: str):
        super().__init__(svg)
        self.arrows = [group for group, _ in self.marks("g", "flow")]
        self.discs = [disc for disc, _ in self.marks("circle")]
        self.names = [text for text, _ in self.marks("text")]


def _centre(disc) -> tuple[float, float]:
    return number(disc, "cx"), number(disc, "cy")


@cache
def _drawn(nodes: int, places: int) -> tuple[Plan, Timeline, _Map]:
    if places <= len(LOCATIONS):
        plan, timeline = spread(nodes, LOCATIONS[:places])
    else:
        names = [f"place number {index}" for index in range(places)]
        links = [[a, b, 1 + (7 * i) % 50, 1] for i, (a, b) in enumerate(combinations(names, 2))]
        plan, timeline = spread(nodes, names, links)
    return plan, timeline, _Map(flows_map(plan, timeline))


SIZES = [(1, 1), (2, 2), (4, 1), (9, 3), (20, 12), (36, 20), (60, 12), (60, 60), (80, 12), (80, 70)]


@pytest.mark.parametrize(("nodes", "places"), SIZES)
def test_every_flow_is_an_arrow_as_wide_as_the_root_of_its_bytes(nodes, places):
    plan, timeline, drawn = _drawn(nodes, places)
    flows = link_traffic(plan, timeline) if nodes <= 60 else location_traffic(plan, timeline)
    flows = [flow for flow in flows if flow.source != flow.target]
    widths = {
        arrow.findtext("title", ""): number(path, "stroke-width")
        for arrow in drawn.arrows
        for path in arrow.findall("path")
    }
    expected = {
        f"{link_name(plan.case, flow)}: {flow.use}, {size_text(flow.bytes)}, "
        f"busy {seconds_text(flow.busy_s)}": flow
        for flow in flows
    }
    assert len(expected) == len(flows) == len(drawn.arrows)
    assert set(widths) == set(expected)
    most = max((flow.bytes for flow in flows), default=0)
    for tip, flow in expected.items():
        expected_width = max(0.5, max(widths.values()) * math.sqrt(flow.bytes / most))
        assert widths[tip] == pytest.approx(expected_width, abs=0.02)
    assert all(2 < max(widths.values()) <= 7 for _ in flows[:1])


@pytest.mark.parametrize(("nodes", "places"), SIZES)
def test_discs_and_names_lie_apart_and_within_the_paper(nodes, places):
    plan, _, drawn = _drawn(nodes, places)
    assert len(drawn.discs) == (nodes if nodes <= 60 else places)
    centres = [_centre(disc) for disc in drawn.discs]
    assert all(math.dist(a, b) >= 18 for a, b in combinations(centres, 2))
    names = [_corners(text) for text in drawn.names]
    assert len(names) == len({node.location for node in plan.case.nodes})
    for corners in names:
        assert all(0 <= x <= drawn.width and 0 <= y <= drawn.height for x, y in corners)
        assert all(math.dist(_nearest(corners, centre), centre) > 9 for centre in centres)
    assert not any(_overlap(a, b) for a, b in combinations(names, 2))


def _corners(text) -> list[tuple[float, float]]:
    """The corners of a text, at 6.2 pixels a letter and 9 from its baseline upwards."""
    x, y, turned = map(float, re.findall(r"-?[\d.]+", text.get("transform")))
    length = 6.2 * len(text.text)
    start = {"middle": -length / 2, "end": -length}.get(text.get("class"), 0.0)
    base = float(text.get("y"))
    cos, sin = math.cos(math.radians(turned)), math.sin(math.radians(turned))
    box = [(start, base), (start + length, base), (start + length, base - 9), (start, base - 9)]
    return [(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in box]


def _nearest(corners, point):
    """The point of a box's outline that is nearest to a point outside, by sampling."""
    outline = [
        (a[0] + (b[0] - a[0]) * step / 40, a[1] + (b[1] - a[1]) * step / 40)
        for a, b in pairwise([*corners, corners[0]])
        for step in range(40)
    ]
    return min(outline, key=lambda place: math.dist(place, point))


def _overlap(a, b) -> bool:
    """Whether two boxes overlap: none of their sides' directions tells them apart."""
    for (x0, y0), (x1, y1) in [(a[0], a[1]), (a[1], a[2]), (b[0], b[1]), (b[1], b[2])]:
        along = [[(x1 - x0) * x + (y1 - y0) * y for x, y in box] for box in (a, b)]
        if max(along[0]) <= min(along[1]) or max(along[1]) <= min(along[0]):
            return False
    return True


@pytest.mark.parametrize(("nodes", "places"), SIZES)
def test_the_busiest_links_are_numbered_and_listed(nodes, places):
    plan, timeline, drawn = _drawn(nodes, places)
    flows = link_traffic(plan, timeline) if nodes <= 60 else location_traffic(plan, timeline)
    busiest = [flow for flow in flows if flow.source != flow.target][:8]
    badges = [group for group in drawn.root.iter("g") if "badge" in classes(group)]
    numbers = Counter(group.findtext("text") for group in badges)
    assert numbers == {str(rank): 2 for rank in range(1, len(busiest) + 1)}
    assert len([a for a in drawn.arrows if "busiest" in classes(a)]) == len(busiest)
    for flow in busiest:
        figures = f"busy {seconds_text(flow.busy_s)} · {size_text(flow.bytes)} · {flow.use}"
        assert any(text.endswith(figures) for text in drawn.texts)
    on_the_map = [_centre(circle) for group in badges for circle in group.findall("circle")][
        : len(busiest)
    ]
    assert all(math.dist(a, b) >= 14 for a, b in combinations(on_the_map, 2))


def test_nodes_have_the_colour_of_their_stage_and_so_have_rings():
    plan, _, drawn = _drawn(20, 12)
    for disc in drawn.discs:
        node = int(re.findall(r"Node (\d+)", disc.findtext("title", ""))[0])
        assert f"s{plan.stage_of[node]}" in classes(disc)
    rings = [arrow for arrow in drawn.arrows if "averaging" in classes(arrow)]
    for arrow in rings:
        node = int(re.findall(r"node (\d+)", arrow.findtext("title", ""))[0])
        assert f"s{plan.stage_of[node]}" in classes(arrow)
    assert len(rings) == 20
    assert not any(
        re.search(r"\bs\d", arrow.get("class", "")) for arrow in drawn.arrows if arrow not in rings
    )


def test_no_link_that_carries_anything():
    plan, timeline = planned(same_place([1]), [[0]], [[0]])
    assert link_traffic(plan, timeline) == []
    assert "No link carries traffic" in _Map(flows_map(plan, timeline)).texts


def test_it_is_the_same_every_time_and_needs_no_other_file():
    plan, timeline, _ = _drawn(20, 12)
    svg = flows_map(plan, timeline)
    assert svg == flows_map(plan, timeline)
    require_alone(svg, 200_000)


def test_names_are_escaped_and_cut():
    location = "<A&B> a place with a name that nobody remembers"
    plan, timeline = spread(2, ["Iowa", location], [["Iowa", location, 10, 1]])
    svg = flows_map(plan, timeline)
    assert "<A&B>" not in svg
    drawn = _Map(svg)
    assert any(text.text == "<A&B> a place w…" for text in drawn.names)
    assert any(location in text.findtext("title", "") for text in drawn.names)


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_of_a_ring_of_places_are_neighbours_on_the_map(seed: int):
    # As far apart as places on a circle: then the shortest way round is that of the circle.
    places = 12
    around = list(range(places))
    random.Random(seed).shuffle(around)
    links = [
        [LOCATIONS[a], LOCATIONS[b], 1000 * math.sin(math.pi * ((a - b) % places) / places), 1]
        for a, b in combinations(around, 2)
    ]
    plan, timeline = spread(24, [LOCATIONS[a] for a in around], links)
    drawn = _Map(flows_map(plan, timeline))
    shown = [LOCATIONS.index(name.text or "") for name in drawn.names]
    steps = {(b - a) % places for a, b in pairwise([*shown, shown[0]])}
    assert steps in ({1}, {places - 1})
