"""The trace tells the same times as the timeline, in the form that trace viewers read."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from skippipe_sched.figures.trace import chrome_trace
from skippipe_sched.problem.plan import Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring
from skippipe_sched.timing.jitter import draw_time_factors
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline

from tests.sched.examples import case_with, outer, planned, routed_cases, same_place
from tests.sched.figures.pictures import measured

# Half a nanosecond each for a start and an end, in microseconds.
ROUNDING_US = 1.01e-3


class _Trace:
    """What a viewer finds in the JSON."""

    def __init__(self, plan: Plan, timeline: Timeline, measured: Timeline | None = None):
        # NaN and infinity would be no JSON.
        whole = chrome_trace(plan, timeline, measured)
        self.whole = json.loads(json.dumps(whole, allow_nan=False))
        self.events = self.whole["traceEvents"]
        self.threads = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in self.events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }

    def slices(self, *categories):
        return [e for e in self.events if e["ph"] == "X" and e["cat"] in categories]

    def processes(self) -> dict[int, str]:
        names = [e for e in self.events if e["ph"] == "M" and e["name"] == "process_name"]
        return {event["pid"]: event["args"]["name"] for event in names}

    def thread(self, event) -> str:
        return self.threads[event["pid"], event["tid"]]


def _span(event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _microseconds(start_s, end_s):
    return pytest.approx((1e6 * start_s, 1e6 * end_s), abs=ROUNDING_US, rel=1e-12)


@given(routed_cases())
def test_every_operation_transfer_and_averaging_is_a_slice_at_its_time(routed):
    plan, timeline = planned(*routed)
    trace = _Trace(plan, timeline)
    stages = [f"stage {stage}" + " · data" * (stage == 0) for stage in range(len(plan.stages))]
    assert trace.processes() == dict(enumerate(stages, start=1))
    # Numbers are nobody else's.
    numbers = [0, *trace.processes(), *(thread for _, thread in trace.threads)]
    assert len(set(numbers)) == len(numbers)
    operations = {
        (event["name"], event["args"]["node"]): event
        for event in trace.slices("forward", "loss", "backward")
    }
    assert len(operations) == len(timeline.runs)
    for run in timeline.runs:
        kind, microbatch, node = run.operation
        event = operations[f"{kind} {microbatch}", node]
        assert event["cat"] == {"F": "forward", "L": "loss", "B": "backward"}[kind]
        assert _span(event) == _microseconds(run.start_s, run.end_s)
        assert event["args"]["microbatch"] == microbatch
        assert event["args"]["stage"] == plan.stage_of[node] == event["pid"] - 1
        assert trace.thread(event) == f"node {node} · {plan.case.nodes[node].location}"
    transfers = {(e["name"], e["args"]["target"]): e for e in trace.slices("transfer")}
    assert len(transfers) == len(timeline.transfers)
    for sent in timeline.transfers:
        name = f"{sent.operation.kind} {sent.operation.microbatch} from node {sent.source}"
        event = transfers[name, sent.target]
        assert _span(event) == _microseconds(sent.start_s, sent.end_s)
        gradient = sent.operation.kind == "B"
        size = plan.case.gradient_bytes if gradient else plan.case.activation_bytes
        assert event["args"]["bytes"] == size
        assert trace.thread(event) == f"to node {sent.target}"
    waits = sorted(map(_span, trace.slices("waiting")))
    expected = sorted((t.ready_s, t.start_s) for t in timeline.transfers if t.start_s > t.ready_s)
    assert len(waits) == len(expected)
    assert all(a == _microseconds(*b) for a, b in zip(waits, expected, strict=True))
    averagings = {event["args"]["stage"]: event for event in trace.slices("averaging")}
    for averaging in timeline.averagings:
        nodes = plan.stages[averaging.stage]
        assert (averaging.stage in averagings) == (len(nodes) > 1)
        if len(nodes) > 1:
            event = averagings[averaging.stage]
            assert _span(event) == _microseconds(averaging.start_s, averaging.end_s)
            assert event["args"]["ring"] == list(best_ring(plan.case, averaging.stage, nodes))
            assert event["name"] == f"averaging of stage {averaging.stage}"
    # Those of a track follow one another, in whole nanoseconds, as viewers count them.
    tracks = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "X":
            start, length = round(1000 * event["ts"]), round(1000 * event["dur"])
            assert length >= 0
            tracks[event["pid"], event["tid"]].append((start, start + length))
    assert set(tracks) <= set(trace.threads)
    for spans in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@given(routed_cases())
def test_an_arrow_leads_over_every_transfer_to_the_operation_that_it_was_for(routed):
    plan, timeline = planned(*routed)
    trace = _Trace(plan, timeline)
    around = {}
    open_slice = {}
    for event in trace.events:
        if event["ph"] == "X":
            open_slice = event
        elif event["ph"] in "stf":
            # A viewer binds it to the slice around it on its own track.
            assert (event["pid"], event["tid"]) == (open_slice["pid"], open_slice["tid"])
            start, end = _span(open_slice)
            assert start - ROUNDING_US <= event["ts"] <= end + ROUNDING_US
            assert (event["ph"], event["id"]) not in around
            assert event.get("bp") == ("e" if event["ph"] == "f" else None)
            around[event["ph"], event["id"]] = open_slice
    drawn = Counter(
        tuple((around[part, number]["name"], _node(around[part, number])) for part in "stf")
        for part, number in around
        if part == "s"
    )
    expected = Counter()
    for microbatch, path in enumerate(plan.microbatches):
        for before, after in pairwise(microbatch_chain(microbatch, path)):
            if before.node != after.node:
                name = f"{after.kind} {microbatch}"
                expected[
                    (f"{before.kind} {microbatch}", before.node),
                    (f"{name} from node {before.node}", after.node),
                    (name, after.node),
                ] += 1
    assert drawn == expected
    assert len(around) == 3 * len(timeline.transfers)


def _node(event) -> int:
    return event["args"].get("target", event["args"].get("node"))


def test_a_measured_timeline_needs_no_transfers():
    case = case_with(microbatches_per_data_node=2)
    plan, predicted = planned(case, [[0], [1]], [[0, 1]] * 2)
    trace = _Trace(plan, measured(predicted, 3.0))
    assert len(trace.slices("backward")) == 4
    assert {event["ph"] for event in trace.events} == {"M", "X"}


def test_predicted_and_measured_stand_in_processes_of_their_own():
    case = same_place([2, 2], microbatches_per_data_node=2)
    plan, predicted = planned(case, [[0, 1], [2, 3]], [[0, 2], [1, 3]] * 2)
    slower = simulate_plan(plan, draw_time_factors(4, 2, 0.5, 0, 0))
    trace = _Trace(plan, predicted, slower)
    groups = ("predicted", "measured")
    names = [f"{group} · stage {stage}" for group in groups for stage in ("0 · data", "1")]
    assert trace.processes() == dict(enumerate(names, start=1))
    assert not {thread for _, thread in trace.threads} & set(range(5))
    assert len({thread for _, thread in trace.threads}) == len(trace.threads)
    for timeline, processes in ((predicted, (1, 2)), (slower, (3, 4))):
        slices = trace.slices("forward", "loss", "backward")
        spans = sorted(_span(event) for event in slices if event["pid"] in processes)
        expected = sorted((run.start_s, run.end_s) for run in timeline.runs)
        for span, (start_s, end_s) in zip(spans, expected, strict=True):
            assert span == _microseconds(start_s, end_s)
    # An arrow stays within its group.
    ends = defaultdict(set)
    for event in trace.events:
        if event["ph"] in "stf":
            ends[event["id"]].add((event["ph"], event["pid"] > 2))
    assert len(ends) == len(predicted.transfers) + len(slower.transfers)
    assert all(len(parts) == 3 and len({late for _, late in parts}) == 1 for parts in ends.values())
    figures = _figures(predicted) | {f"measured_{k}": v for k, v in _figures(slower).items()}
    assert trace.whole["otherData"] == {"method": "example"} | figures


def _figures(timeline: Timeline) -> dict[str, float]:
    return {"iteration_s": timeline.iteration_s, "pipeline_s": timeline.pipeline_s}


def test_of_many_iterations_the_trace_has_one_and_the_rings_beside_it():
    case = same_place([2, 2], microbatches_per_data_node=2, stage_bytes=2**33)
    plan, timeline = planned(outer(case), ((0, 1), (2, 3)), ((0, 2), (1, 3), (0, 3), (1, 2)))
    trace = _Trace(plan, timeline)
    assert len(trace.slices("forward", "loss", "backward")) == len(timeline.runs)
    rings = trace.slices("averaging")
    assert [_span(ring) for ring in rings] == [
        _microseconds(own.start_s, own.end_s)
        for own in sorted(timeline.averagings, key=lambda own: own.stage)
    ]
    # A quarter of the parameters, in little more than a byte each.
    assert [ring["args"]["bytes"] for ring in rings] == [2**33 / 4 / 4 * (1 + 4 / 128)] * 2
    assert trace.whole["otherData"] == {"method": "example"} | _figures(timeline)
