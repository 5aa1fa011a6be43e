"""The planner's commands: their parsers. What a command does is loaded when it runs.

`python -m skippipe_sched` and `skippipe` have the same commands from here. This module loads
neither NumPy nor what needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from skippipe_sched.errors import loading
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

# What `plan --robust` plans for unless told otherwise, and `simulate` replays.
DEFAULT_JITTER = 0.3
DEFAULT_DRAWS = 200


@dataclass(frozen=True)
class Command:
    """One command: `about` is its line in the list of commands, `description` heads its --help.

    The module of this package that has its name runs it.
    """

    name: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    description: str | None = None

    def add_to(self, commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
        """Its parser, among the `commands` of another; ``arguments.command`` becomes `run`."""
        parser = commands.add_parser(
            self.name, help=self.about, description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_arguments(parser)
        parser.set_defaults(command=self.run)
        return parser

    def run(self, arguments: argparse.Namespace) -> int:
        """Run it; returns the exit code.

        Raises:
            InputError: for whatever is wrong with what the user gave.
        """
        with loading():
            module = import_module(f"{__name__}.{self.name}")
        return module.run(arguments)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, help="the case, a YAML file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where to write the plan")
    parser.add_argument(
        "--method", choices=METHODS, default=DEFAULT_METHOD, help="default: %(default)s"
    )
    _add_search_arguments(parser)
    parser.add_argument(
        "--placement", type=Path, metavar="PLAN", help="keep the placement of this plan"
    )
    parser.add_argument(
        "--robust",
        type=float,
        nargs="?",
        const=DEFAULT_JITTER,
        default=0.0,
        metavar="JITTER",
        help="plan for everything taking random times longer, by this mean share "
        "(%(const)s if not given); method joint and full-joint only",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, help="the case, a YAML file")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all"
    )
    _add_search_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("-o", "--output", type=Path, help="write a picture (SVG) here")


def _simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="the plan, a JSON file")
    parser.add_argument(
        "--contention",
        choices=("none", "link"),
        help="whether transfers on one link follow one another (default: as the plan's case says)",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        metavar="SHARE",
        help="replay it with every hop and operation taking random times longer, by this mean "
        "share (exponential), and print median and 95th percentile",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=DEFAULT_DRAWS,
        help="how often to replay with --jitter (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, help="the plan, a JSON file")
    parser.add_argument("-o", "--output", type=Path, metavar="SVG", help="a Gantt chart")
    parser.add_argument(
        "--flows", type=Path, metavar="SVG", help="a map of which links carry how much"
    )
    parser.add_argument(
        "--paths", type=Path, metavar="SVG", help="the way of every microbatch through the stages"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="JSON", help="a trace for ui.perfetto.dev, chrome://tracing"
    )


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the same seed and budget give the same plan (default: 0)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET_S,
        metavar="SECONDS",
        help="how long to search at most (default: %(default)g)",
    )


_METHODS_HELP = "\n".join(
    [
        "Makes a plan for a case by one of these methods:",
        *(f"  {name:<16} {method.about}" for name, method in METHODS.items()),
        "Ctrl-C ends the search with the best plan so far.",
    ]
)

COMMANDS = (
    Command("plan", "make a plan for a case", _plan, _METHODS_HELP),
    Command("compare", "plan a case by all methods, side by side", _compare),
    Command("simulate", "simulate one iteration of a plan", _simulate),
    Command("draw", "draw one iteration of a plan", _draw),
)
