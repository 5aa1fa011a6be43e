"""Outer averaging: what the replicas of a stage have changed is averaged, and applied to all.

With `averaging.mode: outer` every replica takes steps of its own. At the end of some iterations it
sends what it has changed of one fragment, rounded; some iterations later all replicas apply the
mean of what all have sent, by an outer optimizer. docs/training.md has the formulas. Here are pure
functions of trees of arrays, jitted once for each fragment of stages of one shape: they know
nothing of who carries a message, or when it comes.
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

BLOCKS, EMBEDDING = "blocks", "embedding"
"""What a stage's tree has under these names: arrays of all blocks, stacked, and the embedding."""
LARGEST = 127
"""Of a quantised number; there is one as far below zero."""
# Below the smallest normal number devices differ in what they compute.
LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)

Stage = dict[str, Any]
"""A stage's parameters, or as many numbers in the same arrays, by name."""
Part = dict[str, Any]
"""What belongs to one fragment of them: some of the blocks, perhaps embedding, or norm and head."""
Message = Shaped[Array, " length"]
"""A part as it travels. As int8, its numbers are followed by the bytes of their scales."""


@dataclass(frozen=True)
class Fragment:
    """What is averaged at once: some blocks of a stage, and what touches tokens at either end.

    Attributes:
        blocks: counted within the stage.
        is_first: whether the embedding is part of it, of a stage that has one.
        is_last: whether final norm and head are.
    """

    blocks: range
    is_first: bool
    is_last: bool

    def touched(self, stage: Stage) -> Stage:
        """Return the arrays of a stage, whole, of which something is in this fragment."""
        return {name: own for name, own in stage.items() if self._touches(name)}

    def part(self, stage: Stage) -> Part:
        """Cut this fragment out of a stage, or out of what it touches there."""

        def rows(leaf: Array) -> Array:
            return leaf[self.blocks.start : self.blocks.stop]

        return {
            name: jax.tree.map(rows, own) if name == BLOCKS else own
            for name, own in self.touched(stage).items()
        }

    def put_rows(self, blocks: PyTree, own: PyTree) -> PyTree:
        """Return the arrays of all blocks of a stage, with this fragment's rows put in."""
        return jax.tree.map(
            lambda leaf, rows: jax.lax.dynamic_update_slice_in_dim(
                leaf, rows, self.blocks.start, axis=0
            ),
            blocks,
            own,
        )

    def _touches(self, name: str) -> bool:
        if name == BLOCKS:
            return True
        return self.is_first if name == EMBEDDING else self.is_last


def fragments_of(averaging: AveragingConfig, layers: int) -> list[Fragment]:
    """Cut a stage of so many blocks into fragments, in the order of their numbers."""
    last = averaging.fragments - 1
    return [
        Fragment(averaging.blocks_of(number, layers), number == 0, number == last)
        for number in range(averaging.fragments)
    ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outer:
    """What a replica keeps beside parameters and moments: each as many numbers, in float32.

    Attributes:
        anchor: the outer parameters, as last applied; the same bits on all replicas of a stage.
        momentum: of the outer optimizer; the same bits on all replicas.
        residual: what rounding has left of the replica's own changes.
    """

    anchor: Stage
    momentum: Stage
    residual: Stage


@jax.jit
def begin(parameters: PyTree) -> Outer:
    """Begin outer averaging, all replicas having these parameters."""
    # Copies: who gives the parameters writes over them.
    anchor = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), parameters)
    momentum, residual = (jax.tree.map(jnp.zeros_like, anchor) for _ in range(2))
    return Outer(anchor, momentum, residual)


def begin_with(parameters: PyTree, momentum: PyTree) -> Outer:
    """Begin at the outer parameters and momentum of another replica."""
    return dataclasses.replace(begin(parameters), momentum=momentum)


@dataclass(frozen=True)
class FragmentFunctions:
    """What a replica does with one fragment.

    What is given of a replica's `Outer` and, to `apply`, of its parameters, is written over. A last
    argument of `send` and `apply` is how they call their jitted functions, such as to compile them.
    """

    send: Callable[..., tuple[Message, Part, Outer]]
    """(parameters, outer) -> message, the parameters that it was made of, outer"""
    apply: Callable[..., tuple[Stage, Outer]]
    """(parameters, outer, the part that was sent, messages) -> parameters, outer

    There is a message of every replica, by its place among those of the stage: they are summed in
    this order, whichever came first.
    """
    take_back: Callable[[Outer, Part, Message], Outer]
    """(outer, the part that was sent, the own message) -> outer as it was before the sending"""


Call = Callable[..., Any]
"""(jitted function, its arguments) -> its results, or a description of them"""


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@functools.cache
def fragment_functions(averaging: AveragingConfig, fragment: Fragment) -> FragmentFunctions:
    """Make the functions of a fragment, for stages that are cut alike."""
    outer_optimizer = optax.sgd(averaging.rate, averaging.momentum, nesterov=True)

    # By itself: together with what reads them, XLA writes whole arrays anew.
    put_rows = jax.jit(fragment.put_rows, donate_argnums=0)

    def put(stage: Stage, part: Part, call: Call) -> Stage:
        return stage | part | {BLOCKS: call(put_rows, stage[BLOCKS], part[BLOCKS])}

    @jax.jit
    def sent(parameters: Stage, anchor: Stage, residual: Stage) -> tuple[Message, Part, Part]:
        # Of copies: the next inner step writes over the parameters.
        own = jax.tree.map(jnp.copy, fragment.part(parameters))
        change = jax.tree.map(
            lambda anchor, own, left: anchor - own + left,
            fragment.part(anchor),
            own,
            fragment.part(residual),
        )
        message = quantised(change, averaging.dtype)
        left = jax.tree.map(jnp.subtract, change, dequantised(message, change, averaging.dtype))
        return message, own, left

    @jax.jit
    def applied(
        parameters: Stage, anchor: Stage, momentum: Stage, sent: Part, messages: Sequence[Message]
    ) -> tuple[Part, Part, Part]:
        before = fragment.part(anchor)
        change = mean(messages, before, averaging.dtype)
        state = optax.tree.set(outer_optimizer.init(before), trace=fragment.part(momentum))
        updates, state = outer_optimizer.update(change, state, before)
        after = cast(Part, optax.apply_updates(before, updates))
        if averaging.delay == 0:
            # No step was made since, and so all replicas have the same bits.
            own = after
        else:
            own = jax.tree.map(
                lambda own, after, sent: own + (after - sent),
                fragment.part(parameters),
                after,
                sent,
            )
        return own, after, optax.tree.get(state, "trace")

    @jax.jit
    def taken_back(anchor: Stage, residual: Stage, sent: Part, message: Message) -> Part:
        return jax.tree.map(
            lambda left, change, anchor, own: left + (change - (anchor - own)),
            fragment.part(residual),
            dequantised(message, sent, averaging.dtype),
            fragment.part(anchor),
            sent,
        )

    def send(parameters: Stage, outer: Outer, call: Call = _called) -> tuple[Any, Part, Outer]:
        given = (parameters, outer.anchor, outer.residual)
        message, own, left = call(sent, *map(fragment.touched, given))
        return message, own, dataclasses.replace(outer, residual=put(outer.residual, left, call))

    def apply(
        parameters: Stage,
        outer: Outer,
        sent: Part,
        messages: Mapping[int, Any],
        call: Call = _called,
    ) -> tuple[Stage, Outer]:
        given = (parameters, outer.anchor, outer.momentum)
        in_order = [messages[replica] for replica in sorted(messages)]
        own, anchor, momentum = call(applied, *map(fragment.touched, given), sent, in_order)
        outer = dataclasses.replace(
            outer,
            anchor=put(outer.anchor, anchor, call),
            momentum=put(outer.momentum, momentum, call),
        )
        return put(parameters, own, call), outer

    def take_back(outer: Outer, sent: Part, message: Message) -> Outer:
        before = taken_back(*map(fragment.touched, (outer.anchor, outer.residual)), sent, message)
        return dataclasses.replace(outer, residual=put(outer.residual, before, _called))

    return FragmentFunctions(send, apply, take_back)


def message_shape(
    averaging: AveragingConfig, fragment: Fragment, parameters: PyTree
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the message about a fragment, for parameters of these shapes."""
    return jax.eval_shape(
        lambda stage: quantised(fragment.part(stage), averaging.dtype), parameters
    )


def longest_message(
    averaging: AveragingConfig, layers: int, parameters: PyTree
) -> jax.ShapeDtypeStruct:
    """Return the message about the largest fragment of a stage of so many blocks."""
    messages = [
        message_shape(averaging, fragment, parameters)
        for fragment in fragments_of(averaging, layers)
    ]
    return max(messages, key=lambda message: message.size)


def quantised(change: PyTree, dtype: str) -> Message:
    """Quantize a change as it travels: all its numbers one after another in this dtype.

    As int8, 128 consecutive numbers of an array, the last ones filled up with zeros, have one
    scale, their largest magnitude / 127; a number becomes the nearest whole multiple of it. Numbers
    that are all too small for a normal scale become 0. Where one is not finite, nothing that is
    made of its group again is.
    """
    numbers = [leaf.ravel() for leaf in jax.tree.leaves(change)]
    if dtype != "int8":
        return jnp.concatenate(numbers).astype(dtype)
    rounded, scales = zip(*map(_rounded, numbers), strict=True)
    scale_bytes = jax.lax.bitcast_convert_type(jnp.concatenate(scales), jnp.int8)
    return jnp.concatenate([*rounded, scale_bytes.ravel()])


def dequantised(message: Message, like: PyTree, dtype: str) -> Part:
    """Restore a change that has travelled, in float32, in arrays shaped as in `like`."""
    leaves, structure = jax.tree.flatten(like)
    *numbers, behind = jnp.split(message, [*itertools.accumulate(leaf.size for leaf in leaves)])
    if dtype == "int8":
        groups = itertools.accumulate(-(-leaf.size // NUMBERS_OF_A_SCALE) for leaf in leaves)
        scale_bytes = behind.reshape(-1, SCALE_BYTES)
        all_scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.float32)
        *scales, _ = jnp.split(all_scales, [*groups])
        numbers = map(_multiplied, numbers, scales)
    return structure.unflatten(
        own.astype(jnp.float32).reshape(leaf.shape)
        for own, leaf in zip(numbers, leaves, strict=True)
    )


def mean(messages: Sequence[Message], like: PyTree, dtype: str) -> Part:
    """Average what messages hold, summed in float32 one after another."""
    changes = (dequantised(message, like, dtype) for message in messages)
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), changes)
    return jax.tree.map(lambda leaf: leaf / len(messages), total)


def inner_optimizer(optimizer: OptimizerConfig, share: float) -> OptimizerConfig:
    """Make the optimizer of a stage that has this share of the model's parameters.

    Its replicas know no norm but that of their own gradient, and hold it to the part of the bounds
    that it would have if all parameters' gradients were of one size.
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
    """Whole multiples, from -127 to 127, of the scales beside them."""
    groups = _grouped(numbers)
    scales = jnp.max(jnp.abs(groups), axis=1) / LARGEST
    # Not a scale of NaN: that is greater than nothing, and less than nothing either.
    scales = jnp.where(scales < LEAST_SCALE, 0.0, scales)
    multiples = jnp.round(groups / jnp.where(scales == 0.0, 1.0, scales)[:, None])
    # Rounding can carry the largest one past 127 by its last bit.
    multiples = jnp.clip(multiples, -LARGEST, LARGEST).astype(jnp.int8)
    return multiples.ravel()[: numbers.size], scales


def _multiplied(
    multiples: Int8[Array, " numbers"], scales: Float[Array, " groups"]
) -> Float[Array, " numbers"]:
    numbers = _grouped(multiples).astype(jnp.float32) * scales[:, None]
    return numbers.ravel()[: multiples.size]


def _grouped(numbers: Shaped[Array, " numbers"]) -> Shaped[Array, "groups 128"]:
    """Arrange numbers in groups of one scale each, the last one filled up with zeros."""
    beyond = -numbers.size % NUMBERS_OF_A_SCALE
    return jnp.pad(numbers, (0, beyond)).reshape(-1, NUMBERS_OF_A_SCALE)
