"""What nodes hold on each of their devices, whatever their mesh is. No JAX."""

from __future__ import annotations

from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config, NodeMesh
from skippipe_jax.config.hardware import AUTO, ITERATION
from skippipe_jax.models.device_share import of_each_device
from skippipe_jax.models.footprint import NodeMemory, memory_of_node

USABLE_SHARE = 0.9
"""Of a device's bytes. The rest is for the runtime, for the gaps between arrays, and for what an
operation makes beyond the formulas, which do not know what XLA makes of it."""


def mesh_of_node(config: Config, case: Case, node: int | None = None) -> NodeMesh:
    """Return the mesh of a node, or of nodes that have none of their own.

    Where it depends on how many devices hosts have, which is not known here, one along `fsdp`
    stands for them.
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
    """Return what each device of a node of each stage holds, if no other node has it.

    `in_flight` microbatches may be in flight on it: if that is not given, as many as on any node of
    the case. Each data node may have as many under way as any of these. The node is over a `mesh`,
    by default that of nodes without one of their own, of devices that have so many `memory_bytes`,
    if that is known. They say whether weights come together once an iteration, if that is open.

    Raises:
        InputError: if the layers do not spread over the stages.
    """
    layers = config.model.layers_of_stages(len(case.stages))
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
        return of_each_device(
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
    """Tell whether weights come together once an iteration where a stage is served over a mesh.

    Without a `node` it is the one of all that has least memory.
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
    """Of the devices of all nodes; None where the case does not say for all."""
    sizes = [node.memory_bytes for node in case.nodes]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(sizes) else None
