"""What a run would need, as figures and as a table: memory of nodes, bytes over links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError
from skippipe_sched.figures.flows import size_text
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.config import Config
from skippipe_jax.models.footprint import (
    NodeMemory,
    Traffic,
    averaged_bytes,
    hop_bytes,
    stage_parameters,
)
from skippipe_jax.models.planned_case import cases_of

# Methods whose paths visit every stage, whatever the case says.
FULL_PATHS = ("full", "full-joint")


def what_is_planned(config: Config, config_folder: Path) -> tuple[Case, int]:
    """The case that a configuration is planned for, and how many visits to stages it asks for.

    No plan is searched.

    Raises:
        InputError: if it has none, or measures it when the run starts.
    """
    if config.plan.measure:
        raise InputError(
            "plan.measure",
            True,
            "which nodes there are is known only when they are measured",
            "Measure them first (python -m skippipe_jax.profile -o case.yaml), and give "
            "--set plan='{case: case.yaml}'",
        )
    if config.plan.file is not None:
        plan = load_plan(Path(config.plan.file))
        return plan.case, sum(len(path) for path in plan.microbatches)
    case, *_ = cases_of(config, config_folder)
    length = len(case.stages) if config.plan.method in FULL_PATHS else case.path_length
    return case, length * sum(case.microbatches)


def to_json(
    config: Config, case: Case, memory: Sequence[NodeMemory], sent: Traffic
) -> dict[str, Any]:
    """All figures by name, in bytes."""
    layers = config.model.layers_of_stages(len(case.stages))
    return {
        "stages": [
            {
                "stage": stage,
                "layers": layers[stage],
                "replicas": case.stages[stage],
                "parameters": stage_parameters(
                    config.model, layers[stage], is_data_stage=stage == 0
                ),
                "bytes": asdict(own) | {"total": own.total},
            }
            for stage, own in enumerate(memory)
        ],
        "bytes_per_iteration": asdict(sent),
        "case": _sizes(config, case),
    }


def _sizes(config: Config, case: Case) -> dict[str, Any]:
    """What follows from the configuration, and a case for the planner alone has to say."""
    averaged = averaged_bytes(config, len(case.stages))
    return {"activation_bytes": hop_bytes(config), "stage_bytes": averaged}


HEADINGS = (
    "stage",
    "layers",
    "nodes",
    "parameters",
    "weights",
    "gradients",
    "optimizer",
    "in flight",
    "working",
    "node in all",
)


def table(config: Config, case: Case, memory: Sequence[NodeMemory], sent: Traffic) -> str:
    """The figures as aligned text: a line for each stage, then traffic, and sizes for a case."""
    layers = config.model.layers_of_stages(len(case.stages))
    lines: list[tuple[str, ...]] = [HEADINGS]
    for stage, own in enumerate(memory):
        parameters = stage_parameters(config.model, layers[stage], is_data_stage=stage == 0)
        lines.append(
            (
                f"{stage} (data)" if stage == 0 else f"{stage}",
                f"{layers[stage]}",
                f"{case.stages[stage]}",
                f"{parameters:,}",
                size_text(own.parameters),
                size_text(own.gradients),
                size_text(own.optimizer),
                f"{own.in_flight} x {size_text(own.kept)}",
                size_text(own.waiting + own.working),
                size_text(own.total),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in lines
    ]
    return "\n".join(
        [
            *rows,
            f"an iteration of {sum(case.microbatches)} microbatches sends "
            f"{size_text(sent.pipeline)} of activations and gradients, {size_text(sent.hop)} a "
            f"hop, and {size_text(sent.averaging)} for averaging",
            "in a case for the planner alone: "
            + ", ".join(f"{key}: {size}" for key, size in _sizes(config, case).items()),
        ]
    )
