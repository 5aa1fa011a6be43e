"""The picture of a timeline holds what the timeline holds, and nothing else."""

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from skippipe_sched.figures.gantt import gantt, gantt_series
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Plan, microbatch_chain, parse_plan
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline

from tests.sched.examples import PUBLISHED, planned
from tests.sched.figures.pictures import (
    LOCATIONS,
    Picture,
    classes,
    measured,
    number,
    require_alone,
)

BASE = {
    "locations": LOCATIONS,
    "links": "gcp12",
    "hop_overhead_s": 0.35,
    "activation_bytes": 33554432,
    "stage_bytes": 268468224,
    "forward_s": 0.44,
    "memory": 3,
    "rules": {"max_swaps": 2, "max_swap_distance": 1, "max_jump": 4},
}
NINE = {"nodes": 9, "stages": [3, 2, 2, 2], "path_length": 3, "microbatches_per_data_node": 4}
NINE_STAGES = [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
NINE_PATHS = [
    *([0, 3, 5], [1, 4, 6], [2, 4, 5], [0, 4, 7], [1, 3, 8], [2, 3, 7]),
    *([0, 6, 8], [1, 5, 7], [2, 6, 8], [0, 3, 6], [1, 3, 7], [2, 4, 8]),
]
TWENTY = {"nodes": 20, "stages": [5, *[3] * 5], "path_length": 4, "microbatches_per_data_node": 6}
ONE = {"nodes": 1, "stages": [1], "path_length": 1, "microbatches_per_data_node": 4}
ONE |= {"forward_s": 0.0004}
LATE = {
    "averaging": {"mode": "outer", "every": 4, "fragments": 2, "dtype": "float32"},
    "stage_bytes": 2**33,
}


def _planned(case_fields, stages, paths):
    return planned(parse_case(BASE | case_fields), stages, paths)


@cache
def _example(name) -> tuple[Plan, Timeline]:
    return {
        "nine": lambda: _planned(NINE, NINE_STAGES, NINE_PATHS),
        "free": lambda: _planned(NINE | {"contention": "none"}, NINE_STAGES, NINE_PATHS),
        "twenty": lambda: _planned(TWENTY, PUBLISHED.stages, PUBLISHED.microbatches),
        "one": lambda: _planned(ONE, [[0]], [[0]] * 4),
        # Of many iterations that follow one another; a ring takes longer than one, and is late.
        "steady": lambda: _planned(NINE | LATE, NINE_STAGES, NINE_PATHS),
    }[name]()


class _Gantt(Picture):
    """A picture whose bars and lines have times."""

    def __init__(self, svg):
        super().__init__(svg)
        lines = [*self.root.iter("line")]
        self.left = next(number(line, "x1") for line in lines if line.get("class") == "grid")
        self.right = max(number(line, "x1") for line in lines if line.get("class") == "marker")

    def times(self, element, timeline):
        """From and until when a bar or line says that something lasts [s]."""
        if element.tag == "rect":
            start = number(element, "x")
            end = start + number(element, "width")
        else:
            start, end = number(element, "x1"), number(element, "x2")
        scale = timeline.iteration_s / (self.right - self.left)
        return (start - self.left) * scale, (end - self.left) * scale

    def tolerance(self, timeline):
        """Seconds of two hundredths of a pixel, the rounding of a start and a width."""
        return 0.02 * timeline.iteration_s / (self.right - self.left)


def _drawn(name):
    plan, timeline = _example(name)
    return plan, timeline, _Gantt(gantt(plan, timeline))


@pytest.mark.parametrize("name", ["nine", "twenty", "one", "steady"])
def test_every_operation_has_one_bar_at_its_time(name):
    plan, timeline, picture = _drawn(name)
    pattern = re.compile(r"(\w+) of microbatch (\d+) on node (\d+) \(stage (\d+)\): ")
    drawn = {}
    for kind, word in (("F", "Forward"), ("L", "Loss"), ("B", "Backward")):
        for bar, tip in picture.marks("rect", kind):
            found = pattern.match(tip)
            assert found is not None
            assert found[1] == word
            microbatch, node, stage = map(int, found.groups()[1:])
            assert stage == plan.stage_of[node]
            assert f"m{microbatch}" in classes(bar)
            assert (kind, microbatch, node) not in drawn
            drawn[kind, microbatch, node] = picture.times(bar, timeline)
    expected = {run.operation: (run.start_s, run.end_s) for run in timeline.runs}
    assert set(drawn) == set(expected)
    if name == "nine":
        run = next(run for run in timeline.runs if run.operation == ("B", 3, 7))
        told = f"Backward of microbatch 3 on node 7 (stage 3): {run.start_s:.2f}\N{EN DASH}"
        assert f"{told}{run.end_s:.2f} s" in [tip for _, tip in picture.marks("rect", "B")]
    for operation, times in expected.items():
        assert drawn[operation] == pytest.approx(times, abs=picture.tolerance(timeline))
        assert 0 <= drawn[operation][0] < drawn[operation][1] <= timeline.end_s * 1.0001


def test_bars_of_a_node_lie_in_its_row_and_rows_of_a_stage_together():
    plan, _, picture = _drawn("twenty")
    rows = {}
    for node in range(20):
        ys = {
            number(bar, "y")
            for kind in "FLB"
            for bar, tip in picture.marks("rect", kind)
            if f"on node {node} " in tip
        }
        assert len(ys) == 1
        rows[node] = ys.pop()
    drawn = sorted(rows, key=rows.__getitem__)
    assert drawn == [node for nodes in plan.stages for node in nodes]
    labels = [text for text in picture.texts if text.startswith("node ") and "·" in text]
    expected = [f"node {node} · {LOCATIONS[node % 12]}" for node in drawn]
    assert all(map(str.startswith, labels, expected))
    assert len(labels) == len(expected)
    assert [text for text in picture.texts if text.startswith("Stage")] == [
        "Stage 0 · data",
        *(f"Stage {stage}" for stage in range(1, 6)),
    ]


def _expected_waits(plan, timeline):
    """From the definition: per node, from when and until when it waited for the network."""
    runs = {run.operation: run for run in timeline.runs}
    sources = {}
    for microbatch, path in enumerate(plan.microbatches):
        for before, after in pairwise(microbatch_chain(microbatch, path)):
            if before.node != after.node:
                sources[after] = before
    waits = defaultdict(list)
    for node, operations in enumerate(plan.order):
        free_s = timeline.free_s[node] if timeline.free_s else 0.0
        for operation in operations:
            run = runs[operation]
            if operation in sources and run.arrived_s > free_s:
                ready_s = runs[sources[operation]].end_s
                waits[node].append((max(free_s, ready_s), run.arrived_s))
            free_s = run.end_s
    return waits


@pytest.mark.parametrize("name", ["nine", "twenty", "one", "steady"])
def test_every_wait_for_the_network_is_drawn(name):
    plan, timeline, picture = _drawn(name)
    drawn = defaultdict(list)
    for bar, tip in picture.marks("rect", "wait"):
        found = re.match(r"Node (\d+) waits for microbatch", tip)
        assert found is not None
        drawn[int(found[1])].append(picture.times(bar, timeline))
    expected = _expected_waits(plan, timeline)
    assert sum(map(len, drawn.values())) == sum(map(len, expected.values()))
    for node, waits in expected.items():
        for times, wait in zip(sorted(drawn[node]), sorted(waits), strict=True):
            assert times == pytest.approx(wait, abs=picture.tolerance(timeline))


@pytest.mark.parametrize("name", ["nine", "twenty", "free"])
def test_every_transfer_is_a_line_of_its_own(name):
    """And so is its wait for the link, where links have contention."""
    _, timeline, picture = _drawn(name)
    lines = picture.marks("line", "transfer")
    queued = picture.marks("line", "queued")
    assert len(lines) == len(timeline.transfers)
    held_back = [t for t in timeline.transfers if t.start_s > t.ready_s]
    assert bool(held_back) == (name != "free")
    assert len(queued) == len(held_back)
    tolerance = picture.tolerance(timeline)
    drawn = sorted(picture.times(line, timeline) for line, _ in lines)
    for times, transfer in zip(
        drawn, sorted((t.start_s, t.end_s) for t in timeline.transfers), strict=True
    ):
        assert times == pytest.approx(transfer, abs=tolerance)
    lanes = defaultdict(list)
    for line, _ in lines + queued:
        lanes[line.get("y1")].append(picture.times(line, timeline))
    for spans in lanes.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start + tolerance


def test_averaging_spans_the_rows_of_its_stage():
    _, timeline, picture = _drawn("nine")
    bars = picture.marks("rect", "averaging")
    assert len(bars) == 4
    for bar, tip in bars:
        stage = int(tip.split("stage ")[1].split(":")[0])
        averaging = next(a for a in timeline.averagings if a.stage == stage)
        assert picture.times(bar, timeline) == pytest.approx(
            (averaging.start_s, averaging.end_s), abs=picture.tolerance(timeline)
        )
        top, height = number(bar, "y"), number(bar, "height")
        for operation, tip in picture.marks("rect", "B"):
            y = number(operation, "y")
            assert (top <= y <= top + height) == (f"(stage {stage})" in tip)


def test_title_line_and_ends():
    plan, timeline, picture = _drawn("nine")
    iteration, pipeline = f"{timeline.iteration_s:.2f} s", f"{timeline.pipeline_s:.2f} s"
    bound = f"{plan.predicted.lower_bound_s:.2f} s"
    figures = f"iteration {iteration} · pipeline {pipeline} · lower bound {bound}"
    assert picture.texts[0] == f"example{figures}"
    assert f"end of pipeline {pipeline}" in picture.texts
    assert f"end of iteration {iteration}" in picture.texts
    assert Picture(gantt(plan, timeline, "measured")).texts[0] == f"measured{figures}"


def test_short_times_keep_their_digits():
    _, timeline, picture = _drawn("one")
    assert timeline.iteration_s == pytest.approx(0.0044)
    assert "end of iteration 0.00440 s" in picture.texts
    assert "0.0005" in picture.texts
    assert not picture.marks("rect", "averaging")  # One replica.


def test_a_measured_timeline_needs_no_transfers():
    plan, predicted = _example("nine")
    picture = Picture(gantt(plan, measured(predicted, 3.0), "measured"))
    assert f"end of iteration {3 * predicted.iteration_s:.2f} s" in picture.texts
    assert not picture.marks("rect", "wait")
    assert len(picture.marks("rect", "B")) == 36


def test_a_series_is_drawn_on_one_scale_of_time():
    plan, predicted = _example("nine")
    slower = measured(predicted, 2.0)
    picture = Picture(gantt_series(plan, {"predicted": predicted, "step 8": slower}))
    assert [text for text in picture.texts if text.startswith(("predicted", "step 8"))] == [
        f"{title}iteration {timeline.iteration_s:.2f} s · pipeline {timeline.pipeline_s:.2f} s · "
        f"lower bound {plan.predicted.lower_bound_s:.2f} s"
        for title, timeline in (("predicted", predicted), ("step 8", slower))
    ]
    above, below = [group for group in picture.root if group.tag == "g"]
    widths = []
    for group in (above, below):
        bars = [bar for bar in group.iter("rect") if bar.get("class") == "B m3"]
        widths.append(
            [float(bar.get("width", "")) for bar in bars if bar.find("title") is not None]
        )
    assert widths[1] == pytest.approx([2 * width for width in widths[0]], abs=0.02)
    # They stand below one another, and the picture is as high as both.
    assert above.get("transform") == "translate(0 0)"
    assert below.get("transform") == f"translate(0 {picture.height / 2:g})"
    assert picture.height == 2 * Picture(gantt(plan, predicted)).height


def test_an_end_far_to_the_left_is_named_on_the_paper():
    plan, predicted = _example("one")
    both = {"predicted": measured(predicted, 0.01), "step 8": predicted}
    picture = _Gantt(gantt_series(plan, both))
    early, late = [
        text for text in picture.root.iter("text") if "end of iteration" in (text.text or "")
    ]
    assert (early.get("class"), late.get("class")) == (None, "end")
    assert float(early.get("x", "")) > picture.left


def test_names_are_escaped_and_cut():
    location = "<A&B> a data centre with a name that nobody remembers"
    plan, timeline = _planned(ONE | {"locations": [location]}, [[0]], [[0]] * 4)
    svg = gantt(replace(plan, method="</text>"), timeline)
    assert "<A&B>" not in svg
    picture = Picture(svg)
    assert picture.texts[0].startswith("</text>")
    label = next(text for text in picture.root.iter("text") if "node 0" in (text.text or ""))
    assert label.text == "node 0 · <A&B> a data c…"
    assert location in label.findtext("title", "")


def test_the_same_plan_gives_the_same_picture_which_needs_no_other_file():
    plan, timeline = _example("nine")
    again = parse_plan(plan.to_json())
    assert gantt(plan, timeline) == gantt(again, simulate_plan(again))
    require_alone(gantt(*_example("twenty")), 300_000, "#gantt-wait")


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_differ_and_numbers_can_be_read_on_them():
    svg = gantt(*_example("twenty"))
    forward = re.findall(r"\.F\.m\d+{fill:(#\w{6})}", svg)
    backward = re.findall(r"\.B\.m\d+{fill:(#\w{6})}", svg)
    assert len(set(forward)) == len(set(backward)) == 30
    number = _luminance("#10141a") + 0.05
    assert min((_luminance(colour) + 0.05) / number for colour in forward) > 4.5
    assert min(1.05 / (_luminance(colour) + 0.05) for colour in backward) > 4.5


def test_of_many_iterations_one_is_drawn_with_the_rings_behind_it():
    plan, timeline, picture = _drawn("steady")
    assert timeline.late_s > 0
    assert max(timeline.free_s) > 0
    bars = picture.marks("rect", "averaging")
    drawn = sorted(picture.times(bar, timeline) for bar, _ in bars)
    for times, own in zip(drawn, timeline.averagings, strict=True):
        assert times == pytest.approx((own.start_s, own.end_s), abs=2 * picture.tolerance(timeline))
    names = [bar.get("class", "") for bar, _ in picture.marks("rect")]
    last_ring = max(place for place, name in enumerate(names) if name == "averaging")
    assert last_ring < min(place for place, name in enumerate(names) if name[:1] in "FLB")
    assert picture.texts[0].endswith(
        f"lower bound {plan.predicted.lower_bound_s:.2f} s · rings late by {timeline.late_s:.2f} s"
    )
    assert f"next iteration {timeline.iteration_s:.2f} s" in picture.texts
    assert not [text for text in picture.texts if text.startswith("end of")]
