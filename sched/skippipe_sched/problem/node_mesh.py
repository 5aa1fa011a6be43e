"""A node's own mesh of devices, in a case: the plan file keeps it, and the planner ignores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skippipe_sched import fields

MESH = "mesh"
AXES = ("fsdp", "tensor")


def mesh_of(node: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    """Read over how many devices a node is cut along each axis; None where it does not say so."""
    if node.get(MESH) is None:
        return None
    own = fields.mapping(node[MESH], f"{field}.{MESH}", AXES)
    fsdp, tensor = (fields.integer(own.get(axis, 1), f"{field}.{MESH}.{axis}", 1) for axis in AXES)
    return fsdp, tensor


def described(mesh: tuple[int, int] | None) -> dict[str, Any]:
    """Describe the mesh of a node as a case does."""
    return {} if mesh is None else {MESH: dict(zip(AXES, mesh, strict=True))}
