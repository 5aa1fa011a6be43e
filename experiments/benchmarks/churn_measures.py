"""What churn costs a run: how much it gets done, and what it leaves in a host that outlives it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FIRST_FAULTS = 10
"""What a host has open after as many faults is what it is held to."""
MORE_OPEN = 4
MEMORY_SHARE, MEMORY_MORE_BYTES = 1.05, 30e6
LEAST_GOODPUT = 0.8
LEAST_RATIO = 1.6
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def open_in(process: int) -> dict[str, int]:
    """The descriptors, threads and resident bytes of a process, as Linux tells them."""
    own = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir(own / "fd")),
        "threads": int(status["Threads"]),
        "resident_bytes": 1024 * int(status["VmRSS"].split()[0]),
    }


def processor_s(processes: Iterable[int]) -> float:
    """The processor seconds that processes have taken so far."""
    ticks = 0
    for process in processes:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_TICKS_PER_S


def grown(series: Sequence[Mapping[str, int]]) -> list[str]:
    """What has grown in a host by more than it may, from what it had open after each fault.

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
    """What a host may have resident in the end; None before the tenth fault."""
    if len(series) < FIRST_FAULTS:
        return None
    return MEMORY_SHARE * series[FIRST_FAULTS - 1]["resident_bytes"] + MEMORY_MORE_BYTES


def slopes(series: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """By how much each grows with a fault, after the first ten: the slope of a fitted line."""
    later = series[FIRST_FAULTS - 1 :]
    if len(later) < 2:
        return {}
    numbers = range(len(later))
    return {
        key: round(statistics.linear_regression(numbers, [own[key] for own in later]).slope, 4)
        for key in later[0]
    }


def step_at(notes: Iterable[Mapping[str, Any]], at_s: float) -> int:
    """The last step that had counted by a moment."""
    counted = ((n["at"], n["step"]) for n in notes if n["what"] == "counted" and n["at"] <= at_s)
    return max(counted, default=(0.0, 0))[1]


def goodput(
    calm: tuple[float, int], first: tuple[float, int], last: tuple[float, int], per_step: int
) -> dict[str, float]:
    """How much a run got done while it was struck, beside the same run before.

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
    """Whether a run got less done than it must, beside itself undisturbed and one restarted."""
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
