"""LLaMA 2 and 3 models, partitioned into stages.

A `Block` is one transformer layer, a `Stage` is consecutive blocks, and the `DataStage` also has
the embedding, the final norm and the head. A microbatch starts and ends at a data stage, so tokens
and targets never leave their node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import (
    convert_element_type_p,
    logistic_p,
    mul_p,
    sharding_constraint_p,
    sub_p,
)
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Real

from skippipe_jax.config import ModelConfig
from skippipe_jax.config.model import rotations_as_constants
from skippipe_jax.models.attention import ATTENDED, attend, implementation_of
from skippipe_jax.models.cross_entropy import Head, cross_entropy, scores
from skippipe_jax.models.document_mask import (
    mark,
    positions_in_documents,
    unmark,
    unmark_tokens,
)
from skippipe_jax.models.sharding import (
    ALL_TIME,
    BATCH,
    FSDP,
    TENSOR,
    TIME,
    constrained,
    in_use,
    over_heads,
)

P = ParamSpec("P")
R = TypeVar("R")

QUICK = {convert_element_type_p, logistic_p, mul_p, sharding_constraint_p, sub_p}
"""Elementwise operations and sharding constraints: recomputed rather than kept."""


def rotary_frequencies(
    config: ModelConfig, library: Any = np
) -> Float[Array | np.ndarray, " half_head"]:
    """Return the radians per position of each rotated pair, with Llama 3's scaling if configured.

    With NumPy as `library` they are constants of a program; with `jax.numpy` it computes them.
    """
    exponents = library.arange(0, config.head_width, 2, dtype=np.float32) / config.head_width
    frequencies = np.float32(config.rope_theta) ** -exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * np.pi)
    smooth = (turns - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    smooth = library.clip(smooth, 0.0, 1.0)
    scaled = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return scaled.astype(np.float32)


Rotations = tuple[
    Float[Array | np.ndarray, "#batch time 1 half_head"],
    Float[Array | np.ndarray, "#batch time 1 half_head"],
]
"""Cosine and sine of the angle by which each pair of a head is rotated."""


def rotations(config: ModelConfig, positions: Real[Array | np.ndarray, "#batch time"]) -> Rotations:
    """Return the rotations of tokens at `positions`; constants of a program if these are NumPy's.

    On a processor, XLA would otherwise compute cosines again for each sequence and head.
    """
    library = np if isinstance(positions, np.ndarray) else jnp
    frequencies = rotary_frequencies(config, library)
    angles = positions.astype(np.float32)[:, :, None, None] * frequencies
    return library.cos(angles), library.sin(angles)


def rotate(
    x: Float[Array, "batch time heads head_width"], by: Rotations
) -> Float[Array, "batch time heads head_width"]:
    """Rotate each pair (first half, second half) of a head."""
    cos, sin = by
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return _kept(turned.astype(x.dtype))


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32 for any compute dtype."""

    def __init__(self, config: ModelConfig):
        """Create one scale per channel, initially 1."""
        self.scale = nnx.Param(jnp.ones(config.width, config.parameter_dtype))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Normalize the last axis."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Linear(nnx.Module):
    """Matrix without bias, stored in the parameter dtype and applied in the compute dtype."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        """Draw the kernel from a normal distribution."""
        initial = jax.random.normal(rngs.params(), (inputs, outputs), config.parameter_dtype)
        self.kernel = nnx.Param(initial * config.deviation)
        self.compute_dtype = config.compute_dtype

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Multiply the last axis by the kernel."""
        return x @ self.kernel[...].astype(self.compute_dtype)


class Block(nnx.Module):
    """One layer: attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Create the parameters of one layer."""
        self.config = config
        kv_width = config.kv_heads * config.head_width
        self.attention_norm = RMSNorm(config)
        self.query = Linear(config, config.width, config.width, rngs)
        self.key = Linear(config, config.width, kv_width, rngs)
        self.value = Linear(config, config.width, kv_width, rngs)
        self.output = Linear(config, config.width, config.width, rngs)
        self.ffn_norm = RMSNorm(config)
        self.gate = Linear(config, config.width, config.ffn_width, rngs)
        self.up = Linear(config, config.width, config.ffn_width, rngs)
        self.down = Linear(config, config.ffn_width, config.width, rngs)

    def __call__(
        self, x: Float[Array, "batch time width"], positions: Int[Array, "batch time"] | None = None
    ) -> Float[Array, "batch time width"]:
        """Return the residual stream after this layer, for `positions` in packed documents."""
        x = x + _cut(self.attend(_whole(self.attention_norm(x)), positions))
        return x + _cut(self.feed_forward(_whole(self.ffn_norm(x))))

    def project(
        self, x: Float[Array, "batch time width"], by: Rotations
    ) -> tuple[
        Float[Array, "batch time heads head_width"],
        Float[Array, "batch time kv_heads head_width"],
        Float[Array, "batch time kv_heads head_width"],
    ]:
        """Return queries, keys and values of each head, the first two rotated."""
        heads = (*x.shape[:2], -1, self.config.head_width)
        query = rotate(self.query(x).reshape(heads), by)
        return query, rotate(self.key(x).reshape(heads), by), self.value(x).reshape(heads)

    def feed_forward(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """Apply SwiGLU to each position."""
        gate, up = (constrained(own(x), BATCH, ALL_TIME, TENSOR) for own in (self.gate, self.up))
        return self.down(jax.nn.silu(gate) * up)

    def attend(
        self, x: Float[Array, "batch time width"], positions: Int[Array, "batch time"] | None
    ) -> Float[Array, "batch time width"]:
        """Apply causal grouped-query attention in each document, where rotary positions start at 0.

        Blocks take `positions` instead of a mask, which would grow with the square of time.
        """
        length = x.shape[1]
        if positions is None:
            are_constants = rotations_as_constants(length, self.config.head_width)
            by = rotations(self.config, (np if are_constants else jnp).arange(length)[None])
            documents = None
        else:
            by = rotations(self.config, positions)
            documents = jnp.arange(length) - positions
        implementation = implementation_of(self.config, length, jax.default_backend())
        attend_heads = over_heads(functools.partial(attend, implementation=implementation))
        attended = attend_heads(*self.project(x, by), documents)
        return self.output(constrained(attended, BATCH, ALL_TIME, TENSOR))


def precise(function: Callable[P, R]) -> Callable[P, R]:
    """Make a method of a stage multiply matrices in the precision of its configuration."""

    @functools.wraps(function)
    def own(*arguments: P.args, **how: P.kwargs) -> R:
        stage: Any = arguments[0]
        with jax.default_matmul_precision(stage.config.matmul_precision):
            return function(*arguments, **how)

    return own


class Stage(nnx.Module):
    """Consecutive blocks, run under `jax.lax.scan` so that compile time does not grow with depth.

    A block's parameters are drawn from the seed and its index in the whole model, so they do not
    depend on the partition into stages. If documents are packed, activations have one channel more
    than the width (see `skippipe_jax.models.document_mask`).
    """

    def __init__(
        self, config: ModelConfig, layers: int, first_layer: int | Array, key: PRNGKeyArray
    ):
        """Create `layers` blocks, the first of which is layer `first_layer` of the model."""
        self.config = config
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(
            first_layer + jnp.arange(layers)
        )
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(keys)

    @precise
    def __call__(
        self, x: Float[Array, "batch time channels"]
    ) -> Float[Array, "batch time channels"]:
        """Return the residual stream after all blocks, with the marks of its input."""
        structure, parameters = nnx.split(self.blocks)
        x, begins = unmark(x, self.config.width)
        if begins is not None:
            begins = constrained(begins, BATCH, None)
        positions = None if begins is None else positions_in_documents(begins)

        def apply_block(x: Array, block_parameters: Any) -> tuple[Array, None]:
            own = in_use(block_parameters, self.config.compute_dtype)
            return _cut(nnx.merge(structure, own)(_cut(x), positions)), None

        x, _ = jax.lax.scan(recomputed(apply_block, self.config), x, parameters)
        return mark(x, begins)


class DataStage(Stage):
    """Stage where microbatches begin and end: embedding, blocks, final norm, head and loss."""

    def __init__(
        self, config: ModelConfig, layers: int, first_layer: int | Array, key: PRNGKeyArray
    ):
        """Create the blocks, the embedding, the final norm and the head."""
        super().__init__(config, layers, first_layer, key)
        embedding_key, head_key = jax.random.split(jax.random.fold_in(key, 2**31 - 1))
        shape = (config.vocabulary_size, config.width)
        initial = jax.random.normal(embedding_key, shape, config.parameter_dtype)
        self.embedding = nnx.Param(initial * config.deviation)
        self.final_norm = RMSNorm(config)
        if not config.tied_head:
            self.head = Linear(config, config.width, config.vocabulary_size, nnx.Rngs(head_key))

    def __call__(
        self, tokens: Int[Array, "batch time"] | Int[Array, "batch time 2"]
    ) -> Float[Array, "batch time channels"]:
        """Embed tokens, in the form of `marked_tokens`, and run the stage's own blocks."""
        tokens, begins = unmark_tokens(tokens)
        # In float32, so that gradients are summed in it: for a frequent token, a bfloat16 sum would
        # lose most of them.
        table = self.embedding[...].astype(jnp.float32)
        x = constrained(table[tokens], None, None, FSDP)
        return super().__call__(mark(_cut(x.astype(self.config.compute_dtype)), begins))

    @precise
    def logits(
        self, x: Float[Array, "batch time channels"]
    ) -> Float[Array, "batch time vocabulary"]:
        """Return the scores of the next token, in float32."""
        return self._head.logits(self._hidden(x))

    def loss(
        self, x: Float[Array, "batch time channels"], targets: Int[Array, "batch time"]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the sum of the cross-entropy over target tokens in nats, and the number of these.

        A negative target does not count.
        """
        nats, tokens, _, _ = self.loss_terms(x, targets)
        return nats, tokens

    @precise
    def loss_terms(
        self,
        x: Float[Array, "batch time channels"],
        targets: Int[Array, "batch time"],
        z_loss: float = 0.0,
    ) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        """Return the minimized loss, the number of target tokens, and the two terms of the loss.

        The terms are the cross-entropy in nats, and `z_loss` times the sum over target tokens of
        log(Z)^2, where Z is the denominator of the softmax: the sum of the exponentials of a
        token's logits. Only the loss has a gradient.
        """
        minimised, nats, of_z = cross_entropy(
            self._hidden(x).reshape(-1, self.config.width), self._head, targets.ravel(), z_loss
        )
        return minimised, jnp.sum(targets >= 0, dtype=jnp.float32), nats, of_z

    @precise
    def scores(
        self, x: Float[Array, "batch time channels"], targets: Int[Array, "batch time"]
    ) -> tuple[Float[Array, "batch time"], Bool[Array, "batch time"]]:
        """Return the cross-entropy of each target in nats, and whether it is the likeliest token.

        A negative target has 0 nats, and counts as the likeliest.
        """
        hidden = self._hidden(x).reshape(-1, self.config.width)
        nats, likeliest = scores(hidden, self._head, targets.ravel())
        return nats.reshape(targets.shape), likeliest.reshape(targets.shape)

    def _hidden(self, x: Float[Array, "batch time channels"]) -> Float[Array, "batch time width"]:
        """Return the input of the head."""
        x, _ = unmark(x, self.config.width)
        return self.final_norm(_cut(x))

    @property
    def _head(self) -> Head:
        if self.config.tied_head:
            return Head(self.embedding[...], "vw")
        return Head(self.head.kernel[...], "wv")


def _cut(x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
    """Return the residual stream, split as between blocks."""
    return constrained(x, BATCH, TIME, None)


def _whole(x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
    """Return the residual stream for matrix products: gathered over `tensor`, and kept."""
    return constrained(_cut(_kept(_cut(x))), BATCH, ALL_TIME, None)


def create_stage(
    config: ModelConfig, stage: int, stage_layers: Sequence[int], key: PRNGKeyArray
) -> Stage:
    """Create stage number `stage` of a model whose stages have `stage_layers` blocks."""
    kind = DataStage if stage == 0 else Stage
    return kind(config, stage_layers[stage], sum(stage_layers[:stage]), key)


def stage_shapes(config: ModelConfig, stages: int) -> Sequence[Any]:
    """Return shape and dtype of every parameter of every stage, without creating any."""
    layers = config.stage_partition(stages)
    return tuple(_shapes(config, min(stage, 1), own) for stage, own in enumerate(layers))


@functools.cache
def _shapes(config: ModelConfig, stage: int, layers: int) -> Any:
    create = functools.partial(create_stage, config, stage, (layers, layers))
    return jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(create(jax.random.key(0)))))


class StageStructure:
    """Structure of a stage, which makes a stage of parameters.

    Jitted functions take it as a static argument, and look it up at each call. Its hash is stored:
    flax would hash the whole description each time, which takes longer than a small stage.
    """

    def __init__(self, stage: Stage):
        """Store the structure of a stage, whose parameters may be shapes."""
        self._description = nnx.graphdef(stage)
        self._hash = hash(self._description)

    def __hash__(self) -> int:
        """Return the hash of the description."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Return whether both make the same stage of the same parameters."""
        if self is other:
            return True
        return isinstance(other, StageStructure) and self._description == other._description

    def merge(self, parameters: Any) -> Any:
        """Return the stage with these parameters; a `DataStage` if the structure is of one."""
        return nnx.merge(self._description, parameters)


def recomputed(apply_block: Callable, config: ModelConfig) -> Callable:
    """Return the scanned block with the checkpoint policy of `config.recompute`."""
    policies = jax.checkpoint_policies
    policy = {
        "none": _keep_all_but_quick,
        "stage": _keep_all_but_quick,
        "block": policies.nothing_saveable,
        "save_only_attention": policies.save_only_these_names(ATTENDED),
        "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
        "offload_dot_with_no_batch_dims": policies.offload_dot_with_no_batch_dims(
            "device", "pinned_host"
        ),
    }[config.recompute]
    return jax.checkpoint(apply_block, prevent_cse=False, policy=policy)


def _keep_all_but_quick(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a result is kept for the backward pass, as all but elementwise ones are.

    Cast weights, and arrays gathered from the devices of a node, would be copies for every
    microbatch in flight. Elementwise products, as in SwiGLU and norms, take no longer to compute
    than to write and read.
    """
    return primitive not in QUICK


def _kept(x: Array) -> Array:
    """Mark an input of matrix products as kept, even if it is an elementwise result."""
    return checkpoint_name(x, "factor")


def parameter_count(parameters: Any) -> int:
    """Count the numbers in a tree of parameters (or of their shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters))
