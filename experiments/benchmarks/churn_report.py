"""What `churn` prints of faults: a line for each, and a table of all."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks.churn_faults import KINDS, PHASES


def table(results: Sequence[dict[str, Any]]) -> str:
    """How many faults of each kind there were at each phase, and how quickly they were mended."""
    cells: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for result in results:
        cells[result["kind"], result["phase"]].append(result["recovered_s"])
    kinds = [kind for kind in KINDS if any(result["kind"] == kind for result in results)]
    phases = list(dict.fromkeys([*PHASES, *(result["phase"] for result in results)]))
    rows = [f"{'faults, median s':<18}" + "".join(f"{phase:>14}" for phase in phases)]
    for kind in kinds:
        rows.append(f"{kind:<18}" + "".join(f"{_cell(cells[kind, phase]):>14}" for phase in phases))
    return "\n".join(rows)


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
