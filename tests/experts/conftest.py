"""The command, in a folder with text for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.conftest import command as command  # a fixture
from tests.commands.examples import Command, Result
from tests.experts.examples import write_config, write_text

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with text and a configuration."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    write_config(tmp_path)
    return tmp_path


@pytest.fixture
def experts_command(command: Command, folder: Path) -> Run:
    """Runs ``skippipe experts`` with these arguments, in the folder."""
    return lambda *arguments: command("experts", *arguments)
