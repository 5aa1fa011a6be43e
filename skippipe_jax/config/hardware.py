"""The sections `node` and `network`: devices of a node, and transfers between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import AtLeastOne, Choice, NonNegative, Positive, Section
from skippipe_jax.config.data import DataConfig
from skippipe_jax.config.model import ModelConfig

if TYPE_CHECKING:
    from skippipe_sched.problem.case import Case


AUTO, ITERATION, MICROBATCH = GATHER = Choice(("auto", "iteration", "microbatch"))


@dataclass(frozen=True)
class NodeMesh:
    """Device mesh of a node, with `fsdp` times `tensor` devices."""

    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.fsdp * self.tensor

    def __str__(self) -> str:
        """Return the mesh as written in a configuration."""
        return f"{{fsdp: {self.fsdp}, tensor: {self.tensor}}}"

    def require_divides(self, model: ModelConfig, data: DataConfig, field: str = "node") -> None:
        """Reject a mesh over which some array cannot be sharded evenly.

        Raises:
            InputError: naming the part of `field` that does not divide.
        """
        sharded = [
            ("tensor", "model.heads", model.heads),
            ("tensor", "model.kv_heads", model.kv_heads),
            ("tensor", "model.ffn_width", model.ffn_width),
            ("tensor", "model.vocabulary_size", model.vocabulary_size),
            ("tensor", "data.sequence_length", data.sequence_length),
            ("fsdp", "model.width", model.width),
        ]
        for axis, name, size in sharded:
            shards = getattr(self, axis)
            if size % shards:
                raise InputError(
                    f"{field}.{axis}",
                    shards,
                    f"does not divide {name} = {size}",
                    f"Write a divisor of {size}",
                )
        positions = data.sequence_length
        if data.microbatch_size % self.fsdp and positions % self.devices:
            raise InputError(
                f"{field}.fsdp",
                self.fsdp,
                f"must divide data.microbatch_size = {data.microbatch_size}, or its product with "
                f"{field}.tensor = {self.tensor} must divide data.sequence_length = "
                f"{data.sequence_length}",
                f"Write a divisor of {data.microbatch_size}"
                + (f" or of {positions // self.tensor}" if positions % self.tensor == 0 else ""),
            )


ONE_DEVICE = NodeMesh()


@dataclass(frozen=True)
class NodeConfig(Section, name="node"):
    """Devices of a node: a mesh of `fsdp` times `tensor` devices of its host.

    `node: auto` is short for `node: {fsdp: null}`. A node in a case may have its own `mesh`. A host
    assigns its devices to its nodes in order, and starts over when they run out.

    Attributes:
        fsdp: devices over which arrays, gradients and optimizer state of a stage are sharded along
            the width. Each computes some sequences of a microbatch or, if there are too few, some
            tokens. null: all of the host's devices, divided among its nodes.
        tensor: devices that share attention heads, feed-forward layer and vocabulary and, between
            blocks, the tokens.
        gather: gather weights sharded by `fsdp` once an `iteration`, until whose end each device
            holds them whole; or layer by layer for every `microbatch`. `auto`: once an iteration,
            if the case's `memory_bytes` allow it or are not set.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"fsdp": None}}

    fsdp: AtLeastOne | None = 1
    tensor: AtLeastOne = 1
    gather: Annotated[str, GATHER] = AUTO

    @property
    def mesh(self) -> NodeMesh | None:
        """Mesh of nodes without their own mesh; None if it depends on the host."""
        return None if self.fsdp is None else NodeMesh(self.fsdp, self.tensor)

    def mesh_of(self, case: Case, node: int) -> NodeMesh | None:
        """Return the mesh of a node; None if it depends on the host."""
        mesh = case.nodes[node].mesh
        return self.mesh if mesh is None else NodeMesh(*mesh)

    def meshes(self, case: Case) -> Sequence[NodeMesh | None]:
        """Return the meshes of all nodes."""
        return [self.mesh_of(case, node) for node in range(len(case.nodes))]

    def over(self, devices: int) -> NodeMesh:
        """Return the mesh of a node with this number of devices, if it depends on the host.

        Raises:
            InputError: if `tensor` does not divide the number of devices.
        """
        if devices % self.tensor or devices < self.tensor:
            problem = f"does not divide the {devices} devices per node on a host"
            remedy = "Write a divisor, or set node.fsdp to a number"
            raise self.error("tensor", problem, remedy)
        return NodeMesh(devices // self.tensor, self.tensor)


HARDWARE_MODES = Choice(("real", "emulate"))
HOPS = Choice(("float32", "bfloat16", "int8"))


@dataclass(frozen=True)
class NetworkConfig(Section, name="network"):
    """Transfers between nodes, over the real network or an emulated one.

    `network: emulate` is short for `network: {mode: emulate}`.

    Attributes:
        mode: `emulate`: hops are delayed by the case's latency, bandwidth and overhead, one at a
            time on a directed link, and averaging takes the predicted seconds.
        emulate_compute: with `emulate`, operations take at least the case's seconds.
        jitter: with `emulate`, operations, hops and averaging take 1 + x times as long, x being
            exponential with this mean, drawn for each step from the seed.
        averaging: sum a stage's gradients by a JAX `collective`, or in chunks around a `ring`.
            `auto`: between hosts the ring in `independent` mode and where a link has less than 1
            GiB/s, else the collective. Hosts whose meshes differ always use the ring. In `outer`
            mode, for `averaging.exact_steps` only.
        activation_dtype: type of activations in transfers. `int8` has one scale for 128 channels of
            a token. null: as computed.
        gradient_dtype: type of gradients of activations in transfers. null: as activations.
        gradient_rounding: rounding of gradients to `int8`; `stochastic` keeps the mean exact.
        averaging_dtype: `bfloat16` rounds gradients and partial sums in each step of the ring,
            except between replicas that share a device. In `outer` mode, for
            `averaging.exact_steps` only. null: no rounding.
        deadline_s: seconds to wait for a transfer from another host before the run ends, or in
            `independent` mode before all hosts connect again.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        mode: {"mode": mode} for mode in HARDWARE_MODES
    }

    mode: Annotated[str, HARDWARE_MODES] = "real"
    emulate_compute: bool = False
    jitter: NonNegative = 0.0
    averaging: Annotated[str, Choice(("auto", "collective", "ring"))] = "auto"
    activation_dtype: Annotated[str, HOPS] | None = None
    gradient_dtype: Annotated[str, HOPS] | None = None
    gradient_rounding: Annotated[str, Choice(("nearest", "stochastic"))] = "nearest"
    averaging_dtype: Annotated[str, Choice(("bfloat16",))] | None = None
    deadline_s: Positive = 300.0

    def __post_init__(self):
        """Reject settings without effect."""
        super().__post_init__()
        if self.mode == "real":
            remedy = "Write network.mode: emulate, or remove it"
            problem = "with network.mode: real"
            self.require_default("emulate_compute", "jitter", problem=problem, remedy=remedy)
        if (self.gradient_dtype or self.activation_dtype) != "int8":
            remedy = "Write network.gradient_dtype: int8, or remove it"
            problem = "unless gradients are sent as int8"
            self.require_default("gradient_rounding", problem=problem, remedy=remedy)
        if self.averaging == "collective":
            remedy = "Write network.averaging: ring, or remove it"
            problem = "with network.averaging: collective"
            self.require_default("averaging_dtype", problem=problem, remedy=remedy)
