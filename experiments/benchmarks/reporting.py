"""How the benchmarks take their arguments and hand out what they found."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.benchmarks import machine


def parser(benchmark: str, documentation: str | None) -> argparse.ArgumentParser:
    """A parser that explains a benchmark by its documentation, with the argument --json."""
    description, _, details = (documentation or "").partition("\n\n")
    made = argparse.ArgumentParser(
        prog=f"python -m experiments.benchmarks.{benchmark}",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="write the results to this file too")
    return made


def begun(benchmark: str, described: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a report begins with: the command, and the machine before the work has begun.

    `described` is the machine if another process has described it, so that this one takes no
    device.
    """
    return {
        "benchmark": benchmark,
        "command": f"python -m experiments.benchmarks.{benchmark} {' '.join(sys.argv[1:])}".strip(),
        "machine": described or machine.describe(),
    }


def finish(report: dict[str, Any], table: str | None, path: Path | None) -> int:
    """Print the table, unless it was on the way, and the report, and write that to `path` too.

    Returns the exit code.
    """
    if table is not None:
        print(table)
    print(json.dumps(report))
    write(report, path)
    return 0


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write a report, or as much as there is of it, to `path` if there is one."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
