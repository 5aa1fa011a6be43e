"""A run to command, and what a command leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE

from tests.harness.training_runs import OPTIMIZER

CASE: dict[str, Any] = {
    "nodes": 3,
    "locations": ["here"],
    "links": [],
    "activation_bytes": 4096,
    "stage_bytes": 48832,
    "forward_s": 0.1,
    "stages": [2, 1],
    "path_length": 2,
    "microbatches_per_data_node": 1,
    "memory": 2,
}
# Stages have the shapes and the optimizer of `tests.harness.training_runs`: compiled once for all.
CONFIG: dict[str, Any] = {
    "run_dir": "run",
    "compilation_cache": None,
    "model": {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32},
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
