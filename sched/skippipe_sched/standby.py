"""Commands of the planner, one after another, in one process.

    python -m skippipe_sched.standby

Each line of standard input is a JSON list of the words of a command; its exit code is a line of
standard output. What a command has loaded and compiled is there for the next one, so one that is
given early makes the next ones begin at once. SIGINT ends the search that is under way with its
best plan so far, and otherwise nothing; the end of the input ends the process.
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
        # What commands tell is for those who wait before a terminal.
        with contextlib.redirect_stdout(None):
            code = run_words(json.loads(line))
        print(code, file=answers, flush=True)


def main() -> int:
    """Serve as long as somebody may ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
