"""The command line of a benchmark, and its report: figures, command, commit and machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe_sched.errors import InputError, run_command

if TYPE_CHECKING:
    import jax


def documented_parser(command: str, documentation: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help is the documentation of the command's module."""
    description, _, details = (documentation or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parser(benchmark: str, documentation: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark, with the argument --json."""
    made = documented_parser(_command(benchmark), documentation)
    add_paths(made, {"json": "also write the results to this file"})
    return made


def add_numbers(
    parser: argparse.ArgumentParser, options: Mapping[str, tuple[int | float, str]]
) -> None:
    """Add options that take a number: the default of each, whose type it has, and its help."""
    for name, (default, text) in options.items():
        own = f"{text} ({default:g})"
        parser.add_argument(_option(name), type=type(default), default=default, help=own)


def add_paths(parser: argparse.ArgumentParser, options: Mapping[str, str]) -> None:
    """Add options that take a file or a folder, each with its help."""
    for name, text in options.items():
        parser.add_argument(_option(name), type=Path, metavar="PATH", help=text)


def run(parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], int]) -> int:
    """Parse the command line and work; returns the exit code."""
    arguments = parser.parse_args()
    return run_command(lambda: work(arguments))


def begun(benchmark: str, described: dict[str, Any] | None = None) -> dict[str, Any]:
    """Begin a report: with the command and the commit, and the machine before the work has begun.

    `described` is the machine if another process has described it, so that this one takes no
    device.
    """
    command = f"{_command(benchmark)} {' '.join(sys.argv[1:])}".strip()
    return {"benchmark": benchmark} | origin(command, described)


def origin(command: str, described: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what is written beside the figures that `command` has made, now and here."""
    return {"command": command, "commit": commit(), "machine": described or describe_machine()}


def commit() -> str:
    """Return the commit of this checkout, marked where files that git knows have been changed."""
    asked = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def describe_machine() -> dict[str, Any]:
    """Describe the machine, the software, and how busy the machine is."""
    import jax

    device = jax.devices()[0]
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """Return the name of the processor, as well as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def peak_memory_bytes(device: jax.Device) -> int:
    """Return the peak use of a device's memory so far; of this process where devices are CPUs."""
    from skippipe_jax.profiling import devices

    if device.platform == "cpu":
        return devices.peak_process_bytes()
    return device.memory_stats()["peak_bytes_in_use"]


def finish(report: dict[str, Any], table: str | None, path: Path | None) -> int:
    """Print the table, unless it was on the way, and the report, and write that to `path` too.

    Returns the exit code: 1 if the report has `failures`.
    """
    if table is not None:
        print(table)
    print(json.dumps(report))
    write(report, path)
    return 1 if report.get("failures") else 0


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write a report, or as much as there is of it, to `path` if there is one."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def figure(value: float | None, how: str) -> str:
    """Format a figure of a table; one that there is none of is a dash."""
    return "-" if value is None else format(value, how)


@contextlib.contextmanager
def folder_for(keep: Path | None, benchmark: str) -> Iterator[Path]:
    """Yield a folder to work in: `keep`, which stays, or a new one that goes.

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


def _command(benchmark: str) -> str:
    return f"python -m experiments.benchmarks.{benchmark}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
