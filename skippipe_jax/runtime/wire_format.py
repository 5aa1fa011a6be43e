"""Encoding of activations and their gradients in hops: in fewer bytes, if so configured.

float32 and bfloat16 are casts. int8 is quantized: each token's channels are cut into groups, and a
group x has one scale, its largest magnitude / 127, rounded up to bfloat16 so that nothing is
clipped. A hop carries q = round(x / scale), from -127 to 127, followed by the bytes of the scales
as int8, in one array. Zeros stay zeros. A group with any number that is not finite becomes all NaN.

Packing and unpacking are parts of the jitted stage functions, so that fewer bytes leave the device.
They work on any array whose last axis has the channels of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from skippipe_jax.models.footprint import ACTIVATION_SCALE_BYTES
from skippipe_jax.optim.rounding import LARGEST, from_int8, grouped, to_int8

# A scale is at least the smallest normal number, below which the results of devices differ.
LEAST_SCALE = float(jnp.finfo(jnp.bfloat16).tiny)

HopSeed = UInt32[Array, "4"]
"""Seed of a stochastic rounding: seed of the run, step, microbatch and stage."""


@dataclass(frozen=True)
class WireFormat:
    """Encoding of arrays of one shape. `pack` and `unpack` are pure and may be traced.

    Attributes:
        computed: shape and dtype of the arrays of stages, [batch, time, channels].
        dtype: float32, bfloat16 or int8.
        width: number of channels that are encoded. A further channel, which marks where documents
            begin, stays exact: 0 or 1, and 0 in a gradient.
        rounding: `nearest`, or `stochastic`, which is unbiased in the mean.
    """

    computed: jax.ShapeDtypeStruct
    dtype: str
    width: int
    rounding: str = "nearest"

    @cached_property
    def travelling(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array of a hop."""
        return jax.eval_shape(self.pack, self.computed, jax.ShapeDtypeStruct((4,), jnp.uint32))

    @property
    def is_drawn(self) -> bool:
        """True if packing rounds stochastically, and so needs a seed."""
        return self.dtype == "int8" and self.rounding == "stochastic"

    def pack(self, array: Float[Array, "*batch channels"], draw: HopSeed | None = None) -> Array:
        """Encode an array for a hop; `draw` is the seed of stochastic rounding."""
        if self.dtype != "int8":
            return array.astype(self.dtype)
        numbers, marks = array[..., : self.width], array[..., self.width :]
        groups = grouped(numbers.astype(jnp.float32))
        scales = scales_of(groups)
        quotients = groups / scales[..., None]
        if self.is_drawn:
            assert draw is not None, "stochastic rounding without a seed"
            quotients = jnp.floor(quotients + grouped(drawn_fractions(draw, numbers.shape)))
        else:
            quotients = jnp.round(quotients)
        quantised = to_int8(quotients, self.width)
        scale_bytes = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.int8)
        behind = scale_bytes.reshape(*numbers.shape[:-1], -1)
        return jnp.concatenate([quantised, marks.astype(jnp.int8), behind], axis=-1)

    def unpack(self, array: Array) -> Float[Array, "*batch channels"]:
        """Decode the array of a hop for computation; an array that is not encoded is unchanged."""
        if array.dtype != jnp.int8:
            return array.astype(self.computed.dtype)
        ends = [self.width, self.computed.shape[-1]]
        quantised, marks, scale_bytes = jnp.split(array, ends, axis=-1)
        scale_bytes = scale_bytes.reshape(*array.shape[:-1], -1, ACTIVATION_SCALE_BYTES)
        scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.bfloat16).astype(jnp.float32)
        numbers = [from_int8(quantised, scales), marks.astype(jnp.float32)]
        return jnp.concatenate(numbers, axis=-1).astype(self.computed.dtype)


@dataclass(frozen=True)
class Wire:
    """Encodings of a run: of activations forward, and of their gradients back."""

    activations: WireFormat
    gradients: WireFormat


def scales_of(
    groups: Float[Array, "*batch groups channels"],
) -> Float[Array, "*batch groups"]:
    """Return the scale of each group: a bfloat16, NaN if the group is not all finite."""
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scales = jnp.maximum(largest / LARGEST, LEAST_SCALE)
    # A bfloat16 is the upper half of a float32; any bit in the lower half rounds up.
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + 0xFFFF) >> 16 << 16, jnp.float32)
    return jnp.where(jnp.isfinite(largest), rounded, jnp.nan)


def drawn_fractions(draw: HopSeed, shape: tuple[int, ...]) -> Float[Array, "*batch width"]:
    """Draw uniformly from [0, 1), in steps of 2^-16, the same on every device."""
    seed, *numbers = draw
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    # 32 random bits serve two numbers.
    pairs = jax.random.bits(key, (*shape[:-1], -(-shape[-1] // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(pairs, jnp.uint16)
    bits = halves.reshape(*shape[:-1], -1)[..., : shape[-1]]
    return bits.astype(jnp.float32) * 2.0**-16
