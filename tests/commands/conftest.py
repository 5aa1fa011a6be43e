"""Commands run in this process, in a folder with what they need."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from skippipe_jax.cli.main import main
from skippipe_jax.config import load_config
from tests.commands.examples import Command, Result, write_inputs
from tests.harness.training_runs import train_alone


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a configuration that can be trained."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs in this process a command by its name, or the `main` of another program."""

    def run(program: Any, *arguments: str) -> Result:
        capfd.readouterr()
        try:
            if isinstance(program, str):
                code = main([program, *arguments])
            else:
                monkeypatch.setattr(sys, "argv", [program.__name__, *arguments])
                code = program.main()
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        printed = capfd.readouterr()
        return Result(code, printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run has been trained to its end; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    with contextlib.chdir(folder):
        train_alone(load_config(Path("config.yaml")))
    return folder


@pytest.fixture
def run(trained: Path, folder: Path) -> Path:
    """A copy of the trained run, in the current directory."""
    shutil.copytree(trained / "run", folder / "run")
    return folder / "run"
