"""Recordings of an iteration by every host, merged into a timeline.

A run folder holds `timelines/<step>/host_<i>.json` for every recorded iteration:

    {"runs": [["F", microbatch, node, arrived_s, start_s, end_s], ...],
     "averagings": [[stage, start_s, end_s], ...]}

After a change of hosts, a `plan.json` next to it holds the plan of the iteration.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import KINDS, Operation, Plan, load_plan, microbatch_chain
from skippipe_sched.timing.hops import Queues
from skippipe_sched.timing.timeline import Averaging, TimedOperation, Timeline, Transfer

from skippipe_jax.storage.files import atomic_write

TIMELINES, PLAN = "timelines", "plan.json"


class IncompleteRecordingError(InputError):
    """Error: a recording lacks the operations of some nodes."""


@dataclass(frozen=True)
class Recording:
    """Recording of one iteration by one host, in seconds since the epoch by host 0's clock.

    `runs` are the operations of its nodes, `averagings` those of the stages of its nodes. A stage
    with one replica exchanges nothing and needs no averaging.
    """

    runs: tuple[TimedOperation, ...]
    averagings: tuple[Averaging, ...]

    def save(self, folder: Path, step: int, host: int) -> None:
        """Write the recording to a run folder atomically."""
        path = recording_path(folder, step, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "runs": [[*run.operation, run.arrived_s, run.start_s, run.end_s] for run in self.runs],
            "averagings": [[a.stage, a.start_s, a.end_s] for a in self.averagings],
        }
        atomic_write(path, json.dumps(content) + "\n")


def recording_path(folder: Path, step: int, host: int) -> Path:
    """Return the path of the recording by `host` of the iteration that leads to `step`."""
    return folder / TIMELINES / f"{step:08d}" / f"host_{host}.json"


def save_recorded_plan(run_dir: Path, step: int, plan: Plan) -> None:
    """Save the plan of a recorded iteration that differs from the run's own."""
    folder = recording_path(run_dir, step, 0).parent
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / PLAN)


def load_recorded_plan(run_dir: Path, step: int) -> Plan | None:
    """Return the plan of a recorded iteration; None if it is the run's own.

    Raises:
        InputError: if it is damaged.
    """
    path = recording_path(run_dir, step, 0).parent / PLAN
    return load_plan(path) if path.exists() else None


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the steps with recordings in a run folder, ascending."""
    paths = (run_dir / TIMELINES).glob("*/host_*.json")
    return sorted({int(path.parent.name) for path in paths if path.parent.name.isdecimal()})


def remove_recordings(run_dir: Path, after: int) -> None:
    """Remove the recordings after a step, which a run that resumes there repeats.

    With fewer hosts, recordings that other hosts left would not match the new ones.
    """
    for folder in (run_dir / TIMELINES).glob("*/"):
        if folder.name.isdecimal() and int(folder.name) > after:
            shutil.rmtree(folder)


def measured_timeline(run_dir: Path, plan: Plan, step: int) -> Timeline:
    """Rebuild a recorded iteration, from its first forward, at 0 s, to its last averaging.

    Between operations of a microbatch on different nodes there is a transfer, from the end of the
    first until the arrival of its output; while the previous transfer on the same link lasted, it
    waited. A stage averages from when the last of its hosts started to.

    Raises:
        IncompleteRecordingError: if operations are missing, as without the file of a host.
        InputError: if a file is damaged or does not belong to this plan.
    """
    paths = sorted(recording_path(run_dir, step, 0).parent.glob("host_*.json"))
    recordings = [_load(path, plan) for path in paths]
    recorded = _by_operation((run for host in recordings for run in host.runs), plan, step)
    zero_s = min(run.start_s for run in recorded.values())
    runs = {operation: _relative_to(zero_s, run) for operation, run in recorded.items()}
    averagings = [
        Averaging(seen.stage, seen.start_s - zero_s, seen.end_s - zero_s)
        for host in recordings
        for seen in host.averagings
    ]
    return Timeline(
        nodes=len(plan.case.nodes),
        # By end too: a run without duration comes before one that starts at its end.
        runs=tuple(sorted(runs.values(), key=lambda run: (run.start_s, run.end_s))),
        transfers=_transfers(plan, runs),
        averagings=_averagings(plan, runs, averagings),
    )


def _load(path: Path, plan: Plan) -> Recording:
    """Read and check a recording."""
    field = "/".join(path.parts[-3:])
    names = ("runs", "averagings")
    content = fields.checked_mapping(fields.load_json(path, field), field, names, names)
    runs = _rows(content["runs"], f"{field}.runs", 6)
    averagings = _rows(content["averagings"], f"{field}.averagings", 3)
    return Recording(
        tuple(
            TimedOperation(_operation(row, where), *_times(row[3:], where)) for where, row in runs
        ),
        tuple(
            Averaging(
                fields.integer(row[0], where, 0, len(plan.stages) - 1), *_times(row[1:], where)
            )
            for where, row in averagings
        ),
    )


def _rows(value: Any, field: str, length: int) -> Iterator[tuple[str, list]]:
    for index, row in enumerate(fields.sequence(value, field, minimum_length=0)):
        where = f"{field}[{index}]"
        if len(fields.sequence(row, where)) != length:
            raise InputError(where, row, f"must have {length} entries", "Remove the recording")
        yield where, row


def _operation(row: list, field: str) -> Operation:
    kind, microbatch, node = row[:3]
    return Operation(
        fields.text(kind, field, KINDS),  # pyright: ignore[reportArgumentType]
        fields.integer(microbatch, field, 0),
        fields.integer(node, field, 0),
    )


def _times(values: list, field: str) -> list[float]:
    """Check that times are numbers, and that the last is not earlier than the one before it."""
    *times, end_s = [fields.number(value, field) for value in values]
    return [*times, fields.number(end_s, field, times[-1])]


def _by_operation(
    runs: Iterable[TimedOperation], plan: Plan, step: int
) -> dict[Operation, TimedOperation]:
    """Map every operation of the plan to its run."""
    field = f"{TIMELINES}/{step:08d}"
    missing = {operation for operations in plan.order for operation in operations}
    by_operation: dict[Operation, TimedOperation] = {}
    for run in runs:
        if run.operation not in missing:
            raise InputError(
                field,
                str(run.operation),
                "is recorded twice, or is not an operation of this plan",
                "Remove the recordings of this step: some are of another run",
            )
        missing.remove(run.operation)
        by_operation[run.operation] = run
    if missing:
        nodes = sorted({operation.node for operation in missing})
        raise IncompleteRecordingError(
            field,
            f"{len(by_operation)} operations",
            f"the recording of step {step} is incomplete: operations of nodes "
            f"{', '.join(map(str, nodes))} are missing",
            "Copy the recordings of their hosts into this folder, or remove it",
        )
    return by_operation


def _relative_to(zero_s: float, run: TimedOperation) -> TimedOperation:
    """Return a run with times relative to `zero_s`; earlier arrivals become 0."""
    return replace(
        run,
        arrived_s=max(0.0, run.arrived_s - zero_s),
        start_s=run.start_s - zero_s,
        end_s=run.end_s - zero_s,
    )


def _transfers(plan: Plan, runs: Mapping[Operation, TimedOperation]) -> tuple[Transfer, ...]:
    sendings = []
    for microbatch, path in enumerate(plan.microbatches):
        for before, after in pairwise(microbatch_chain(microbatch, path)):
            if before.node != after.node:
                ready_s = runs[before].end_s
                # Clocks of two hosts differ by milliseconds, so clip arrivals before the sending.
                end_s = max(ready_s, runs[after].arrived_s)
                sendings.append((end_s, ready_s, after, before.node))
    shares_connections, queues = plan.case.shares_connections, Queues(plan.case)
    free_s: dict[tuple[int, int], float] = defaultdict(float)
    transfers = []
    for end_s, ready_s, operation, source in sorted(
        sendings, key=lambda sending: sending[1::-1] if shares_connections else sending
    ):
        link = (source, operation.node)
        if shares_connections:  # Not recorded, so use the planned time.
            free_s[link], _ = queues.send(operation.kind, *link, ready_s)
        start_s = min(end_s, max(ready_s, free_s[link]))
        transfers.append(Transfer(*link, operation, ready_s, start_s, end_s))
        # Without contention transfers overlap, as in the planned timeline.
        if plan.case.contention == "link":
            free_s[link] = end_s
    return tuple(sorted(transfers, key=lambda transfer: transfer.start_s))


def _averagings(
    plan: Plan, runs: Mapping[Operation, TimedOperation], recorded: Sequence[Averaging]
) -> tuple[Averaging, ...]:
    """Return an averaging for every stage with nodes; one not recorded has no duration."""
    averagings = []
    for stage, nodes in enumerate(plan.stages):
        if not nodes:
            continue  # A dropped stage.
        of_stage = [averaging for averaging in recorded if averaging.stage == stage]
        last_s = max((run.end_s for run in runs.values() if run.operation.node in nodes), default=0)
        start_s = max((averaging.start_s for averaging in of_stage), default=last_s)
        end_s = max((averaging.end_s for averaging in of_stage), default=last_s)
        averagings.append(Averaging(stage, start_s, end_s))
    return tuple(sorted(averagings, key=lambda averaging: averaging.start_s))
