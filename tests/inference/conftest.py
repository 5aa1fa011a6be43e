"""Commands that use a model, run in this process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from skippipe_jax.cli.arguments import add_language_model_arguments, open_language_model
from skippipe_jax.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command; return its exit code, output and errors."""

    def run(*words: Any) -> tuple[int, str, str]:
        code, printed = main([*map(str, words)]), capsys.readouterr()
        return code, printed.out, printed.err

    return run


def language_model(*words: Any) -> Any:
    """What `generate` and `lm-eval` read with these arguments."""
    parser = argparse.ArgumentParser()
    add_language_model_arguments(parser)
    parser.set_defaults(seed=0)
    return open_language_model(parser.parse_args([*map(str, words)]))[0]
