"""Outer averaging (streaming DiLoCo): the replicas of a stage average their outer gradients.

With `averaging.mode: outer` every replica takes local steps. At the end of some iterations it sends
the quantized outer gradient of one fragment; some iterations later an outer optimizer applies the
mean over all replicas to each. docs/training.md has the formulas. This module has pure functions of
trees of arrays, jitted once for each fragment of stages of one shape. Messages are sent elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int8, PyTree, Shaped
from skippipe_sched.problem.averaging import NUMBERS_OF_A_SCALE, SCALE_BYTES

from skippipe_jax.config import AveragingConfig, OptimizerConfig
from skippipe_jax.optim.rounding import LARGEST, from_int8, grouped, to_int8

BLOCKS, EMBEDDING = "blocks", "embedding"
"""Names in a stage's tree of the stacked arrays of all blocks, and of the embedding."""
# Below the smallest normal number the results of devices differ.
LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)

Stage = dict[str, Any]
"""Parameters of a stage by name, or arrays of the same shapes."""
StageFragment = dict[str, Any]
"""One fragment of a `Stage`: some of the blocks, perhaps the embedding, or norm and head."""
EncodedPart = Shaped[Array, " length"]
"""Encoded `StageFragment`. In int8 the bytes of the scales follow the numbers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outer:
    """Outer state of a replica: three trees of the parameters' shapes, in float32.

    Attributes:
        anchor: outer parameters, as last applied; the same bits on all replicas of a stage.
        momentum: momentum of the outer optimizer; the same bits on all replicas.
        residual: quantization error of the replica's messages (error feedback).
    """

    anchor: Stage
    momentum: Stage
    residual: Stage


@jax.jit
def begin(parameters: PyTree) -> Outer:
    """Begin outer averaging at parameters that all replicas of the stage share."""
    # Copies, as the caller donates the parameters later.
    anchor = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), parameters)
    momentum, residual = (jax.tree.map(jnp.zeros_like, anchor) for _ in range(2))
    return Outer(anchor, momentum, residual)


def begin_with(parameters: PyTree, momentum: PyTree) -> Outer:
    """Begin outer averaging at the outer parameters and momentum of another replica."""
    return dataclasses.replace(begin(parameters), momentum=momentum)


Call = Callable[..., Any]
"""(jitted function, its arguments) -> its results, or their shapes"""


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@dataclass(frozen=True)
class Fragment:
    """Part of a stage that is averaged at one time, with the steps of its averaging.

    The steps donate the arrays of `Outer`, and `apply` those of the parameters. The optional last
    argument of `send` and `apply` is a `Call`, for example one that only compiles.

    Attributes:
        averaging: settings of the averaging.
        blocks: its blocks, counted within the stage.
        is_first: whether it includes the embedding, if the stage has one.
        is_last: whether it includes final norm and head, if the stage has them.
    """

    averaging: AveragingConfig
    blocks: range
    is_first: bool
    is_last: bool

    def touched(self, stage: Stage) -> Stage:
        """Return the whole arrays of a stage that overlap this fragment."""
        return {name: own for name, own in stage.items() if self._touches(name)}

    def part(self, stage: Stage) -> StageFragment:
        """Cut this fragment out of a stage, or out of the arrays that `touched` returns."""

        def rows(leaf: Array) -> Array:
            return leaf[self.blocks.start : self.blocks.stop]

        return {
            name: jax.tree.map(rows, own) if name == BLOCKS else own
            for name, own in self.touched(stage).items()
        }

    def put(self, stage: Stage, part: StageFragment, call: Call = _called) -> Stage:
        """Return a stage with this fragment replaced; its blocks are written over."""
        return stage | part | {BLOCKS: call(_put_rows, stage[BLOCKS], part[BLOCKS], self.blocks)}

    def _touches(self, name: str) -> bool:
        if name == BLOCKS:
            return True
        return self.is_first if name == EMBEDDING else self.is_last

    def message_shape(self, parameters: PyTree) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of the message about parameters of these shapes."""
        return jax.eval_shape(
            lambda stage: quantised(self.part(stage), self.averaging.dtype), parameters
        )

    def send(
        self, parameters: Stage, outer: Outer, call: Call = _called
    ) -> tuple[Any, StageFragment, Outer]:
        """Return the message to send, the parameters of the fragment that it is of, and `outer`."""
        given = map(self.touched, (parameters, outer.anchor, outer.residual))
        message, own, left = call(_sent, self, *given)
        residual = self.put(outer.residual, left, call)
        return message, own, dataclasses.replace(outer, residual=residual)

    def apply(
        self,
        parameters: Stage,
        outer: Outer,
        sent: StageFragment,
        messages: Mapping[int, Any],
        call: Call = _called,
    ) -> tuple[Stage, Outer]:
        """Apply the messages of all replicas, by their index in the stage, in the order of that.

        `sent` are the parameters of the fragment that this replica has sent.
        """
        given = map(self.touched, (parameters, outer.anchor, outer.momentum))
        in_order = [messages[replica] for replica in sorted(messages)]
        own, anchor, momentum = call(_applied, self, *given, sent, in_order)
        outer = dataclasses.replace(
            outer,
            anchor=self.put(outer.anchor, anchor, call),
            momentum=self.put(outer.momentum, momentum, call),
        )
        return self.put(parameters, own, call), outer

    def take_back(self, outer: Outer, sent: StageFragment, message: EncodedPart) -> Outer:
        """Return `outer` as it was before `send`, for the sent part and the local message."""
        given = map(self.touched, (outer.anchor, outer.residual))
        before = _taken_back(self, *given, sent, message)
        return dataclasses.replace(outer, residual=self.put(outer.residual, before))


# Jitted separately: fused with readers of these arrays, XLA copies them whole.
@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def _put_rows(blocks: PyTree, own: PyTree, rows: range) -> PyTree:
    """Return the arrays of all blocks of a stage with some rows replaced."""
    return jax.tree.map(
        lambda leaf, part: jax.lax.dynamic_update_slice_in_dim(leaf, part, rows.start, axis=0),
        blocks,
        own,
    )


@functools.partial(jax.jit, static_argnums=0)
def _sent(
    fragment: Fragment, parameters: Stage, anchor: Stage, residual: Stage
) -> tuple[EncodedPart, StageFragment, StageFragment]:
    # Copies, as the next inner step donates the parameters.
    own = jax.tree.map(jnp.copy, fragment.part(parameters))
    change = jax.tree.map(
        lambda anchor, own, left: anchor - own + left,
        fragment.part(anchor),
        own,
        fragment.part(residual),
    )
    dtype = fragment.averaging.dtype
    message = quantised(change, dtype)
    left = jax.tree.map(jnp.subtract, change, dequantised(message, change, dtype))
    return message, own, left


@functools.partial(jax.jit, static_argnums=0)
def _applied(
    fragment: Fragment,
    parameters: Stage,
    anchor: Stage,
    momentum: Stage,
    sent: StageFragment,
    messages: Sequence[EncodedPart],
) -> tuple[StageFragment, StageFragment, StageFragment]:
    averaging, before = fragment.averaging, fragment.part(anchor)
    outer_optimizer = optax.sgd(averaging.rate, averaging.momentum, nesterov=True)
    change = mean(messages, before, averaging.dtype)
    state = optax.tree.set(outer_optimizer.init(before), trace=fragment.part(momentum))
    updates, state = outer_optimizer.update(change, state, before)
    after = cast(StageFragment, optax.apply_updates(before, updates))
    if averaging.delay == 0:
        # No inner step since `send`, so all replicas take the anchor's bits.
        own = after
    else:
        own = jax.tree.map(
            lambda own, after, sent: own + (after - sent),
            fragment.part(parameters),
            after,
            sent,
        )
    return own, after, optax.tree.get(state, "trace")


@functools.partial(jax.jit, static_argnums=0)
def _taken_back(
    fragment: Fragment, anchor: Stage, residual: Stage, sent: StageFragment, message: EncodedPart
) -> StageFragment:
    return jax.tree.map(
        lambda left, change, anchor, own: left + (change - (anchor - own)),
        fragment.part(residual),
        dequantised(message, sent, fragment.averaging.dtype),
        fragment.part(anchor),
        sent,
    )


def fragments_of(averaging: AveragingConfig, layers: int) -> list[Fragment]:
    """Cut a stage of `layers` blocks into fragments, in the order of their numbers."""
    last = averaging.fragments - 1
    return [
        Fragment(averaging, averaging.blocks_of(number, layers), number == 0, number == last)
        for number in range(averaging.fragments)
    ]


def longest_message(
    averaging: AveragingConfig, layers: int, parameters: PyTree
) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the longest message about a fragment of a stage."""
    fragments = fragments_of(averaging, layers)
    shapes = [fragment.message_shape(parameters) for fragment in fragments]
    return max(shapes, key=lambda message: message.size)


def quantised(change: PyTree, dtype: str) -> EncodedPart:
    """Encode a change as a message: all its numbers one after another in this dtype.

    In int8, each group of 128 consecutive numbers of an array (the last group padded with zeros)
    has one scale, its largest magnitude / 127; a number becomes the nearest multiple of the scale.
    A group whose scale would not be a normal number becomes 0. A group with a number that is not
    finite is decoded to numbers that are not finite.
    """
    numbers = [leaf.ravel() for leaf in jax.tree.leaves(change)]
    if dtype != "int8":
        return jnp.concatenate(numbers).astype(dtype)
    rounded, scales = zip(*map(_rounded, numbers), strict=True)
    scale_bytes = jax.lax.bitcast_convert_type(jnp.concatenate(scales), jnp.int8)
    return jnp.concatenate([*rounded, scale_bytes.ravel()])


def dequantised(message: EncodedPart, like: PyTree, dtype: str) -> StageFragment:
    """Decode a message to a change, in float32, with the shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    *numbers, behind = jnp.split(message, [*itertools.accumulate(leaf.size for leaf in leaves)])
    if dtype == "int8":
        groups = itertools.accumulate(-(-leaf.size // NUMBERS_OF_A_SCALE) for leaf in leaves)
        scale_bytes = behind.reshape(-1, SCALE_BYTES)
        all_scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.float32)
        *scales, _ = jnp.split(all_scales, [*groups])
        numbers = map(from_int8, numbers, scales)
    return structure.unflatten(
        own.astype(jnp.float32).reshape(leaf.shape)
        for own, leaf in zip(numbers, leaves, strict=True)
    )


def mean(messages: Sequence[EncodedPart], like: PyTree, dtype: str) -> StageFragment:
    """Return the mean change of messages, summed in float32 in their order."""
    changes = (dequantised(message, like, dtype) for message in messages)
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), changes)
    return jax.tree.map(lambda leaf: leaf / len(messages), total)


def inner_optimizer(optimizer: OptimizerConfig, share: float) -> OptimizerConfig:
    """Return the optimizer of a stage that has this share of the model's parameters.

    A replica has only the gradient norm of its own stage. Its bounds are therefore scaled by
    root(share), which assumes gradients of one magnitude for all parameters.
    """

    def of_stage(bound: float | None) -> float | None:
        return None if bound is None else bound * share**0.5

    return dataclasses.replace(
        optimizer,
        clip_norm=of_stage(optimizer.clip_norm),
        skip_above_norm=of_stage(optimizer.skip_above_norm),
    )


def _rounded(
    numbers: Float[Array, " numbers"],
) -> tuple[Int8[Array, " numbers"], Float[Array, " groups"]]:
    """Return numbers as whole multiples, from -127 to 127, of scales, and the scales."""
    groups = grouped(numbers)
    scales = jnp.max(jnp.abs(groups), axis=1) / LARGEST
    # A NaN scale stays NaN, as its comparison is false.
    scales = jnp.where(scales < LEAST_SCALE, 0.0, scales)
    multiples = jnp.round(groups / jnp.where(scales == 0.0, 1.0, scales)[:, None])
    return to_int8(multiples, numbers.size), scales
