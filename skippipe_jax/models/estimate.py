"""Memory of nodes and bytes over links that a run would need, as figures and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError
from skippipe_sched.figures.flows import size_text
from skippipe_sched.figures.tables import aligned
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.config import Config, PlanConfig
from skippipe_jax.config.cluster import BUDDY
from skippipe_jax.models.footprint import (
    COPIES_OF_BUDDY,
    Traffic,
    averaged_bytes,
    buddy_checkpoint_bytes,
    sizes_of_hops,
    stage_parameters,
)
from skippipe_jax.models.in_flight import MemoryUse, holding, memory_use, names
from skippipe_jax.models.node_memory import NodeMemory
from skippipe_jax.models.planned_case import configured_cases

# Methods whose paths visit every stage, whatever the case says.
FULL_PATHS = ("full", "full-joint")


ONE_NODE = {
    "nodes": 1,
    "locations": ["host 0"],
    "links": [],
    "stages": [1],
    "path_length": 1,
    "microbatches": 2,
    "memory": 2,
    "forward_s": 1.0,
    "hop_overhead_s": 0.0,
}
"""Case of a single host, with placeholders for measured values."""


def is_for_one_host(config: Config) -> bool:
    """Return whether the planned case is for one host, because the rest is yet to be measured."""
    plan = config.plan
    return plan.is_missing or (plan.measure and plan.case is None and plan.file is None)


def planned_case_and_visits(config: Config, config_folder: Path) -> tuple[Case, int]:
    """Return the case that a configuration is planned for, and the visits to stages per iteration.

    No plan is searched. If hosts are measured when the run starts, the case has one host with one
    node. It sends nothing, so no visits are counted.

    Raises:
        InputError: if hosts are measured when the run starts, and a template constrains them.
    """
    if is_for_one_host(config):
        of_one = replace(config, plan=PlanConfig(case=dict(ONE_NODE)))
        return configured_cases(of_one, config_folder)[0], 0
    if config.plan.measure:
        raise InputError(
            "plan",
            "auto",
            "the nodes are not known before the measurement at startup",
            "Measure them first (skippipe measure -o case.yaml), and add "
            "--set plan='{case: case.yaml}'",
        )
    if config.plan.file is not None:
        plan = load_plan(Path(config.plan.file))
        config.averaging.require_blocks(config.model.stage_partition(len(plan.stages)))
        return plan.case, sum(len(path) for path in plan.microbatches)
    case, *_ = configured_cases(config, config_folder)
    length = len(case.stages) if config.plan.method in FULL_PATHS else case.path_length
    return case, length * sum(case.microbatches)


def estimate_json(
    config: Config, case: Case, memory: Sequence[NodeMemory], sent: Traffic
) -> dict[str, Any]:
    """Return all figures by name, in bytes."""
    layers = config.model.stage_partition(len(case.stages))
    copies = {"copies": _copies(config, case)} if _has_copies(config) else {}
    return copies | {
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
        "nodes": [_of_nodes(use) for use in memory_use(config, case)],
        "bytes_per_iteration": asdict(sent),
        "case": _sizes(config, case),
    }


def _of_nodes(use: MemoryUse) -> dict[str, Any]:
    """Return the figures of nodes that are alike, if they serve the stage that takes most."""
    return {
        "nodes": list(use.nodes),
        "memory_bytes": use.memory_bytes,
        "mesh": asdict(use.mesh),
        "usable_bytes": use.usable_bytes,
        "in_flight": use.held.in_flight,
        "stage": use.stage,
        "bytes": asdict(use.held) | {"total": use.held.total},
        "one_more_bytes": use.one_more_bytes,
    }


def _use_text(use: MemoryUse) -> str:
    """Format the figures of nodes that are alike as a line of text."""
    one_more = "an iteration has no more microbatches"
    if use.one_more_bytes is not None:
        one_more = f"one more would take {size_text(use.one_more_bytes)}"
    return f"{names(use.nodes)}: {holding(use)}; {one_more}"


def _sizes(config: Config, case: Case) -> dict[str, Any]:
    """Return the keys that follow from the configuration, for a case for the planner alone."""
    averaged = averaged_bytes(config, len(case.stages))
    return {**sizes_of_hops(config), "stage_bytes": averaged, **config.averaging.of_case}


def _has_copies(config: Config) -> bool:
    return config.recovery.lost_stage == BUDDY


def _copies(config: Config, case: Case) -> list[dict[str, int]]:
    """Return the bytes of buddy checkpoints of each stage, in the memory of hosts."""
    return [
        {"stage": stage, "bytes": size, "first_host": size, "buddy": COPIES_OF_BUDDY * size}
        for stage, size in enumerate(buddy_checkpoint_bytes(config, len(case.stages)))
    ]


def _copies_text(config: Config, case: Case) -> str:
    """Format the bytes of buddy checkpoints as a line of text."""
    kept = ", ".join(
        f"{size_text(own['first_host'])} and {size_text(own['buddy'])} of stage {own['stage']}"
        for own in _copies(config, case)
    )
    return f"buddy checkpoints in the memory of the first host and of the buddy: {kept}"


def _host_memory_text(memory: Sequence[NodeMemory]) -> str:
    """Format the bytes that are offloaded to the memory of hosts as a line of text."""
    held = ", ".join(f"{size_text(own.host)} of stage {n}" for n, own in enumerate(memory))
    return f"in the memory of each node's host: {held}"


def _hops(sent: Traffic) -> str:
    if sent.gradient_hop == sent.hop:
        return f"{size_text(sent.hop)} per hop"
    return f"{size_text(sent.hop)} per hop and {size_text(sent.gradient_hop)} per hop back"


OUTER_COLUMNS = ("outer", "in transit")
"""Columns of outer mode: bytes that replicas always hold, and those of fragments in transit."""
MESH_COLUMNS = ("gathered",)
"""Column of weights that are gathered once an iteration, if any are."""


def table(config: Config, case: Case, memory: Sequence[NodeMemory], sent: Traffic) -> str:
    """Format the figures as text: a line for each stage, nodes, traffic, and sizes for a case."""
    layers = config.model.stage_partition(len(case.stages))
    is_outer = config.averaging.is_outer
    hidden = () if is_outer else OUTER_COLUMNS
    hidden += () if any(own.gathered for own in memory) else MESH_COLUMNS
    lines: list[tuple[str, ...]] = []
    for stage, own in enumerate(memory):
        parameters = stage_parameters(config.model, layers[stage], is_data_stage=stage == 0)
        cells = {
            "stage": f"{stage} (data)" if stage == 0 else f"{stage}",
            "layers": f"{layers[stage]}",
            "nodes": f"{case.stages[stage]}",
            "parameters": f"{parameters:,}",
            "weights": size_text(own.parameters),
            "gradients": size_text(own.gradients),
            "optimizer": size_text(own.optimizer),
            "gathered": size_text(own.gathered),
            "outer": size_text(own.outer),
            "in flight": f"{own.in_flight} x {size_text(own.kept)}",
            "in transit": size_text(own.changes),
            "waiting": size_text(own.waiting),
            "working": size_text(own.working),
            "total": size_text(own.total),
        }
        shown = [heading for heading in cells if heading not in hidden]
        lines = lines or [tuple(shown)]
        lines.append(tuple(cells[heading] for heading in shown))
    mean_note = f" (mean of {config.averaging.every} iterations)" if is_outer else ""
    return "\n".join(
        [
            aligned(lines),
            *(_use_text(use) for use in memory_use(config, case)),
            *([_host_memory_text(memory)] if any(own.host for own in memory) else []),
            *([_copies_text(config, case)] if _has_copies(config) else []),
            f"an iteration of {sum(case.microbatches)} microbatches sends "
            f"{size_text(sent.pipeline)} of activations and gradients ({_hops(sent)}) and "
            f"{size_text(sent.averaging)} for averaging{mean_note}",
            "keys for a case of the planner: "
            + ", ".join(f"{key}: {size}" for key, size in _sizes(config, case).items()),
        ]
    )
