"""Trace of a timeline: JSON for Perfetto and chrome://tracing.

In the Trace Event Format, a list of events has `ph` as the kind of each. `X` is a slice with start
and duration in microseconds, `M` names a process or a thread, and `s`, `t`, `f` begin, continue and
end a flow, the arrow between the slices around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from skippipe_sched.figures.gantt import NAMES, in_lanes
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring
from skippipe_sched.timing.timeline import TimedOperation, Timeline, Transfer

TraceEvent = dict[str, Any]


def chrome_trace(plan: Plan, timeline: Timeline, measured: Timeline | None = None) -> TraceEvent:
    """Convert one iteration of `plan`, predicted or measured, to Chrome's trace event format.

    Every stage is a process. It has a thread for every node with its operations, threads for the
    transfers that the node receives (as many as overlap), and one for the averaging of the stage.
    Arrows lead from an operation over its transfer to the operation that receives it.

    With `measured`, that iteration follows in processes of its own, and `timeline` is labeled as
    predicted.
    """
    shown = {"": timeline}
    metadata = {"iteration_s": timeline.iteration_s, "pipeline_s": timeline.pipeline_s}
    if measured is not None:
        shown = {"predicted · ": timeline, "measured · ": measured}
        metadata["measured_iteration_s"] = measured.iteration_s
        metadata["measured_pipeline_s"] = measured.pipeline_s
    # In Perfetto, process and thread 0 are the idle ones, and a thread with the number of its
    # process is the main one.
    thread = len(shown) * len(plan.stages)
    first_arrow = 0
    events: list[TraceEvent] = []
    for group, (prefix, one) in enumerate(shown.items()):
        first_process = group * len(plan.stages) + 1
        for stage in range(len(plan.stages)):
            process = first_process + stage
            name = f"{prefix}stage {stage}" + " · data" * (stage == 0)
            events.append(_metadata("process_name", process, {"name": name}))
            events.append(_metadata("process_sort_index", process, {"sort_index": process - 1}))
        for stage, name, own in _tracks(plan, one, first_arrow):
            thread += 1
            process = first_process + stage
            events.append(_metadata("thread_name", process, {"name": name}, thread))
            events.append(_metadata("thread_sort_index", process, {"sort_index": thread}, thread))
            events += (event | {"pid": process, "tid": thread} for event in own)
        first_arrow += len(one.transfers)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"method": plan.method} | metadata,
    }


def _metadata(name: str, process: int, arguments: TraceEvent, thread: int = 0) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _slice(
    name: str,
    category: str,
    span_s: tuple[float, float],
    arguments: TraceEvent,
    flows: Sequence[tuple[int, str]] = (),
) -> list[TraceEvent]:
    """List a slice, and its ends of arrows in its middle, so that they are within it.

    `flows` are the arrows that touch it: their numbers, each with the `ph` of its part here.
    """
    start_us, end_us = map(_microseconds, span_s)
    slice_event = {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": arguments,
    }
    middle_us = _microseconds(sum(span_s) / 2)
    arrows = [
        {"ph": part, "name": "transfer", "cat": "transfer", "id": number, "ts": middle_us}
        | ({"bp": "e"} if part == "f" else {})
        for number, part in flows
    ]
    return [slice_event, *arrows]


def _microseconds(time_s: float) -> float:
    """Round to nanoseconds, as Perfetto does: otherwise rounding could make neighbors overlap."""
    return round(time_s * 1e9) / 1e3


def _tracks(
    plan: Plan, timeline: Timeline, first_arrow: int
) -> Iterator[tuple[int, str, list[TraceEvent]]]:
    """List the tracks: the stage, the name, and slices that do not overlap, in order."""
    numbers = {
        transfer.operation: number
        for number, transfer in enumerate(timeline.transfers, start=first_arrow)
    }
    flows = _flows_of_operations(plan, numbers)
    for stage, nodes in enumerate(plan.stages):
        for node in nodes:
            runs = (run for run in timeline.runs if run.operation.node == node)
            events = [e for run in runs for e in _operation(stage, run, flows[run.operation])]
            yield stage, f"node {node} · {plan.case.nodes[node].location}", events
            for lane in in_lanes([t for t in timeline.transfers if t.target == node]):
                events = [e for t in lane for e in _transfer(plan, t, numbers[t.operation])]
                yield stage, f"to node {node}", events
        averagings = _averaging(plan, timeline, stage)
        if averagings:
            yield stage, "averaging", averagings


def _operation(
    stage: int, run: TimedOperation, flows: Sequence[tuple[int, str]]
) -> list[TraceEvent]:
    kind, microbatch, node = run.operation
    waited_s = run.start_s - run.arrived_s
    arguments = {"microbatch": microbatch, "stage": stage, "node": node, "waited_s": waited_s}
    name, category = f"{kind} {microbatch}", NAMES[kind].lower()
    return _slice(name, category, (run.start_s, run.end_s), arguments, flows)


def _flows_of_operations(
    plan: Plan, numbers: Mapping[Operation, int]
) -> defaultdict[Operation, list[tuple[int, str]]]:
    """List for every operation the arrows that end and begin in it.

    `numbers` are the numbers of the arrows, by the operation that receives each transfer.
    """
    before = {
        after: operation
        for microbatch, path in enumerate(plan.microbatches)
        for operation, after in pairwise(microbatch_chain(microbatch, path))
    }
    flows: defaultdict[Operation, list[tuple[int, str]]] = defaultdict(list)
    for operation, number in numbers.items():
        flows[before[operation]].append((number, "s"))
        flows[operation].append((number, "f"))
    return flows


def _transfer(plan: Plan, transfer: Transfer, number: int) -> list[TraceEvent]:
    """List the slice of a transfer, after one of the wait for a busy link if there is one."""
    kind, microbatch, _ = transfer.operation
    arguments = {
        "microbatch": microbatch,
        "source": transfer.source,
        "target": transfer.target,
        "from": plan.case.nodes[transfer.source].location,
        "to": plan.case.nodes[transfer.target].location,
        "bytes": plan.case.hop_bytes(kind),
    }
    name = f"{kind} {microbatch} from node {transfer.source}"
    ready_s, start_s, end_s = transfer.ready_s, transfer.start_s, transfer.end_s
    waiting = f"{name} waits for the link"
    waits = _slice(waiting, "waiting", (ready_s, start_s), arguments) if start_s > ready_s else []
    return waits + _slice(name, "transfer", (start_s, end_s), arguments, [(number, "t")])


def _averaging(plan: Plan, timeline: Timeline, stage: int) -> list[TraceEvent]:
    """List the slice of a stage's averaging, none if one replica has nothing to average."""
    arguments = {
        "stage": stage,
        "ring": list(best_ring(plan.case, stage, plan.stages[stage])),
        "bytes": plan.case.averaging.fragment_bytes(plan.case.stage_bytes[stage]),
    }
    return [
        event
        for own in timeline.averagings
        if own.stage == stage and own.end_s > own.start_s
        for event in _slice(
            f"averaging of stage {stage}", "averaging", (own.start_s, own.end_s), arguments
        )
    ]
