"""The folder that a run writes: its configuration, its plan, its metrics and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.draw import gantt
from skippipe_sched.errors import InputError
from skippipe_sched.plan import Plan, load_plan
from skippipe_sched.simulate import simulate_plan

from skippipe_jax.config import Config, parse_config, to_yaml

CONFIG, PLAN, PICTURE, METRICS = "config.yaml", "plan.json", "plan.svg", "metrics.jsonl"


def require_new(folder: Path) -> None:
    """Refuse a folder that holds a run already."""
    if (folder / CONFIG).exists():
        raise InputError(
            "run_dir",
            str(folder),
            "holds a run already",
            "Go on with it by --resume, or give another folder: --set run_dir=...",
        )


def start_run(folder: Path, config: Config, plan: Plan) -> None:
    """Create the folder of a new run.

    Raises:
        InputError: if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / PLAN)
        (folder / PICTURE).write_text(gantt(plan, simulate_plan(plan)), encoding="utf-8")
        (folder / METRICS).touch()
        # Last: the config marks a folder as a run.
        (folder / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise InputError(
            "run_dir", str(folder), f"cannot be written: {error.strerror}", "Give another folder"
        ) from error


def continue_run(folder: Path, config: Config, step: int) -> None:
    """Make the folder ready to go on after `step`: the metrics of later steps come again."""
    (folder / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    kept = [line for line in read_metrics(folder) if line["step"] <= step]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))


def saved_config(folder: Path, field: str) -> Config:
    """The configuration of a run; `field` names where the folder was given.

    Raises:
        InputError: if the folder holds no run.
    """
    if not (folder / CONFIG).exists():
        raise InputError(
            field, str(folder), f"holds no run: there is no {CONFIG}", "Name the folder of a run"
        )
    return parse_config(fields.load_yaml(folder / CONFIG, f"{folder / CONFIG}"))


def saved_plan(folder: Path) -> Plan:
    """The plan of a run."""
    return load_plan(folder / PLAN)


def append_metrics(folder: Path, line: dict[str, Any]) -> None:
    """Add one iteration to the metrics; a crash loses at most this line."""
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all iterations; a line that a crash cut short is left out."""
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
