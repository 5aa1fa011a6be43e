"""The command line of a study: it trains what is missing, prints a table and writes its figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from experiments.paper import jobs, provenance


class Study(Protocol):
    """Runs, and what they have come to."""

    @property
    def result(self) -> Path:
        """The file of its figures."""
        ...

    def train(self) -> dict[str, Any]:
        """Train what is missing; returns the figures of all."""
        ...


def parser_of(command: str, documentation: str) -> argparse.ArgumentParser:
    """Make a parser whose help is the documentation of the command's module."""
    description, _, details = documentation.partition("\n\n")
    return argparse.ArgumentParser(
        prog=command,
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(
    command: str,
    documentation: str,
    quick: str,
    study_of: Callable[[Path, bool], Study],
    table: Callable[[Mapping[str, Any]], str],
) -> int:
    """Parse the command line of a study, and train; returns the exit code.

    `quick` says what --quick makes small, and `study_of` takes the folder to work in and whether it
    is quick.
    """
    parser = parser_of(command, documentation)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--folder", type=Path, help="working folder (runs/paper, runs/paper_quick)")
    arguments = parser.parse_args()

    def trained() -> int:
        folder = arguments.folder or Path("runs", "paper_quick" if arguments.quick else "paper")
        study = study_of(folder, arguments.quick)
        figures = study.train()
        given = f"{command}{' --quick' if arguments.quick else ''}"
        study.result.parent.mkdir(parents=True, exist_ok=True)
        written = json.dumps(provenance.of(given) | figures, indent=1) + "\n"
        study.result.write_text(written, encoding="utf-8")
        print(table(figures), study.result, sep="\n")
        return 0

    return jobs.stoppable(trained)
