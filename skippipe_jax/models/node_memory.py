"""Memory held on each device of a node, for any mesh, by formula. No JAX.

docs/memory_formulas.md derives every formula, and its divisors on a mesh. Bytes that are held are
exact. Temporaries of an operation are those that it makes before XLA fuses any.
`skippipe_jax.models.sharding` declares how arrays are split.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config, DataConfig, ModelConfig, NodeMesh
from skippipe_jax.config.hardware import AUTO, ITERATION, ONE_DEVICE
from skippipe_jax.config.optimizer import MUON
from skippipe_jax.models.footprint import (
    DTYPE_BYTES,
    GRADIENT_BYTES,
    LOGIT_BYTES,
    TOKEN_BYTES,
    Cuts,
    activation_bytes,
    arrays_of_fragment,
    block_matrices,
    block_parameters,
    blocks_at_once,
    bytes_of_places,
    bytes_saved_by_blocks,
    hop_bytes,
    message_bytes,
    offloadable_bytes,
    optimizer_bytes,
    passing_bytes,
    saved_by_block,
    stage_parameters,
    tokens_of,
    tokens_of_chunk,
    transfer_dtypes,
)

USABLE_SHARE = 0.9
"""Fraction of a device's bytes that may be filled. The rest is for the runtime, for gaps between
arrays, and for temporaries beyond the formulas, which do not model XLA."""
UPDATE_ARRAYS = 3.5
"""Float32 arrays that Muon makes of the numbers that it updates; XLA made 3.3 on a processor."""
OUTER_ARRAYS = 3
"""Float32 arrays with as many numbers as there are parameters: anchor, momentum and residual;
when a fragment is applied, its parameters, anchor and momentum."""
OFFLOADS = "offload_dot_with_no_batch_dims"
"""Value of `model.recompute` that keeps products in the host's memory."""


@dataclass(frozen=True)
class NodeMemory:
    """Bytes on each device of a node that serves one stage.

    With `averaging.mode: outer`, `outer` is the anchor, momentum and residual of a stage with
    replicas, and `changes` the node's bytes for fragments in transit. `kept` is what one microbatch
    in flight keeps for its backward pass, and `in_flight` is the most microbatches in flight.
    `waiting` is activations and gradients that may wait at the node for their operation.
    `working` is the temporaries of an operation. `gathered` is weights gathered from the devices of
    a mesh for an iteration. `host` is what is offloaded to the memory of the node's host; it is not
    on the device.
    """

    parameters: int
    gradients: int
    optimizer: int
    outer: int
    kept: int
    in_flight: int
    waiting: int
    changes: int
    working: int
    host: int
    gathered: int = 0

    @property
    def state(self) -> int:
        """Bytes that are always on the device."""
        return self.parameters + self.gradients + self.optimizer + self.outer

    @property
    def total(self) -> int:
        """Most bytes on the device at any moment."""
        passing = self.waiting + self.changes + self.working
        return self.state + self.gathered + self.in_flight * self.kept + passing


def memory_of_node(
    config: Config,
    layers: int,
    *,
    is_data_stage: bool,
    replicas: int,
    in_flight: int,
    under_way: int,
    mesh: NodeMesh = ONE_DEVICE,
    gathers: bool = False,
) -> NodeMemory:
    """Return the memory of each device of a node that serves a stage of `layers` blocks.

    The stage has `replicas` replicas. Up to `in_flight` microbatches are in flight on the node.
    Data nodes have begun and not completed up to `under_way` microbatches, each of which has at
    most one activation or gradient in transit. `gathers` says whether weights are gathered once an
    iteration.
    """
    model, data = config.model, config.data
    cuts, hop = Cuts.of(model, data, mesh), hop_bytes(config)
    count = parameters_per_device(model, layers, mesh, is_data_stage=is_data_stage)
    targets = TOKEN_BYTES * tokens_of(data) if is_data_stage else 0
    averages = replicas > 1
    is_outer = config.averaging.is_outer and averages
    matrices = block_matrices(model, layers) // mesh.devices
    optimizer = optimizer_bytes(config, count, matrices)
    state_waits = config.optimizer.state_memory == "host"
    offloaded = layers * offloadable_bytes(model, data) if model.recompute == OFFLOADS else 0
    of_fragments = 0
    if is_outer:
        of_fragments = fragment_bytes_in_transit(
            config, layers, replicas, is_data_stage=is_data_stage
        )
    return NodeMemory(
        parameters=count * DTYPE_BYTES[model.parameter_dtype],
        gradients=GRADIENT_BYTES * count,
        optimizer=0 if state_waits else optimizer,
        outer=is_outer * OUTER_ARRAYS * GRADIENT_BYTES * count,
        gathered=gathered_bytes(model, layers, mesh) if gathers else 0,
        kept=kept_bytes(config, layers, mesh, is_data_stage=is_data_stage) + targets,
        in_flight=in_flight,
        waiting=under_way * (max(hop.activation, hop.gradient) // cuts.all),
        changes=of_fragments,
        # A backward pass or a loss runs, or, after all microbatches, the ring of gradients or the
        # update, or a fragment is applied.
        working=max(
            _of_operation(config, layers, mesh, is_data_stage=is_data_stage, gathers=gathers),
            averages * GRADIENT_BYTES * count,
            state_waits * optimizer + bytes_of_update(config, matrices),
            bytes_of_application(config, layers, is_data_stage=is_data_stage) if is_outer else 0,
        ),
        host=state_waits * optimizer + in_flight * (offloaded // cuts.all),
    )


def parameters_per_device(
    model: ModelConfig, layers: int, mesh: NodeMesh, *, is_data_stage: bool
) -> int:
    """Return how many of a stage's parameters each device has: norms are split over `fsdp` only."""
    scales = (2 * layers + is_data_stage) * model.width
    whole = stage_parameters(model, layers, is_data_stage=is_data_stage)
    return (whole - scales) // mesh.devices + scales // mesh.fsdp


def gathered_bytes(model: ModelConfig, layers: int, mesh: NodeMesh) -> int:
    """Return the bytes added on each device if the weights of `layers` blocks are gathered."""
    scales = 2 * layers * model.width
    matrices = layers * block_parameters(model) - scales
    computed = matrices // mesh.tensor * DTYPE_BYTES[model.compute_dtype]
    return computed + scales * DTYPE_BYTES[model.parameter_dtype]


def kept_bytes(
    config: Config, layers: int, mesh: NodeMesh = ONE_DEVICE, *, is_data_stage: bool
) -> int:
    """Return the bytes that a forward pass of `layers` blocks keeps on each device."""
    model, data = config.model, config.data
    tokens, compute = tokens_of(data), DTYPE_BYTES[model.compute_dtype]
    cuts, is_packed = Cuts.of(model, data, mesh), data.packing == "documents"
    if model.recompute == "stage":
        if is_data_stage:
            return TOKEN_BYTES * tokens * (1 + is_packed)
        return hop_bytes(config).activation // cuts.all
    # Tokens for the lookup, and marks of documents, which bypass the blocks.
    around = TOKEN_BYTES * tokens * is_data_stage
    around += is_packed * compute * tokens * (1 + is_data_stage)
    if model.recompute == "none":
        return bytes_saved_by_blocks(model, data, layers, mesh) + around
    inputs = compute * tokens * model.width // cuts.all
    places = bytes_of_places(model, data) // (cuts.positions if is_packed else 1)
    return layers * (inputs + saved_by_block(model, data, cuts)) + places + around


def fragment_bytes_in_transit(
    config: Config, layers: int, replicas: int, *, is_data_stage: bool
) -> int:
    """Return the most bytes of fragments in transit, with `averaging.mode: outer`.

    For each, a replica keeps the parameters at the sending, and the messages of all replicas.
    """
    averaging = config.averaging
    begun = averaging.exact_steps + averaging.every
    held = []
    for iteration in range(begun, begun + averaging.every):
        fragment = averaging.fragment_sent_after(iteration)
        held.append(0)
        if fragment is not None:
            numbers = sum(arrays_of_fragment(config, layers, fragment, is_data_stage=is_data_stage))
            sent = message_bytes(config, layers, fragment, is_data_stage=is_data_stage)
            held[-1] = GRADIENT_BYTES * numbers + replicas * sent
    # The fragments of `delay` iterations are in transit at once; without delay, one fragment.
    ends, at_once = [*accumulate(held + held, initial=0)], max(averaging.delay, 1)
    return max(ends[first + at_once] - ends[first] for first in range(averaging.every))


def bytes_of_application(config: Config, layers: int, *, is_data_stage: bool) -> int:
    """Return the bytes that the application of the largest fragment makes before it is written.

    These are its parameters, anchor and momentum; sending makes less.
    """
    largest = max(
        sum(arrays_of_fragment(config, layers, fragment, is_data_stage=is_data_stage))
        for fragment in range(config.averaging.fragments)
    )
    return OUTER_ARRAYS * GRADIENT_BYTES * largest


def bytes_of_update(config: Config, matrices: int) -> int:
    """Count the bytes that an update by Muon makes; AdamW makes less than a backward pass.

    These are the scaled gradient, the look-ahead momentum, the orthogonal update, and products.
    """
    return int(UPDATE_ARRAYS * GRADIENT_BYTES * matrices) if config.optimizer.name == MUON else 0


def bytes_of_loss(model: ModelConfig, data: DataConfig) -> int:
    """Return the bytes of a chunk's logits, and of their gradient in the compute dtype."""
    chunk = tokens_of_chunk(tokens_of(data), model.vocabulary_size)
    return chunk * model.vocabulary_size * (LOGIT_BYTES + DTYPE_BYTES[model.compute_dtype])


def unpacked_bytes(config: Config) -> int:
    """Return the bytes of what a backward pass converts from or to a transfer dtype.

    These are its inputs, the gradient of its outputs, and that of its inputs before it is sent.
    """
    computed = config.model.compute_dtype
    forward, back = transfer_dtypes(config)
    own = activation_bytes(config.model, config.data, computed)
    return own * ((forward != computed) + 2 * (back != computed))


def _of_operation(
    config: Config, layers: int, mesh: NodeMesh, *, is_data_stage: bool, gathers: bool
) -> int:
    """Return the bytes that a backward pass or a loss makes on each device.

    Both make a gradient of every parameter before it is accumulated, a backward pass none of the
    head. A backward pass also needs its current block. On a mesh these are in addition the block's
    weights, if they are gathered for it alone, and their gradient before the reduce-scatter; the
    gradient of the embedding is made after all this is freed.

    A loss makes a chunk's logits and their gradient. On a mesh each device has a part of the
    vocabulary, and besides the head in these parts, its gradient in them and as the head is stored,
    and all tokens' activations, with their gradient in float32.
    """
    model, data = config.model, config.data
    held, computed = DTYPE_BYTES[model.parameter_dtype], DTYPE_BYTES[model.compute_dtype]
    matrix = model.vocabulary_size * model.width
    of_block = bytes_saved_by_blocks(model, data, blocks_at_once(model, layers), mesh)
    of_block += passing_bytes(model, data, mesh)
    unpacked, of_loss = unpacked_bytes(config), is_data_stage * bytes_of_loss(model, data)
    if mesh == ONE_DEVICE:
        of_block -= is_data_stage * held * matrix * (not model.tied_head)
        parameters = held * stage_parameters(model, layers, is_data_stage=is_data_stage)
        return parameters + unpacked + max(of_block, of_loss)
    of_block += unpacked // Cuts.of(model, data, mesh).all
    of_block += (mesh.fsdp > 1) * (2 - gathers) * gathered_bytes(model, 1, mesh)
    embedding = is_data_stage * held * matrix // mesh.devices
    of_blocks = held * parameters_per_device(model, layers, mesh, is_data_stage=False)
    of_head = matrix // mesh.devices * (computed + GRADIENT_BYTES + held)
    of_tokens = tokens_of(data) * model.width * (computed + GRADIENT_BYTES)
    of_loss = of_loss // mesh.devices + is_data_stage * (of_head + of_tokens)
    return max(of_blocks + max(of_block, embedding), of_loss)


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
        return memory_of_node(
            config,
            layers[stage],
            is_data_stage=stage == 0,
            replicas=case.stages[stage],
            in_flight=in_flight,
            under_way=under_way,
            mesh=mesh,
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
