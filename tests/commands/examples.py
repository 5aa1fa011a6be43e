"""A run to command, and what a command leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE

from tests.harness.training_runs import MODEL, OPTIMIZER, SMALL_CASE

# With the sizes that the model has.
CASE: dict[str, Any] = SMALL_CASE | {
    "locations": ["here"],
    "links": [],
    "activation_bytes": 4096,
    "stage_bytes": 48832,
    "stages": [2, 1],
    "microbatches_per_data_node": 1,
}
CONFIG: dict[str, Any] = {
    "run_dir": "run",
    "compilation_cache": None,
    "model": MODEL,
    "plan": {"case": CASE, "method": "balanced"},
    "data": {
        "source": "text",
        "path": "text",
        "sequence_length": 32,
        "microbatch_size": 2,
        "held_out": 0.2,
    },
    "optimizer": OPTIMIZER,
    "train": {"steps": 3},
    "checkpoint": {"every": 2, "keep": 2},
}


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


TRAIN = ("train", "--config", "config.yaml")


def given(*values: str) -> list[str]:
    """Arguments that set values of the configuration, each written as KEY=VALUE."""
    return [word for value in values for word in ("--set", value)]


def write_inputs(folder: Path) -> None:
    words = ["stage", "node", "path", "plan", "microbatch", "host"]
    (folder / "text").write_text(" ".join(words[n * n % 7 % 6] for n in range(1500)))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))


def expect_one_error(result: Result, *words: str, code: int = INPUT_ERROR_EXIT_CODE) -> None:
    """One line that names field and value, says what is wrong, and what to do."""
    assert result.code == code
    [line] = [line for line in result.err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert line.endswith(".")
    assert " = " in line
    for word in words:
        assert word in line
