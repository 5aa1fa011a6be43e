"""The command line of a benchmark, and its report: figures, command, commit and machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError, run_command

from skippipe_jax.cli.arguments import add_overrides

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


Numbers = Mapping[str, tuple[int | float, float | None, str]]
"""Options that take a number: the default of each, whose type it has; the least value, which one
with a fraction has to exceed, or None for any; and its help."""

Options = Mapping[str, Mapping[str, Any]]
"""Other options, each as `argparse` takes it."""


def run(
    benchmark: str,
    documentation: str | None,
    measure: Callable[[argparse.Namespace, dict[str, Any]], str | None],
    *,
    numbers: Numbers = MappingProxyType({}),
    options: Options = MappingProxyType({}),
    paths: Mapping[str, str] = MappingProxyType({}),
    overrides: str | None = None,
    takes_device: bool = True,
) -> int:
    """Parse the command line of a benchmark, measure and report; returns the exit code.

    `measure` adds to the report that has begun, and returns the table, unless it was printed on the
    way. `paths` are options that take a file or a folder, each with its help; `overrides` is the
    help of --set. If this process `takes_device`, the machine is described before the work begins.
    """
    parser = documented_parser(_command(benchmark), documentation)
    for name, text in {"json": "also write the results to this file", **paths}.items():
        parser.add_argument(_option(name), type=Path, metavar="PATH", help=text)
    for name, (default, _, text) in numbers.items():
        own = f"{text} ({default:g})"
        parser.add_argument(_option(name), type=type(default), default=default, help=own)
    for name, how in options.items():
        parser.add_argument(name, **how)
    if overrides is not None:
        add_overrides(parser, overrides)
    arguments = parser.parse_args()

    def work() -> int:
        for name, (default, least, _) in numbers.items():
            if least is not None:
                value, option = getattr(arguments, name), _option(name)
                if isinstance(default, float):
                    fields.number(value, option, least, above=True)
                else:
                    fields.integer(value, option, int(least))
        command = f"{_command(benchmark)} {' '.join(sys.argv[1:])}".strip()
        report = {"benchmark": benchmark} | origin(command, None if takes_device else {})
        table = measure(arguments, report)
        if table is not None:
            print(table)
        print(json.dumps(report))
        write(report, arguments.json)
        return 1 if report.get("failures") else 0

    return run_command(work)


def origin(command: str, described: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what is written beside the figures that `command` has made, now and here.

    `described` is the machine, if this process is not to take a device.
    """
    machine = describe_machine() if described is None else described
    return {"command": command, "commit": commit(), "machine": machine}


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


def found_by(*words: str, **environment: str) -> Any:
    """Run Python with these words in a process of its own; return its last line, read as JSON."""
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


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
    with tempfile.TemporaryDirectory(prefix=f"{benchmark}-") as folder:
        yield Path(folder)


def _command(benchmark: str) -> str:
    return f"python -m experiments.benchmarks.{benchmark}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
