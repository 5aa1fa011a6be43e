"""What `churn` shows of faults: a line for each, a table of all, and a picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.churn.faults import KINDS, PHASES
from experiments.benchmarks.churn.records import most_resident_bytes
from experiments.paper import drawing
from experiments.paper.drawing import BLUE, VERMILION

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(results: Sequence[dict[str, Any]]) -> str:
    """How many faults of each kind there were at each phase, and how quickly they were mended."""
    cells: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for result in results:
        cells[result["kind"], result["phase"]].append(result["recovered_s"])
    kinds = [kind for kind in KINDS if any(result["kind"] == kind for result in results)]
    rows = [["faults, median s", *PHASES]]
    rows += [[kind, *(_cell(cells[kind, phase]) for phase in PHASES)] for kind in kinds]
    return aligned(rows, [0])


def _cell(recovered: Sequence[float | None]) -> str:
    if not recovered:
        return "-"
    noticed = [seconds for seconds in recovered if seconds is not None]
    seconds = f"{statistics.median(noticed):.1f} s" if noticed else "unnoticed"
    return f"{len(recovered)}, {seconds}"


def told(result: dict[str, Any], of: int) -> str:
    """The line of a fault."""
    who = ", ".join(map(str, result["struck"])) + (" (leads)" if result["hit_leader"] else "")
    if result["second"] is not None:
        who += f", and host {result['second']}"
    line = f"{result['number'] + 1}/{of} {result['kind']} {result['edge']} {result['phase']} of "
    line += f"step {result['step']}, host {who}: "
    if result["detected_s"] is None:
        line += "no failure detected"
    else:
        line += f"detected after {result['detected_s']:.1f} s"
        if result["recovered_s"] is not None:
            line += f", a step committed {result['recovered_s']:.1f} s later"
    by = f" by {', '.join(result['came_by'])}" if result["came_by"] else ""
    return f"{line}; all hosts back{by} after {result['all_back_s']:.1f} s"


def summary(report: dict[str, Any]) -> str:
    """The table, how quick it was, and what was wrong."""
    quickness = report["recovered_s"]
    lines = [table(report["faults"])]
    if quickness["median"] is not None:
        lines.append(
            f"first step committed {quickness['median']:.2f} s after a failure was detected "
            f"(median; 95th percentile {quickness['percentile_95']:.2f} s)"
        )
    wrong = report["failures"]
    lines += [f"WRONG: {failure}" for failure in wrong] or [
        f"{report['steps']} steps, {len(report['faults'])} faults: all checks passed"
    ]
    return "\n".join(lines)


def picture(report: Mapping[str, Any]) -> Figure:
    """Draw what the report of a run that was struck at moments shows."""
    spared, faults = report["spared"], report["faults"]
    series = spared["after_each_fault"]
    figure, [[memory], [opened], [delays]] = drawing.panels(1, 1.9, 1.9, 2.1)
    title = f"{len(faults)} faults, goodput {report['goodput']:.2f}"
    if "restarted" in report:
        title += f", restarting {report['restarted']['goodput']:.2f}"
    figure.suptitle(title)
    memory.set_title(f"Resident memory of host {spared['host']}, which is never struck, MB")
    memory.plot([own["resident_bytes"] / 1e6 for own in series], color=BLUE)
    if (most := most_resident_bytes(series)) is not None:
        memory.axhline(most / 1e6, color="grey", linestyle="--")
    for key, color in (("descriptors", BLUE), ("threads", VERMILION)):
        opened.plot([own[key] for own in series], color=color, label=key)
    opened.set_title("Its descriptors and threads")
    noticed = {
        place: fault["detected_s"] + fault["recovered_s"]
        for place, fault in enumerate(faults)
        if fault["recovered_s"] is not None
    }
    delays.plot([*noticed], [*noticed.values()], ".", color=BLUE, label="a step counts again")
    back = [fault["all_back_s"] for fault in faults]
    delays.plot(back, ".", color=VERMILION, label="all hosts are there")
    delays.set_title("Seconds from a fault")
    delays.set_xlabel("fault")
    for axes in (opened, delays):
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure
