"""Plan a case by all methods, side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from skippipe_sched.commands.output_files import require_writable, write
from skippipe_sched.commands.search_options import add_search_arguments, progress
from skippipe_sched.errors import InputError, loading
from skippipe_sched.methods import METHODS

DESCRIPTION = """\
Plan a case by several methods. Print for each plan: seconds of an iteration, its pipeline and
averaging, ratio to the method full, traffic between locations, use of the busiest link, idle time
of nodes, and gap to the lower bound. Ctrl-C ends the current search.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("case", type=Path, help="YAML file")
    about = "methods to compare (default: all)"
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help=about)
    add_search_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="file for the results")
    add("-o", "--output", type=Path, help="SVG file for a plot")


def run(arguments: argparse.Namespace) -> int:
    """Print a table, and write the requested figures and picture."""
    with loading():
        from skippipe_sched import fields
        from skippipe_sched.compare import compare, picture, table, to_json
        from skippipe_sched.problem.open_case import load_cases
        from skippipe_sched.search.budget import Search
    require_writable("--json", arguments.json, arguments.case)
    require_writable("--output", arguments.output, arguments.case)
    cases = load_cases(arguments.case)
    if len(cases) != 1:
        is_open = "stages" if len({case.stages for case in cases}) > 1 else "path_length"
        problem = "compare needs fixed stages and path_length"
        remedy = "Run skippipe plan first, and write the values that it chose into the case"
        raise InputError(f"case.{is_open}", "auto", problem, remedy)
    budget_s = fields.duration(arguments.budget, "--budget", above=True)
    with progress("compare") as watch:
        rows = compare(
            cases[0], arguments.methods, lambda _: Search(arguments.seed, budget_s, watch=watch)
        )
    print(table(rows))
    if arguments.json is not None:
        write("--json", arguments.json, json.dumps(to_json(rows), indent=1) + "\n")
    if arguments.output is not None:
        write("--output", arguments.output, picture(rows, arguments.case.stem))
    return 0
