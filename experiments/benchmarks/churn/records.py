"""Records of hosts under `churn`: checks of what must hold, and figures of what it costs.

Checks that hold whatever is lost, how quickly a run recovers, how much it gets done, and what
grows in a host that outlives all faults.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from skippipe_jax.storage.records import last_record, read_records

Note = Mapping[str, Any]
TOLERANCE = 2e-5
FIRST_FAULTS = 10
"""Faults after which the open files of a host are the reference for all later ones."""
MORE_OPEN = 4
MEMORY_SHARE, MEMORY_MORE_BYTES = 1.05, 30e6
LEAST_GOODPUT = 0.8
LEAST_RATIO = 1.6


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON; none if it is not there."""
    return read_records(path, dict[str, Any]) if path.exists() else []


def last_line(path: Path) -> dict[str, Any] | None:
    """Return the last whole line of a file of JSON, None if there is none."""
    return last_record(path, dict[str, Any]) if path.exists() else None


def differing_replicas(notes: Iterable[Note]) -> list[str]:
    """Steps after which two replicas of a stage were not the same, bit by bit.

    Of those that go apart, that is what they apply.
    """
    digests: dict[tuple[int, int, str], set[str]] = defaultdict(set)
    for note in notes:
        for stage, digest in note.get("digests", {}).items():
            digests[note["generation"], note["step"], stage].add(digest)
    return [
        f"replicas of stage {stage} differ after step {step} in generation {generation}"
        for (generation, step, stage), found in sorted(digests.items())
        if len(found) > 1
    ]


def wrongly_read(notes: Iterable[Note], per_step: int) -> list[str]:
    """Steps that counted and had not read exactly their own microbatches, each once.

    Step s, from 1, has those from (s - 1) times `per_step` on. A step that is run again reads them
    again; of all that was read for it in one generation, each is there once.
    """
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    counted = set()
    for note in notes:
        if note["what"] in ("read", "counted"):
            name = note["generation"], note["step"]
            if note["what"] == "read":
                read[name] += note["microbatches"]
            else:
                counted.add(name)
    return [
        f"step {step} of generation {generation} read {sorted(read[generation, step])}"
        for generation, step in sorted(counted)
        if sorted(read[generation, step]) != list(range((step - 1) * per_step, step * per_step))
    ]


def wrongly_read_apart(notes: Iterable[Note], per_step: int) -> list[str]:
    """Steps that counted, where replicas go apart, and had not read microbatches of their own.

    Each reads as many as there are in a step, one after another, and none of a step before. What
    hosts have read for steps that never counted may be missing. Where all have gone back, what was
    made before is forgotten.
    """
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    counted: dict[int, int] = {}
    for note in notes:
        if note["what"] == "read":
            read[note["generation"], note["step"]] += note["microbatches"]
        elif note["what"] == "counted":
            counted[note["step"]] = max(counted.get(note["step"], 0), note["generation"])
    found, free = [], 0
    for step, generation in sorted(counted.items()):
        own = sorted(read[generation, step])
        if own != list(range(own[0], own[0] + per_step)) or own[0] < free:
            found.append(f"step {step} of generation {generation} read {own}, after {free - 1}")
        free = own[-1] + 1
    return found


def badly_trained(lines: Sequence[Note]) -> list[str]:
    """Where metrics lack a step, or learn nothing: a quarter of the steps after another."""
    found = jumps(lines)
    quarter = max(1, len(lines) // 4)
    first, last = (
        statistics.mean(line["loss"] for line in part)
        for part in (lines[:quarter], lines[-quarter:])
    )
    # Not `last >= first`, which NaN is not.
    if not last < first:
        found.append(f"the loss of the last quarter is {last:.4f}, that of the first {first:.4f}")
    return found


def jumps(lines: Sequence[Note]) -> list[str]:
    """Where a step is missing in metrics, or there twice."""
    steps = [0, *(line["step"] for line in lines)]
    found = [f"{a} to {b}" for a, b in pairwise(steps) if b != a + 1]
    return [f"metrics.jsonl goes from step {', '.join(found)}"] if found else []


def otherwise_trained(lines: Sequence[Note], undisturbed: Sequence[Note]) -> list[str]:
    """Where the metrics of a run are not those of one that nothing happened to.

    Both have a line for each step, once, with the same loss, tokens and norm of the gradient.
    """
    if found := jumps(lines):
        return found
    if len(undisturbed) < len(lines):
        return [f"the undisturbed run has {len(undisturbed)} steps of {len(lines)}"]
    return [
        f"{key} of step {line['step']} is {line[key]}, undisturbed {other[key]}"
        for line, other in zip(lines, undisturbed, strict=False)
        for key in ("loss", "tokens", "gradient_norm")
        if not math.isclose(line[key], other[key], rel_tol=TOLERANCE)
    ]


def recovery(notes: Iterable[Note], struck_s: float, generation: int) -> dict[str, float | None]:
    """How a run has come over a fault at a moment, in a generation [s].

    `detected_s` is from the fault to the first host that missed another, `recovered_s` from that to
    the first step that counted in a later generation. Both are None where nobody was missed.
    """
    after = [note for note in notes if note["at"] >= struck_s]
    missed = next((note["at"] for note in after if note["what"] == "missed"), None)
    if missed is None:
        return {"detected_s": None, "recovered_s": None}
    again = next(
        (
            note["at"]
            for note in after
            if note["what"] == "counted" and note["generation"] > generation
        ),
        None,
    )
    recovered = None if again is None else round(again - missed, 3)
    return {"detected_s": round(missed - struck_s, 3), "recovered_s": recovered}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that a share of all do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def open_in(process: int) -> dict[str, int]:
    """The descriptors, threads and resident bytes of a process, as Linux tells them."""
    own = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir(own / "fd")),
        "threads": int(status["Threads"]),
        "resident_bytes": 1024 * int(status["VmRSS"].split()[0]),
    }


def grown(series: Sequence[Mapping[str, int]]) -> list[str]:
    """Name what has grown in a host by more than it may, from what it had open after each fault.

    Descriptors and threads stay below the most that they were after the first ten faults and a
    handful; resident memory at most 5% and 30 MB above what it was after the tenth.
    """
    if len(series) <= FIRST_FAULTS:
        return []
    found = []
    for key in ("descriptors", "threads"):
        most = max(own[key] for own in series[:FIRST_FAULTS]) + MORE_OPEN
        if series[-1][key] > most:
            found.append(f"{key} have grown to {series[-1][key]}, above {most}")
    most = most_resident_bytes(series)
    if most is not None and series[-1]["resident_bytes"] > most:
        now = series[-1]["resident_bytes"]
        found.append(f"resident memory has grown to {now / 1e6:.0f} MB, above {most / 1e6:.0f}")
    return found


def most_resident_bytes(series: Sequence[Mapping[str, int]]) -> float | None:
    """Return the bytes that a host may have resident in the end; None before the tenth fault."""
    if len(series) < FIRST_FAULTS:
        return None
    return MEMORY_SHARE * series[FIRST_FAULTS - 1]["resident_bytes"] + MEMORY_MORE_BYTES


def step_at(notes: Iterable[Mapping[str, Any]], at_s: float) -> int:
    """The last step that had counted by a moment."""
    counted = ((n["at"], n["step"]) for n in notes if n["what"] == "counted" and n["at"] <= at_s)
    return max(counted, default=(0.0, 0))[1]


def goodput(
    calm: tuple[float, int], first: tuple[float, int], last: tuple[float, int], per_step: int
) -> dict[str, float]:
    """Compare how much a run got done while it was struck with the same run before.

    Of three moments the time [s] and the last step that counts in the end: as a calm stretch
    begins, as it ends and faults begin, and as they end.
    """
    (calm_s, calm_step), (first_s, first_step), (last_s, last_step) = calm, first, last
    calm_pace = (first_step - calm_step) / (first_s - calm_s)
    pace = (last_step - first_step) / (last_s - first_s)
    return {
        "calm_iteration_s": round(1 / calm_pace, 4) if calm_pace else float("inf"),
        "calm_microbatches_per_hour": round(3600 * per_step * calm_pace, 1),
        "microbatches_per_hour": round(3600 * per_step * pace, 1),
        "hours": round((last_s - first_s) / 3600, 4),
        "goodput": round(pace / calm_pace, 4) if calm_pace else 0.0,
    }


def too_little(report: Mapping[str, Any]) -> list[str]:
    """Name where a run did less than it must, beside itself undisturbed and one restarted."""
    found = []
    if report["goodput"] < LEAST_GOODPUT:
        found.append(f"goodput is {report['goodput']}, below {LEAST_GOODPUT}")
    if "restarted" in report:
        pace = report["restarted"]["microbatches_per_hour"]
        if report["microbatches_per_hour"] < LEAST_RATIO * pace:
            found.append(
                f"too slow compared with restarting, which does {pace} microbatches per hour"
            )
    return found
