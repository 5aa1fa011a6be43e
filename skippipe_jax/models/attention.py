"""Causal attention within documents, in the implementation that suits the device.

- `xla`: all scores at once, T x T of them for each head.
- `blockwise`: plain JAX, a square of scores at a time, as in FlashAttention (arXiv 2205.14135,
  2307.08691). Nothing grows with the square of time, and squares of later keys are skipped.
- `cudnn`: the fused kernel of NVIDIA GPUs.
- `splash`: JAX's own kernel for TPUs, with documents as its segments.
- `auto`: `xla` for short sequences, else `cudnn` or `splash` if the device and the shapes allow it,
  else `blockwise`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from skippipe_jax.config import ModelConfig
from skippipe_jax.config.model import (
    AUTO,
    BLOCK,
    BLOCKWISE,
    CPU_BLOCK,
    CUDNN,
    PLATFORM_OF,
    SPLASH,
    XLA,
    holds_all_scores,
)
from skippipe_jax.models.document_mask import within_documents

ATTENDED = "attended"
"""Name, for JAX's checkpoint policies, of attention's output and of what its gradient needs."""

Queries = Float[Array, "batch time heads head_width"]
Attended = Float[Array, "batch time width"]
Keys = Float[Array, "batch time kv_heads head_width"]
Documents = Int[Array, "batch time"]
"""Position where the document of each token begins: equal for tokens of one document."""

TRIED_LENGTH, TRIED_DOCUMENT = 256, 96
TOLERANCE = 0.03
"""Relative error of bfloat16, whose last bit is a 256th, and of products of such numbers."""
SPLASH_BLOCKS = (512, 256, 128)
"""Queries, and keys, in a block: the largest number that divides the sequence is used."""


def implementation_of(model: ModelConfig, length: int, platform: str) -> str:
    """Return the implementation of attention for sequences of `length` tokens on a platform."""
    if holds_all_scores(model.attention, length):
        return XLA
    if model.attention != AUTO:
        return model.attention
    for kernel, own in PLATFORM_OF.items():
        if own == platform and not model.unsupported_reason(kernel, length):
            return kernel
    return BLOCKWISE


def attend(
    query: Queries, key: Keys, value: Keys, documents: Documents | None, implementation: str
) -> Attended:
    """Attend from each query to the keys up to its position, within its document if packed."""
    if implementation == BLOCKWISE:
        return blockwise(query, key, value, documents)
    if implementation == SPLASH:
        return splash(query, key, value, documents)
    attended = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if documents is None else within_documents(documents),
        is_causal=True,
        implementation="cudnn" if implementation == CUDNN else "xla",
    )
    return checkpoint_name(flat(attended), ATTENDED)


def flat(attended: Queries) -> Attended:
    """Concatenate the heads of each token."""
    return attended.reshape(*attended.shape[:2], -1)


def kernel_fault(kernel: str, model: ModelConfig, *, is_packed: bool) -> str:
    """Return the fault of a kernel on this device, as a part of a sentence; "" if it has none.

    A small attention and its gradient are compared with those of `xla`.
    """
    random = np.random.default_rng(0)
    group = model.heads // model.kv_heads
    shapes = [(1, TRIED_LENGTH, heads, model.head_width) for heads in (group, 1, 1, group)]
    arrays = [jnp.asarray(random.normal(size=own), model.compute_dtype) for own in shapes]
    arrays[3] = flat(arrays[3])
    places = np.arange(TRIED_LENGTH)[None]
    documents = jnp.asarray(places // TRIED_DOCUMENT * TRIED_DOCUMENT) if is_packed else None

    @functools.partial(jax.jit, static_argnums=1)
    def results(arrays: list[Array], implementation: str) -> list[Array]:
        own = functools.partial(attend, documents=documents, implementation=implementation)
        attended, vjp = jax.vjp(own, *arrays[:3])
        return [x.astype(jnp.float32) for x in (attended, *vjp(arrays[3]))]

    try:
        found = results(arrays, kernel)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"does not run on this device: {str(error).splitlines()[0]}"
    worst = max(
        float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))
        for one, other in zip(found, results(arrays, XLA), strict=True)
    )
    return "" if worst < TOLERANCE else f"deviates by {worst:.1%} on this device"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise(
    query: Queries,
    key: Keys,
    value: Keys,
    documents: Documents | None,
    block: int | None = None,
) -> Attended:
    """Compute attention in squares of `block` queries by as many keys, by default by the device.

    Scores and sums are in float32, and products in the dtype of their factors. For the gradient
    only inputs, outputs, and the logarithm of each query's sum of exponentials are kept.
    """
    return _forward(query, key, value, documents, block)[0]


def block_of(platform: str) -> int:
    """Return the block size of a platform; on a processor, small enough for its cache."""
    return CPU_BLOCK if platform == "cpu" else BLOCK


def _forward(
    query: Queries, key: Keys, value: Keys, documents: Documents | None, block: int | None
) -> tuple[Attended, tuple[Any, ...]]:
    tiles = _Tiles(query, key, value, documents, block)

    def of_queries(_: None, i: Array) -> tuple[None, tuple[Array, Array]]:
        rows = tiles.queries[i]

        def add_keys(back: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # The diagonal first: each query has a key there, its own, so `greatest` is finite.
            j = i - back
            weighted, total, greatest = sums
            scores = tiles.scores(rows, i, j)
            higher = jnp.maximum(greatest, jnp.max(scores, axis=-1))
            exponentials = jnp.exp(scores - higher[..., None])
            shrink = jnp.exp(greatest - higher)
            values = tiles.values[j]
            weighted = weighted * shrink[..., None] + product(
                "bkgqs,bksd->bkgqd", exponentials.astype(values.dtype), values
            )
            return weighted, total * shrink + jnp.sum(exponentials, axis=-1), higher

        nothing = jnp.zeros(rows.shape, jnp.float32)
        least = jnp.full(rows.shape[:-1], -jnp.inf)
        weighted, total, greatest = jax.lax.fori_loop(
            0, i + 1, add_keys, (nothing, nothing[..., 0], least)
        )
        attended = weighted / total[..., None]
        return None, (attended.astype(query.dtype), jnp.log(total) + greatest)

    _, (attended, log_sums) = jax.lax.scan(of_queries, None, jnp.arange(tiles.count))
    # The output and the kept array are one, in the shape of the next product.
    attended = checkpoint_name(flat(tiles.joined(attended)), ATTENDED)
    log_sums = checkpoint_name(log_sums, ATTENDED)
    return attended, (query, key, value, documents, attended, log_sums)


def _backward(
    block: int | None, kept: tuple[Any, ...], cotangent: Attended
) -> tuple[Queries, Keys, Keys, None]:
    query, key, value, documents, attended, log_sums = kept
    tiles = _Tiles(query, key, value, documents, block)
    cotangents = tiles.of_queries(cotangent.reshape(query.shape))
    # The softmax's gradient subtracts from each score's cotangent their mean by probability.
    means = jnp.sum(
        cotangents.astype(jnp.float32)
        * tiles.of_queries(attended.reshape(query.shape)).astype(jnp.float32),
        axis=-1,
    )

    def of_queries(of_all_keys: tuple[Array, Array], i: Array) -> tuple[Any, Array]:
        rows, own = tiles.queries[i], cotangents[i]

        def add_keys(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_rows, of_keys, of_values = sums
            probabilities = jnp.exp(tiles.scores(rows, i, j) - log_sums[i][..., None])
            of_probabilities = product("bkgqd,bksd->bkgqs", own, tiles.values[j])
            of_scores = probabilities * (of_probabilities - means[i][..., None]) * tiles.scale
            of_scores = of_scores.astype(rows.dtype)
            more_values = product("bkgqs,bkgqd->bksd", probabilities.astype(own.dtype), own)
            more_keys = product("bkgqs,bkgqd->bksd", of_scores, rows)
            return (
                of_rows + product("bkgqs,bksd->bkgqd", of_scores, tiles.keys[j]),
                of_keys.at[j].add(more_keys),
                of_values.at[j].add(more_values),
            )

        of_rows, of_keys, of_values = jax.lax.fori_loop(
            0, i + 1, add_keys, (jnp.zeros(rows.shape, jnp.float32), *of_all_keys)
        )
        return (of_keys, of_values), of_rows.astype(rows.dtype)

    zeros = jnp.zeros(tiles.keys.shape, jnp.float32)
    (of_keys, of_values), of_queries_ = jax.lax.scan(
        of_queries, (zeros, zeros), jnp.arange(tiles.count)
    )
    return (
        tiles.joined(of_queries_),
        tiles.joined(of_keys[:, :, :, None]).astype(key.dtype),
        tiles.joined(of_values[:, :, :, None]).astype(value.dtype),
        None,
    )


blockwise.defvjp(_forward, _backward)


class _Tiles:
    """Queries, keys and values split into blocks of tokens, the last one padded.

    Padding comes after all tokens, so no query of a token attends to it.
    """

    def __init__(
        self, query: Queries, key: Keys, value: Keys, documents: Documents | None, block: int | None
    ):
        _, self.length, self.heads, width = query.shape
        self.kv_heads = key.shape[2]
        self.block = min(block or block_of(jax.default_backend()), self.length)
        self.count = -(-self.length // self.block)
        self.scale = 1 / math.sqrt(width)
        self.queries = self.of_queries(query)
        self.keys, self.values = self._of_keys(key), self._of_keys(value)
        self.documents = None if documents is None else self._cut(documents)

    def _cut(
        self, array: Shaped[Array, "batch time ..."]
    ) -> Shaped[Array, "count batch block ..."]:
        missing = self.count * self.block - self.length
        array = jnp.pad(array, ((0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)))
        array = array.reshape(array.shape[0], self.count, self.block, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    def of_queries(self, query: Queries) -> Float[Array, "count batch kv_heads group block width"]:
        """Split queries into blocks, and group the heads that share keys."""
        cut = self._cut(query)
        cut = cut.reshape(*cut.shape[:3], self.kv_heads, -1, cut.shape[-1])
        return jnp.moveaxis(cut, 2, 4)

    def _of_keys(self, key: Keys) -> Float[Array, "count batch kv_heads block width"]:
        return jnp.moveaxis(self._cut(key), 2, 3)

    def joined(
        self, cut: Float[Array, "count batch kv_heads group block width"]
    ) -> Float[Array, "batch time heads_of_it width"]:
        """Invert `of_queries`, also for one head a group."""
        whole = jnp.moveaxis(jnp.moveaxis(cut, 4, 2), 0, 1)
        batch, width = whole.shape[0], whole.shape[-1]
        return whole.reshape(batch, self.count * self.block, -1, width)[:, : self.length]

    def scores(
        self, rows: Float[Array, "batch kv_heads group block width"], i: Array, j: Array
    ) -> Float[Array, "batch kv_heads group block block"]:
        """Return the scores of query block i and key block j, -inf where a key is masked."""
        scores = product("bkgqd,bksd->bkgqs", rows, self.keys[j]) * self.scale
        places = jnp.arange(self.block)
        is_seen = (i * self.block + places)[:, None] >= j * self.block + places
        if self.documents is not None:
            is_same = self.documents[i][:, :, None] == self.documents[j][:, None, :]
            is_seen = (is_seen & is_same)[:, None, None]
        return jnp.where(is_seen, scores, -jnp.inf)


def product(subscripts: str, a: Array, b: Array) -> Array:
    """Multiply arrays in the dtype of the factors, with sums in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def splash(
    query: Queries,
    key: Keys,
    value: Keys,
    documents: Documents | None,
    *,
    interpret: bool = False,
) -> Attended:
    """Compute attention by JAX's TPU kernel; with `interpret` by its emulation on any device."""
    length, width = query.shape[1], query.shape[-1]
    # Imported here because it is slow, and of use on TPUs alone.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    kernel: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.CausalMask((length, length))] * query.shape[2]
        ),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    arrays = [jnp.swapaxes(array, 1, 2) for array in (query / math.sqrt(width), key, value)]
    segments = None
    if documents is not None:
        segments = splash_attention_kernel.SegmentIds(documents, documents)
    attended = jax.vmap(kernel)(*arrays, segments)
    return flat(jnp.swapaxes(attended, 1, 2))
