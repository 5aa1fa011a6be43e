"""Cross-entropy from the input of the head, for one chunk of tokens at a time.

The logits of all tokens would be the largest array, 2.1 GB for 4,096 tokens and a vocabulary of
128,256, and their gradient another one. Here only those of one chunk exist at a time. If a gradient
is needed, it is made while the chunk's logits exist, which takes three products with the head
instead of four.

Optax and Flax start from logits. Tokamax has a kernel that starts from the head, but it counts
every token, has no z-loss, and is described as under heavy development.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skippipe_jax.models.attention import product
from skippipe_jax.models.footprint import tokens_of_chunk
from skippipe_jax.models.sharding import EVERY_PART, constrained

NO_TARGET = -1
"""Target of the tokens that pad the last chunk. No negative target counts."""

Hidden = Float[Array, "token width"]
Targets = Int[Array, " token"]
PerToken = Float[Array, " token"]

Axes = Literal["wv", "vw"]
"""Axes of the head's matrix: of a head of its own, or of an embedding that is also the head."""


@dataclass(frozen=True)
class Head:
    """Matrix between width and vocabulary, as stored."""

    matrix: Float[Array, "_ _"]
    axes: Axes

    @property
    def vocabulary_size(self) -> int:
        """Number of logits of a token."""
        return self.matrix.shape[self.axes.index("v")]

    def cast(self, dtype: Any) -> Head:
        """Return the same head in another dtype."""
        return Head(self.matrix.astype(dtype), self.axes)

    def logits(self, hidden: Float[Array, "*batch width"]) -> Float[Array, "*batch vocabulary"]:
        """Return the scores of the next token: a product in the dtype of `hidden`, float32 sums."""
        logits = product(f"...w,{self.axes}->...v", hidden, self.cast(hidden.dtype).matrix)
        return constrained(logits, *[None] * (hidden.ndim - 1), EVERY_PART)


def cross_entropy(
    hidden: Hidden,
    head: Head,
    targets: Targets,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return the minimized loss and its two terms, summed over all tokens that have a target.

    The terms are the cross-entropy in nats, and `z_loss` times log(Z)^2, where Z is the denominator
    of the softmax. Only the loss has a gradient: separate ones of the terms would be two arrays of
    the head's size. A negative target does not count. `chunk` is the number of tokens taken at a
    time, by default that of `tokens_of_chunk`.
    """
    chunk = chunk or tokens_of_chunk(len(targets), head.vocabulary_size)
    hidden, matrix = constrained(hidden, None, None), _in_parts(head.matrix, head.axes)
    minimised, nats, of_z = _cross_entropy(hidden, matrix, targets, head.axes, z_loss, chunk)
    return minimised, jax.lax.stop_gradient(nats), jax.lax.stop_gradient(of_z)


def scores(
    hidden: Hidden, head: Head, targets: Targets, chunk: int | None = None
) -> tuple[PerToken, Bool[Array, " token"]]:
    """Return each token's cross-entropy in nats, and whether its target is the likeliest token.

    A token without a target has 0 nats, and counts as the likeliest.
    """
    chunk = chunk or tokens_of_chunk(len(targets), head.vocabulary_size)
    head = head.cast(hidden.dtype)

    def of_chunk(carry: None, hidden: Hidden, targets: Targets) -> tuple[None, Any]:
        logits = head.logits(hidden)
        nats, _, _ = _softmax(logits, targets)
        return carry, (nats, (jnp.argmax(logits, axis=-1) == targets) | (targets < 0))

    return _over_chunks(of_chunk, None, hidden, targets, chunk)[1]


def _without_gradient(
    hidden: Hidden, matrix: Array, targets: Targets, axes: Axes, z_loss: float, chunk: int
) -> tuple[Array, Array, Array]:
    # Cast once, not in every chunk.
    head = Head(matrix, axes).cast(hidden.dtype)

    def of_chunk(carry: None, hidden: Hidden, targets: Targets) -> tuple[None, Any]:
        return carry, _softmax(head.logits(hidden), targets)[:2]

    _, (nats, log_z) = _over_chunks(of_chunk, None, hidden, targets, chunk)
    return _sums(nats, log_z, targets, z_loss)


def _with_gradient(
    hidden: Hidden, matrix: Array, targets: Targets, axes: Axes, z_loss: float, chunk: int
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    """Return the sums, and the gradients of the loss."""
    head = Head(matrix, axes).cast(hidden.dtype)

    def of_chunk(of_head: Array, hidden: Hidden, targets: Targets) -> tuple[Array, Any]:
        nats, log_z, softmax = _softmax(head.logits(hidden), targets)
        weight = (targets >= 0) * (1.0 + 2.0 * z_loss * log_z)
        of_logits = weight[:, None] * softmax - jax.nn.one_hot(targets, head.vocabulary_size)
        # Products with the logits' gradient are in the compute dtype, with float32 sums, as those
        # of the logits are; float32 products would take a GPU many times as long.
        of_logits = constrained(of_logits.astype(hidden.dtype), None, EVERY_PART)
        of_hidden = product(f"tv,{axes}->tw", of_logits, head.matrix)
        of_head += product(f"tw,tv->{axes}", hidden, of_logits)
        return _in_parts(of_head, axes), (nats, log_z, constrained(of_hidden, None, None))

    zeros = _in_parts(jnp.zeros(matrix.shape, jnp.float32), axes)
    of_head, per_token = _over_chunks(of_chunk, zeros, hidden, targets, chunk)
    nats, log_z, of_hidden = per_token
    # Empty arrays carry the dtypes of the gradients.
    dtypes = jnp.zeros(0, hidden.dtype), jnp.zeros(0, matrix.dtype)
    return _sums(nats, log_z, targets, z_loss), (of_hidden, of_head, *dtypes)


def _times_cotangent(
    axes: Axes, z_loss: float, chunk: int, saved: tuple[Array, ...], cotangents: tuple[Array, ...]
) -> tuple[Array, Array, None]:
    del axes, z_loss, chunk
    of_hidden, of_matrix, like_hidden, like_matrix = saved
    factor, *_ = cotangents
    return (
        (factor * of_hidden).astype(like_hidden.dtype),
        (factor * of_matrix).astype(like_matrix.dtype),
        None,
    )


_cross_entropy = jax.custom_vjp(_without_gradient, nondiff_argnums=(3, 4, 5))
_cross_entropy.defvjp(_with_gradient, _times_cotangent)


def _in_parts(matrix: Array, axes: Axes) -> Array:
    """Split the head's matrix over the vocabulary: no device of a mesh holds all of it."""
    return constrained(matrix, *(EVERY_PART if axis == "v" else None for axis in axes))


def _softmax(
    logits: Float[Array, "token vocabulary"], targets: Targets
) -> tuple[PerToken, PerToken, Float[Array, "token vocabulary"]]:
    """Return each token's cross-entropy [nats], 0 without a target; log Z; the probabilities."""
    greatest = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - greatest)
    z = jnp.sum(exponentials, axis=-1, keepdims=True)
    wanted = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)
    nats = jnp.where(targets[:, None] >= 0, jnp.log(z) - (wanted - greatest), 0.0)
    return nats[:, 0], (jnp.log(z) + greatest)[:, 0], exponentials / z


def _sums(
    nats: PerToken, log_z: PerToken, targets: Targets, z_loss: float
) -> tuple[Array, Array, Array]:
    total = jnp.sum(nats)
    # Without z-loss, its sum is not computed.
    of_z = z_loss * jnp.sum(log_z**2, where=targets >= 0) if z_loss else jnp.zeros(())
    return total + of_z, total, of_z


def _over_chunks(
    of_chunk: Callable[[Any, Hidden, Targets], tuple[Any, Any]],
    carry: Any,
    hidden: Hidden,
    targets: Targets,
    chunk: int,
) -> tuple[Any, Any]:
    """Run `of_chunk` on every chunk, and return its last carry and its results for each token."""
    tokens = len(targets)
    chunks = -(-tokens // chunk)
    if chunks == 1:
        return of_chunk(carry, hidden, targets)
    missing = chunks * chunk - tokens
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(chunks, chunk, -1)
    targets = jnp.pad(targets, (0, missing), constant_values=NO_TARGET).reshape(chunks, chunk)
    carry, per_token = jax.lax.scan(
        lambda carry, own: of_chunk(carry, *own), carry, (hidden, targets)
    )
    return carry, jax.tree.map(
        lambda rows: rows.reshape(chunks * chunk, *rows.shape[2:])[:tokens], per_token
    )
