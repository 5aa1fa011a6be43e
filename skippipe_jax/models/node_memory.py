"""Memory held on each device of a node, for any mesh. No JAX."""

from __future__ import annotations

from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config, NodeMesh
from skippipe_jax.config.hardware import AUTO, ITERATION
from skippipe_jax.models.device_memory import per_device_memory
from skippipe_jax.models.footprint import NodeMemory, memory_of_node

USABLE_SHARE = 0.9
"""Fraction of a device's bytes that may be filled. The rest is for the runtime, for gaps between
arrays, and for temporaries beyond the formulas, which do not model XLA."""


def mesh_of_node(config: Config, case: Case, node: int | None = None) -> NodeMesh:
    """Return the mesh of a node; by default, that of nodes that have none of their own.

    If it depends on the devices of each host, whose number is unknown here, `fsdp` counts as 1.
    """
    mesh = config.node.mesh if node is None else config.node.mesh_of(case, node)
    return NodeMesh(1, config.node.tensor) if mesh is None else mesh


def memory_of_stages(
    config: Config,
    case: Case,
    in_flight: int | None = None,
    *,
    mesh: NodeMesh | None = None,
    memory_bytes: float | None = None,
) -> list[NodeMemory]:
    """Return the memory of each device of a node of each stage, if no other node shares the device.

    `in_flight` microbatches may be in flight on the node, by default as many as on any node of the
    case. Each data node may have as many under way as any of these nodes. By default, `mesh` is
    that of nodes without one of their own. With `node.gather: auto`, `memory_bytes`, the bytes of
    each device, if known, decides whether weights are gathered once an iteration.

    Raises:
        InputError: if the layers cannot be divided among the stages.
    """
    layers = config.model.stage_partition(len(case.stages))
    all_of_them = sum(case.microbatches)
    most = min(max(node.memory for node in case.nodes), all_of_them)
    in_flight = most if in_flight is None else in_flight
    under_way = min(case.stages[0] * max(most, in_flight), all_of_them)
    mesh = mesh_of_node(config, case) if mesh is None else mesh

    def of_stage(stage: int, gathers: bool) -> NodeMemory:
        whole = memory_of_node(
            config,
            layers[stage],
            is_data_stage=stage == 0,
            replicas=case.stages[stage],
            in_flight=in_flight,
            under_way=under_way,
        )
        return per_device_memory(
            config,
            layers[stage],
            whole,
            mesh,
            is_data_stage=stage == 0,
            averages=case.stages[stage] > 1,
            gathers=gathers,
        )

    held = []
    for stage in range(len(layers)):
        own = of_stage(stage, gathers=mesh.fsdp > 1 and config.node.gather in (AUTO, ITERATION))
        is_full = memory_bytes is not None and own.total > USABLE_SHARE * memory_bytes
        is_open = config.node.gather == AUTO
        held.append(of_stage(stage, gathers=False) if is_full and is_open else own)
    return held


def gathers_once(
    config: Config, case: Case, stage: int, mesh: NodeMesh, node: int | None = None
) -> bool:
    """Return whether weights are gathered once an iteration where a mesh serves a stage.

    Without `node`, the device with least memory in the case decides.
    """
    if mesh.fsdp == 1 or config.node.gather != AUTO:
        return mesh.fsdp > 1 and config.node.gather == ITERATION
    if node is None:
        in_flight, memory_bytes = None, least_memory_bytes(case)
    else:
        own = case.nodes[node]
        in_flight, memory_bytes = min(own.memory, sum(case.microbatches)), own.memory_bytes
    held = memory_of_stages(config, case, in_flight, mesh=mesh, memory_bytes=memory_bytes)
    return held[stage].gathered > 0


def least_memory_bytes(case: Case) -> float | None:
    """Return the least bytes of a device of any node; None if the case does not say for all."""
    sizes = [node.memory_bytes for node in case.nodes]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(sizes) else None
