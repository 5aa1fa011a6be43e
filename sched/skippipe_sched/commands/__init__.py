"""The planner's commands: their parsers. What a command does is loaded when it runs.

`python -m skippipe_sched` and `skippipe` have the same commands from here. This module loads
neither NumPy nor what needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from skippipe_sched.churn.policies import POLICIES
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
        "--begin",
        type=Path,
        metavar="PLAN",
        help="let the search of joint begin at this plan too, of a case with the same stages",
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


def _churn(parser: argparse.ArgumentParser) -> None:
    # Or argparse takes -5h for an option, and says that the time before it is missing.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    parser.add_argument(
        "case", type=Path,
        help="the case, a YAML file, which is planned first; or a plan, a .json file",
    )  # fmt: skip
    time = parser.add_argument_group("hosts that come and go; times are given as 30s, 5min, 2h, 7d")
    time.add_argument(
        "--mtbf", required=True, metavar="TIME",
        help="mean time between the faults of one node; a thousand nodes have a thousand times as "
        "many",
    )  # fmt: skip
    _add_time(
        time, "--repair", "10min", "how long a node that was lost is away, its start included"
    )
    time.add_argument(
        "--days", type=float, default=7.0, help="how long the run is watched (default: %(default)g)"
    )
    time.add_argument(
        "--sweep", type=int, default=3, metavar="N",
        help="halve and double --mtbf so often (default: %(default)s)",
    )  # fmt: skip
    time.add_argument(
        "--seed", type=int, default=0, help="of the faults, and of the search (default: 0)"
    )
    time.add_argument(
        "--seeds", type=int, default=3, metavar="N",
        help="draw faults so often, with this seed and those after it (default: %(default)s)",
    )  # fmt: skip
    costs = parser.add_argument_group("what it costs")
    _add_time(costs, "--heartbeat", "30s", "how long a loss stays unnoticed")
    _add_time(costs, "--regroup", "1s", "how long a generation takes to form, without its plan")
    _add_time(costs, "--restore", "10s", "how long hosts that live take to read a checkpoint")
    _add_time(costs, "--restart", "2min", "how long a run takes to start again, once all are there")
    costs.add_argument(
        "--checkpoint-every", type=int, default=50, metavar="STEPS", help="default: %(default)s"
    )
    _add_time(costs, "--checkpoint", "1s", "how long a checkpoint stops training")
    costs.add_argument(
        "--copy-every", type=int, default=10, metavar="STEPS",
        help="how often stages are copied to their buddies (default: %(default)s)",
    )  # fmt: skip
    costs.add_argument(
        "--state-factor", type=float, default=3.0, metavar="FACTOR",
        help="a stage's state as a multiple of stage_bytes (default: %(default)g, for parameters "
        "and two moments)",
    )  # fmt: skip
    plans = parser.add_argument_group("plans")
    plans.add_argument(
        "--method", choices=METHODS, default=DEFAULT_METHOD,
        help="of the plan for all nodes (default: %(default)s)",
    )  # fmt: skip
    plans.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_S, metavar="SECONDS",
        help="how long to search for it at most (default: %(default)g)",
    )  # fmt: skip
    plans.add_argument(
        "--plans", type=int, metavar="N",
        help="plan for so many sets of live nodes at most, and liken the others to those (default: "
        "as many as take some minutes)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="write a picture here")


def _add_time(group: argparse._ArgumentGroup, option: str, default: str, about: str) -> None:
    group.add_argument(
        option, default=default, metavar="TIME", help=f"{about} (default: %(default)s)"
    )


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

_CHURN_HELP = "\n".join(
    [
        "Simulates a run whose hosts, a node each, vanish at random and come back: how many",
        "microbatches count, as a share of those of a run without faults, by what is done then:",
        *(f"  {name:<8} {policy.about}" for name, policy in POLICIES.items()),
        "All but restart go on without those that are lost while every stage has a host left,",
        "by the instant plan that a run makes; all of them live through the same faults.",
    ]
)

COMMANDS = (
    Command("plan", "make a plan for a case", _plan, _METHODS_HELP),
    Command("compare", "plan a case by all methods, side by side", _compare),
    Command("simulate", "simulate one iteration of a plan", _simulate),
    Command("draw", "draw one iteration of a plan", _draw),
    Command("churn", "simulate a run whose hosts vanish and come back", _churn, _CHURN_HELP),
)
