"""The section `network`: how nodes exchange arrays, or how a network is emulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import Choice, require_choices

MODES = Choice(("real", "emulate"))
AVERAGING = Choice(("auto", "collective", "ring"))
HOPS = Choice(("float32", "bfloat16", "int8"))
ROUNDING = Choice(("nearest", "stochastic"))
ROUNDED = Choice(("bfloat16",))


@dataclass(frozen=True)
class NetworkConfig:
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
    jitter: float = 0.0
    averaging: Annotated[str, AVERAGING] = "auto"
    activation_dtype: Annotated[str, HOPS] | None = None
    gradient_dtype: Annotated[str, HOPS] | None = None
    gradient_rounding: Annotated[str, ROUNDING] = "nearest"
    averaging_dtype: Annotated[str, ROUNDED] | None = None
    deadline_s: float = 300.0

    def __post_init__(self):
        """Refuse what has no effect."""
        require_choices(self, "network")
        fields.number(self.jitter, "network.jitter", 0.0)
        fields.number(self.deadline_s, "network.deadline_s", 0.0, above=True)
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
