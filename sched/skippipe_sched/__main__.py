"""Commands of the planner: plan a case, compare methods, simulate a plan or a run, draw it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from skippipe_sched.commands import COMMANDS, FORMER_NAMES
from skippipe_sched.errors import run_command


def main(words: Sequence[str] | None = None) -> int:
    """Run the command given by `words` or the command line; return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    words[:1] = [FORMER_NAMES.get(word, word) for word in words[:1]]
    arguments = _parser().parse_args(words)
    return run_command(lambda: arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_sched",
        description="Plan which node serves which stage, and the path of each microbatch.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        module = import_module(f"skippipe_sched.commands.{name.replace('-', '_')}")
        subparser = commands.add_parser(
            name, help=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(subparser)
        subparser.set_defaults(command=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
