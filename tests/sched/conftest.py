"""Commands of the planner, run in this process."""

from collections.abc import Callable

import pytest
from skippipe_sched.__main__ import main


@pytest.fixture
def command(capsys) -> Callable[..., tuple[int, str, str]]:
    """Run a command; return its exit code, output and errors."""

    def run(*arguments):
        code = main([*map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
