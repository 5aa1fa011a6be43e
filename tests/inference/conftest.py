"""Commands that use a model, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from skippipe_jax.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; return its exit code, output and errors."""

    def run(*words: Any) -> tuple[int, str, str]:
        code, printed = main([*map(str, words)]), capsys.readouterr()
        return code, printed.out, printed.err

    return run
