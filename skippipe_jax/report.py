"""`python -m skippipe_jax.report RUN`: one HTML page that shows a run, with nothing beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skippipe_sched.errors import kind_of, loading

from skippipe_jax.arguments import run_module


def main() -> int:
    """Parse the command line and write the page; returns the exit code."""
    return run_module("skippipe_jax.report", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = "One HTML page of a run: curves, timelines, links, idle nodes."
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("-o", "--output", type=Path, help="default: report.html in that folder")
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.reporting.page import report

    output = arguments.output or arguments.run / "report.html"
    page = report(arguments.run)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise kind_of(error)(
            "--output", str(output), f"cannot be written: {error.strerror}", "Name another file"
        ) from error
    print(f"report written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
