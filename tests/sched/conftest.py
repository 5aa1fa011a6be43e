"""Commands of the planner, run in this process."""

import sys
from collections.abc import Callable

import pytest
from skippipe_sched.__main__ import main


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run a command; return its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["skippipe_sched", *map(str, arguments)])
        code = main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
