"""Several commands of the planner in one process, one after another.

    python -m skippipe_sched.command_server

Each line of standard input is a JSON list of the words of a command; its exit code is a line of
standard output. Libraries and kernels that one command has loaded and compiled stay available, so
an early command lets later ones begin at once. SIGINT ends the current search with its best plan so
far, and otherwise has no effect; the end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from typing import TextIO

from skippipe_sched.__main__ import main as run_words


def serve(lines: TextIO, answers: TextIO) -> None:
    """Run the command of each line, and answer with its exit code."""
    for line in lines:
        # The output of commands is meant for a terminal.
        with contextlib.redirect_stdout(None):
            code = run_words(json.loads(line))
        print(code, file=answers, flush=True)


def main() -> int:
    """Serve until the end of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
