"""How activations and their gradients travel from node to node: in fewer bytes, if so configured.

float32 and bfloat16 are casts. int8 is quantised: each token's channels are cut into groups, and a
group x has one scale, its largest magnitude / 127, rounded up to bfloat16 so that nothing is
clipped. What travels are q = round(x / scale), from -127 to 127, and behind them the scales, whose
bytes are taken for int8, so that a hop stays one array. Zeros stay zeros. In a group that is not
finite throughout, all is NaN afterwards: no such number comes out as another one.

Packing and unpacking are parts of the jitted stage functions, so that fewer bytes leave the device,
and work on any array whose last axis are an activation's channels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, Shaped, UInt32

from skippipe_jax.models.footprint import CHANNELS_OF_A_SCALE, SCALE_BYTES

LARGEST = 127
"""Of a quantised number; there is one as far below zero."""
# A scale is at least the smallest normal number, below which devices differ in what they compute.
LEAST_SCALE = float(jnp.finfo(jnp.bfloat16).tiny)

Draw = UInt32[Array, "4"]
"""What a stochastic rounding is drawn by: seed, step, microbatch and stage."""


@dataclass(frozen=True)
class WireFormat:
    """How arrays of one shape travel. `pack` and `unpack` are pure and may be traced.

    Attributes:
        computed: what stages compute with, [batch, time, channels].
        dtype: float32, bfloat16 or int8.
        width: how many of the channels are numbers. A channel beyond them, which says where
            documents begin, stays exact: 0 or 1, and 0 in a gradient.
        rounding: `nearest`, or `stochastic`: up or down by chance, so that the mean is exact.
    """

    computed: jax.ShapeDtypeStruct
    dtype: str
    width: int
    rounding: str = "nearest"

    @cached_property
    def travelling(self) -> jax.ShapeDtypeStruct:
        """What a hop carries."""
        return jax.eval_shape(self.pack, self.computed, jax.ShapeDtypeStruct((4,), jnp.uint32))

    @property
    def is_drawn(self) -> bool:
        """Whether packing needs something to draw by."""
        return self.dtype == "int8" and self.rounding == "stochastic"

    def pack(self, array: Float[Array, "*batch channels"], draw: Draw | None = None) -> Array:
        """Encode an array as it travels; stochastic rounding is drawn by `draw`."""
        if self.dtype != "int8":
            return array.astype(self.dtype)
        numbers, marks = array[..., : self.width], array[..., self.width :]
        if not self.is_drawn:
            return packed(numbers, marks, None)
        assert draw is not None, "stochastic rounding is drawn by something"
        return packed(numbers, marks, drawn_fractions(draw, numbers.shape))

    @cached_property
    def with_targets(self) -> jax.ShapeDtypeStruct:
        """What a hop carries that says, too, how many targets its microbatch has."""
        targets = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.eval_shape(with_targets, self.travelling, targets)

    def unpack(self, array: Array) -> Float[Array, "*batch channels"]:
        """Decode to what stages compute with; an array that has not travelled stays as it is."""
        if array.dtype != jnp.int8:
            return array.astype(self.computed.dtype)
        return unpacked(array, self.width, self.computed.shape[-1]).astype(self.computed.dtype)


@dataclass(frozen=True)
class Wire:
    """How the two directions of a run travel: activations forward, their gradients back."""

    activations: WireFormat
    gradients: WireFormat


@jax.jit
def with_targets(array: Array, targets: Int[Array, ""]) -> Shaped[Array, " travelling"]:
    """Put an activation as it travels in one row, and its microbatch's targets behind it.

    They are four bytes, each a number that all dtypes hold as it is.
    """
    of_bytes = jax.lax.bitcast_convert_type(targets.astype(jnp.int32), jnp.int8)
    return jnp.concatenate([array.ravel(), of_bytes.astype(array.dtype)])


@functools.partial(jax.jit, static_argnums=1)
def without_targets(
    array: Shaped[Array, " travelling"], like: jax.ShapeDtypeStruct
) -> tuple[Array, Int[Array, ""]]:
    """Separate the activation, shaped as `like`, from the target tokens."""
    activation, of_bytes = jnp.split(array, [array.size - 4])
    targets = jax.lax.bitcast_convert_type(of_bytes.astype(jnp.int8), jnp.int32)
    return activation.reshape(like.shape), targets


def packed(
    numbers: Float[Array, "*batch width"],
    marks: Float[Array, "*batch marks"],
    fractions: Float[Array, "*batch width"] | None,
) -> Int8[Array, "*batch travelling"]:
    """Quantised numbers, marks and scales in one array.

    Rounds to the nearest, or up where a number's distance to the one below reaches past 1 with
    what `fractions`, of [0, 1), add to it.
    """
    groups = grouped(numbers.astype(jnp.float32))
    scales = scales_of(groups)
    quotients = groups / scales[..., None]
    if fractions is None:
        quotients = jnp.round(quotients)
    else:
        quotients = jnp.floor(quotients + grouped(fractions))
    # Rounding can carry the largest quotient past 127 by its last bit.
    quantised = jnp.clip(quotients, -LARGEST, LARGEST).astype(jnp.int8)
    flat = quantised.reshape(*numbers.shape[:-1], -1)[..., : numbers.shape[-1]]
    scale_bytes = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int8)
    behind = scale_bytes.reshape(*numbers.shape[:-1], -1)
    return jnp.concatenate([flat, marks.astype(jnp.int8), behind], axis=-1)


def unpacked(
    array: Int8[Array, "*batch travelling"], width: int, channels: int
) -> Float[Array, "*batch channels"]:
    """Restore the numbers that `packed` has quantised, `width` of them, and the marks."""
    quantised, marks, scale_bytes = jnp.split(array, [width, channels], axis=-1)
    scale_bytes = scale_bytes.reshape(*array.shape[:-1], -1, SCALE_BYTES)
    scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.bfloat16).astype(jnp.float32)
    numbers = grouped(quantised.astype(jnp.float32)) * scales[..., None]
    flat = numbers.reshape(*array.shape[:-1], -1)[..., :width]
    return jnp.concatenate([flat, marks.astype(jnp.float32)], axis=-1)


def grouped(numbers: Float[Array, "*batch width"]) -> Float[Array, "*batch groups channels"]:
    """Channels in groups of one scale each, the last one filled up with zeros."""
    width = numbers.shape[-1]
    size = min(width, CHANNELS_OF_A_SCALE)
    beyond = -width % size
    if beyond:
        numbers = jnp.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, beyond)])
    return numbers.reshape(*numbers.shape[:-1], -1, size)


def scales_of(
    groups: Float[Array, "*batch groups channels"],
) -> Float[Array, "*batch groups"]:
    """Return what each group is divided by: a bfloat16, NaN if the group is not all finite."""
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scales = jnp.maximum(largest / LARGEST, LEAST_SCALE)
    # A bfloat16 is the upper half of a float32: with any bit in the lower one, the next is taken.
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + 0xFFFF) >> 16 << 16, jnp.float32)
    return jnp.where(jnp.isfinite(largest), rounded, jnp.nan)


def drawn_fractions(draw: Draw, shape: tuple[int, ...]) -> Float[Array, "*batch width"]:
    """Draw from [0, 1), evenly, in steps of 2^-16, the same on every device."""
    seed, *numbers = draw
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    # A draw of 32 bits serves two numbers.
    pairs = jax.random.bits(key, (*shape[:-1], -(-shape[-1] // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(pairs, jnp.uint16)
    bits = halves.reshape(*shape[:-1], -1)[..., : shape[-1]]
    return bits.astype(jnp.float32) * 2.0**-16
