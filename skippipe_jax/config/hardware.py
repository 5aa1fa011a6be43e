"""The sections `node` and `network`: devices of a node, and how nodes exchange arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import Choice, Count, NonNegative, Positive, Section
from skippipe_jax.config.data import DataConfig
from skippipe_jax.config.model import ModelConfig

if TYPE_CHECKING:
    from skippipe_sched.problem.case import Case


AUTO, ITERATION, MICROBATCH = GATHER = Choice(("auto", "iteration", "microbatch"))


@dataclass(frozen=True)
class NodeMesh:
    """The devices of a node: `fsdp` times `tensor` of them."""

    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """How many they are."""
        return self.fsdp * self.tensor

    def __str__(self) -> str:
        """As a configuration has it."""
        return f"{{fsdp: {self.fsdp}, tensor: {self.tensor}}}"

    def require_divides(self, model: ModelConfig, data: DataConfig, field: str = "node") -> None:
        """Refuse a mesh over which some array cannot be cut evenly.

        Raises:
            InputError: naming the part of `field` that does not divide.
        """
        cut = [
            ("tensor", "model.heads", model.heads),
            ("tensor", "model.kv_heads", model.kv_heads),
            ("tensor", "model.ffn_width", model.ffn_width),
            ("tensor", "model.vocabulary_size", model.vocabulary_size),
            ("tensor", "data.sequence_length", data.sequence_length),
            ("fsdp", "model.width", model.width),
        ]
        for axis, name, size in cut:
            over = getattr(self, axis)
            if size % over:
                raise InputError(
                    f"{field}.{axis}",
                    over,
                    f"does not divide {name} = {size}",
                    f"Write a divisor of {size}",
                )
        if data.microbatch_size % self.fsdp and data.sequence_length % self.devices:
            raise InputError(
                f"{field}.fsdp",
                self.fsdp,
                f"divides neither data.microbatch_size = {data.microbatch_size} nor, times "
                f"{field}.tensor = {self.tensor}, data.sequence_length = {data.sequence_length}",
                "Write a divisor of one of them",
            )


ONE_DEVICE = NodeMesh()


@dataclass(frozen=True)
class NodeConfig(Section, name="node"):
    """Of which devices of its host a node consists: a mesh of `fsdp` times `tensor` of them.

    `node: auto` is short for `node: {fsdp: null}`. A node in a case may have a `mesh` of its own,
    `{fsdp: 2, tensor: 1}`. Hosts have devices for their nodes in turn.

    Attributes:
        fsdp: over so many devices every array of a stage is cut along the width, and so are the
            gradients and the optimizer's state; of each microbatch each has a part of the sequences
            or, where they are not as many, of the tokens. null: as many as the host has for
            each of its nodes.
        tensor: so many devices share the heads of attention, the feed-forward and the vocabulary,
            and between blocks the tokens.
        gather: when weights come together that `fsdp` has cut: once an `iteration`, and each device
            has them whole until its end, or layer by layer for every `microbatch`. `auto`: once
            an iteration where the `memory_bytes` of the node's devices in the case allow it, or say
            nothing.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"fsdp": None}}

    fsdp: Count | None = 1
    tensor: Count = 1
    gather: Annotated[str, GATHER] = AUTO

    @property
    def mesh(self) -> NodeMesh | None:
        """That of nodes that have none of their own; None where it depends on the host."""
        return None if self.fsdp is None else NodeMesh(self.fsdp, self.tensor)

    def mesh_of(self, case: Case, node: int) -> NodeMesh | None:
        """That of a node; None where it depends on the host."""
        own = case.nodes[node].mesh
        return self.mesh if own is None else NodeMesh(*own)

    def meshes(self, case: Case) -> Sequence[NodeMesh | None]:
        """Those of all nodes."""
        return [self.mesh_of(case, node) for node in range(len(case.nodes))]

    def over(self, devices: int) -> NodeMesh:
        """Return the mesh of a node that has so many devices, where it depends on the host."""
        if devices % self.tensor or devices < self.tensor:
            raise InputError(
                "node.tensor",
                self.tensor,
                f"does not divide the {devices} devices that a host has for each of its nodes",
                "Write a divisor, or node.fsdp as a number",
            )
        return NodeMesh(devices // self.tensor, self.tensor)


MODES = Choice(("real", "emulate"))
AVERAGING = Choice(("auto", "collective", "ring"))
HOPS = Choice(("float32", "bfloat16", "int8"))
ROUNDING = Choice(("nearest", "stochastic"))
ROUNDED = Choice(("bfloat16",))


@dataclass(frozen=True)
class NetworkConfig(Section, name="network"):
    """How nodes exchange arrays, or how a network between them is emulated.

    `network: emulate` is short for `network: {mode: emulate}`.

    Attributes:
        mode: `real`, or `emulate`: every hop is delayed by the case's latency, bandwidth and
            overhead, hops on one directed link one after another, and averaging takes the seconds
            that the case predicts.
        emulate_compute: with `emulate`, every operation takes at least the case's seconds.
        jitter: with `emulate`, everything takes (1 + x) times as long, x exponential with this
            mean, drawn anew for each iteration from the seed.
        averaging: `collective` sums a stage's gradients over its replicas by a collective of JAX,
            `ring` passes them round chunk by chunk in the planner's order of the replicas. `auto`
            takes the ring between hosts that have a JAX each (`cluster.runtime`), and where a link
            between hosts has less than 1 GiB/s in the case. With `averaging.mode: outer` it is for
            the first, exact iterations alone: changes always go round.
        activation_dtype: as what activations travel from node to node. `bfloat16` takes half the
            bytes of `float32`, and `int8` about a quarter: a token's channels are quantised in
            groups of 128, which have a scale each. null: as they are computed.
        gradient_dtype: as what activations' gradients travel. null: as activations do.
        gradient_rounding: how gradients become `int8`: to the `nearest`, or `stochastic`, up or
            down by chance, so that the mean is exact. Drawn by seed, step, microbatch and stage.
        averaging_dtype: `bfloat16` rounds gradients, and sums of some replicas' gradients, for
            each step of the ring. Replicas that share a device exchange nothing. With
            `averaging.mode: outer` it is for the first, exact iterations alone.
        deadline_s: seconds that a host waits for anything from another before the run ends.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {mode: {"mode": mode} for mode in MODES}

    mode: Annotated[str, MODES] = "real"
    emulate_compute: bool = False
    jitter: NonNegative = 0.0
    averaging: Annotated[str, AVERAGING] = "auto"
    activation_dtype: Annotated[str, HOPS] | None = None
    gradient_dtype: Annotated[str, HOPS] | None = None
    gradient_rounding: Annotated[str, ROUNDING] = "nearest"
    averaging_dtype: Annotated[str, ROUNDED] | None = None
    deadline_s: Positive = 300.0

    def __post_init__(self):
        """Refuse what has no effect."""
        super().__post_init__()
        for name in ("emulate_compute", "jitter"):
            if getattr(self, name) and self.mode == "real":
                raise InputError(
                    f"network.{name}",
                    getattr(self, name),
                    "the network is real, and so nothing is delayed",
                    "Write network.mode: emulate too, or remove it",
                )
        gradient_dtype = self.gradient_dtype or self.activation_dtype
        if self.gradient_rounding == "stochastic" and gradient_dtype != "int8":
            raise InputError(
                "network.gradient_rounding",
                self.gradient_rounding,
                "only int8 is rounded by chance, and gradients do not travel in it",
                "Write network.gradient_dtype: int8, or remove it",
            )
        if self.averaging == "collective" and self.averaging_dtype is not None:
            raise InputError(
                "network.averaging_dtype",
                self.averaging_dtype,
                "only the ring rounds what it sends, and network.averaging is collective",
                "Write averaging: ring, or remove it",
            )
