"""Trace of a timeline: JSON for Perfetto and chrome://tracing.

In the Trace Event Format, a list of events has `ph` as the kind of each. `X` is a slice with start
and duration in microseconds, `M` names a process or a thread, and `s`, `t`, `f` begin, continue and
end a flow, the arrow between the slices around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from skippipe_sched.figures.gantt import NAMES, in_lanes
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring
from skippipe_sched.timing.timeline import Run, Timeline, Transfer


@dataclass(frozen=True)
class _Slice:
    """Interval on a track [s].

    `flows` are the arrows that touch it: their numbers, each with the `ph` of its part here.
    """

    name: str
    category: str
    start_s: float
    end_s: float
    arguments: Mapping[str, Any]
    flows: tuple[tuple[int, str], ...] = ()


def chrome_trace(
    plan: Plan, timeline: Timeline, measured: Timeline | None = None
) -> dict[str, Any]:
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
    events: list[dict[str, Any]] = []
    for group, (prefix, one) in enumerate(shown.items()):
        first_process = group * len(plan.stages) + 1
        for stage in range(len(plan.stages)):
            process = first_process + stage
            name = f"{prefix}stage {stage}" + " · data" * (stage == 0)
            events.append(_metadata("process_name", process, {"name": name}))
            events.append(_metadata("process_sort_index", process, {"sort_index": process - 1}))
        for stage, name, slices in _tracks(plan, one, first_arrow):
            thread += 1
            process = first_process + stage
            events.append(_metadata("thread_name", process, {"name": name}, thread))
            events.append(_metadata("thread_sort_index", process, {"sort_index": thread}, thread))
            for piece in slices:
                events += _events(piece, process, thread)
        first_arrow += len(one.transfers)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"method": plan.method} | metadata,
    }


def _metadata(
    name: str, process: int, arguments: Mapping[str, Any], thread: int = 0
) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": dict(arguments)}


def _events(piece: _Slice, process: int, thread: int) -> list[dict[str, Any]]:
    """Write a slice, and its ends of arrows in its middle, so that they are within it."""
    start_us, end_us = _microseconds(piece.start_s), _microseconds(piece.end_s)
    place = {"pid": process, "tid": thread}
    slice_event = {
        "ph": "X",
        "name": piece.name,
        "cat": piece.category,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": dict(piece.arguments),
        **place,
    }
    middle_us = _microseconds((piece.start_s + piece.end_s) / 2)
    arrows = [
        {"ph": part, "name": "transfer", "cat": "transfer", "id": number, "ts": middle_us, **place}
        | ({"bp": "e"} if part == "f" else {})
        for number, part in piece.flows
    ]
    return [slice_event, *arrows]


def _microseconds(time_s: float) -> float:
    """Round to nanoseconds, as Perfetto does: otherwise rounding could make neighbors overlap."""
    return round(time_s * 1e9) / 1e3


def _tracks(
    plan: Plan, timeline: Timeline, first_arrow: int
) -> Iterator[tuple[int, str, list[_Slice]]]:
    """List the tracks: the stage, the name, and slices that do not overlap, in order."""
    numbers = {
        transfer.operation: number
        for number, transfer in enumerate(timeline.transfers, start=first_arrow)
    }
    flows = _flows_of_operations(plan, numbers)
    for stage, nodes in enumerate(plan.stages):
        for node in nodes:
            runs = (run for run in timeline.runs if run.operation.node == node)
            slices = [_operation_slice(stage, run, flows.get(run.operation, ())) for run in runs]
            yield stage, f"node {node} · {plan.case.nodes[node].location}", slices
            for lane in in_lanes([t for t in timeline.transfers if t.target == node]):
                slices = [s for t in lane for s in _transfer_slices(plan, t, numbers[t.operation])]
                yield stage, f"to node {node}", slices
        averagings = _averaging_slices(plan, timeline, stage)
        if averagings:
            yield stage, "averaging", averagings


def _operation_slice(stage: int, run: Run, flows: Sequence[tuple[int, str]]) -> _Slice:
    kind, microbatch, node = run.operation
    waited_s = run.start_s - run.arrived_s
    arguments = {"microbatch": microbatch, "stage": stage, "node": node, "waited_s": waited_s}
    name, category = f"{kind} {microbatch}", NAMES[kind].lower()
    return _Slice(name, category, run.start_s, run.end_s, arguments, tuple(flows))


def _flows_of_operations(
    plan: Plan, numbers: Mapping[Operation, int]
) -> dict[Operation, list[tuple[int, str]]]:
    """List for every operation the arrows that end and begin in it.

    `numbers` are the numbers of the arrows, by the operation that receives each transfer.
    """
    before = {
        after: operation
        for microbatch, path in enumerate(plan.microbatches)
        for operation, after in pairwise(microbatch_chain(microbatch, path))
    }
    flows: dict[Operation, list[tuple[int, str]]] = defaultdict(list)
    for operation, number in numbers.items():
        flows[before[operation]].append((number, "s"))
        flows[operation].append((number, "f"))
    return flows


def _transfer_slices(plan: Plan, transfer: Transfer, number: int) -> list[_Slice]:
    """Return a slice of the transfer, after one of the wait for a busy link if there is one."""
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
    slices = [
        _Slice(name, "transfer", transfer.start_s, transfer.end_s, arguments, ((number, "t"),))
    ]
    if transfer.start_s > transfer.ready_s:
        waiting = f"{name} waits for the link"
        slices.insert(0, _Slice(waiting, "waiting", transfer.ready_s, transfer.start_s, arguments))
    return slices


def _averaging_slices(plan: Plan, timeline: Timeline, stage: int) -> list[_Slice]:
    """Return one slice, or none if a stage of one replica has nothing to average."""
    arguments = {
        "stage": stage,
        "ring": list(best_ring(plan.case, stage, plan.stages[stage])),
        "bytes": plan.case.averaging.fragment_bytes(plan.case.stage_bytes[stage]),
    }
    return [
        _Slice(f"averaging of stage {stage}", "averaging", own.start_s, own.end_s, arguments)
        for own in timeline.averagings
        if own.stage == stage and own.end_s > own.start_s
    ]
