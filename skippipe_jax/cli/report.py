"""The command that writes a self-contained HTML page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_sched.commands.output_files import write
from skippipe_sched.errors import loading

from skippipe_jax.cli.arguments import add_path, required_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Write an HTML page about a run: curves, timelines, links, idle nodes."
    add_path(parser, "--run", "folder of a run")
    about = "HTML file (default: report.html in the run folder)"
    parser.add_argument("-o", "--output", type=Path, help=about)


def run(arguments: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    with loading():
        from skippipe_jax.reporting.page import REPORT, report

    folder = required_path("--run", arguments.run, arguments.former)
    output = arguments.output or folder / REPORT
    write("--output", output, report(folder))
    print(f"report written to {output}")
    return 0
