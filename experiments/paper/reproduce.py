"""Measures and draws the figures of experiments/paper again.

    python -m experiments.paper.reproduce --quick      all of them, small, in minutes
    python -m experiments.paper.reproduce --full       all of them, as they are committed

Each figure comes as NAME.json and NAME.png; the JSON says by which command, commit and machine.
Full results replace the committed ones; quick ones stay in the work folder. Ctrl-C stops, and the
same command goes on where it was: runs whose results are there are not trained again.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.harness import reporting
from experiments.paper.jobs import stoppable
from experiments.paper.study_command import RESULTS, write

MODULES = ("iteration_time", "convergence", "robustness", "trade_off", "shapes")
# On two cores of an AMD EPYC, by the CPU seconds of an iteration, from nothing, with 63 runs; those
# whose results are committed need not be trained again.
HOURS = 3


def main() -> int:
    """Parse the command line, measure and draw; returns the exit code."""
    parser = reporting.documented_parser("python -m experiments.paper.reproduce", __doc__)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="small settings, one seed: minutes")
    how.add_argument(
        "--full", action="store_true", help=f"everything: about {HOURS} hours on 2 quiet cores"
    )
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES, help="(all)")
    parser.add_argument("--folder", type=Path, help="working folder (runs/paper, runs/paper_quick)")
    arguments = parser.parse_args()
    return stoppable(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    folder = arguments.folder or Path("runs", "paper_quick" if arguments.quick else "paper")
    results = folder if arguments.quick else RESULTS
    reproduce(arguments.only, quick=arguments.quick, folder=folder, results=results)
    return 0


def reproduce(names: Sequence[str], *, quick: bool, folder: Path, results: Path) -> None:
    """Measure and draw the figures of these names, working in `folder`, into `results`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        begun_s = time.monotonic()
        module = importlib.import_module(f"experiments.paper.{name}")
        figures = module.measure(quick, folder)
        command = f"python -m experiments.paper.reproduce --{'quick' if quick else 'full'}"
        origin = reporting.origin(f"{command} --only {name}")
        write(results / f"{name}.json", origin | figures, module.draw)
        minutes = (time.monotonic() - begun_s) / 60
        print(f"[{number}/{len(names)}] {results / name}.png after {minutes:.1f} min", flush=True)


if __name__ == "__main__":
    sys.exit(main())
