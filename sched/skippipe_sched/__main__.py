"""Commands of the planner: plan a case, compare methods, simulate a plan or a run, draw it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skippipe_sched.commands import COMMANDS
from skippipe_sched.errors import run_command


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of these words, or of the command line; returns the exit code."""
    arguments = _parser().parse_args(words)
    return run_command(lambda: arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_sched",
        description="Plans which node serves which stage and which way every microbatch goes.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
