"""How the benchmarks take their arguments and hand out what they found."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

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
    made.add_argument("--json", type=Path, help="also write the results to this file")
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


def figure(value: float | None, how: str) -> str:
    """A figure in a table, formatted; one that there is none of is a dash."""
    return "-" if value is None else format(value, how)


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write a report, or as much as there is of it, to `path` if there is one."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def folder_for(keep: Path | None, benchmark: str) -> Iterator[Path]:
    """A folder to work in: `keep`, which stays, or a new one that goes.

    Raises:
        InputError: if `keep` is there and not empty.
    """
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise InputError("--keep", str(keep), "is not empty", "Choose a new folder")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{benchmark}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
