"""All commands under one name: what they say of themselves, how they load, how they end."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skippipe_jax import evaluate, launch, train
from tests.commands.examples import Command


@pytest.mark.parametrize("module", [train, evaluate, launch])
def test_help_explains_the_command(module: Any, command: Command):
    result = command(module, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"python -m {module.__name__}" in result.out
    wanted = {
        train: ["--config", "YAML", "--set KEY.SUB=VALUE", "--resume", "exit codes", "75"],
        evaluate: ["--run", "folder of a run", "--step", "--json", "perplexity"],
        launch: ["--config", "YAML", "--hosts N", "--grace", "machine"],
    }
    for words in wanted[module]:
        assert words in result.out


@pytest.mark.parametrize("module", [train, evaluate, launch])
def test_unknown_arguments_are_refused(module: Any, command: Command):
    result = command(module, "--config", "config.yaml", "--run", "run", "--fast")
    assert result.code == 2
    assert "usage: " in result.err
    assert "Traceback" not in result.err


def test_an_interrupt_while_a_command_is_imported_leaves_no_traceback():
    command = [sys.executable, "-X", "importtime", "-m", "skippipe_jax.report", "--help"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # The package itself is imported then, and what the command needs is not.
        said = list(
            itertools.takewhile(
                lambda line: line.split("|")[-1].strip() != "skippipe_jax", process.stderr
            )
        )
        process.send_signal(signal.SIGINT)
        said += process.stderr
        assert process.wait() == -signal.SIGINT
    assert not any("Traceback" in line for line in said)


def test_an_interrupt_while_the_search_is_compiled_ends_training(folder: Path):
    """numba calls back from C, where a KeyboardInterrupt would be lost."""
    command = [sys.executable, "-m", "skippipe_jax.train", "--config", "config.yaml"]
    command += ["--set", "plan.method=joint", "--set", "plan.budget_s=1000"]
    uncompiled = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(
        command, env=uncompiled, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        said = list(itertools.takewhile(lambda line: "compiling" not in line, process.stderr))
        process.send_signal(signal.SIGINT)
        said += process.stderr
        assert process.wait() == -signal.SIGINT
    assert [line.split()[0] for line in said] == ["planning"]
    assert not (folder / "run").exists()
