"""Decoding with a cache: each token runs through the stages once, whichever stages these are.

A stage keeps the keys and values of all positions so far in arrays of fixed size, so one program
serves every token after the prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray
from skippipe_sched.errors import InputError

from skippipe_jax.config import ModelConfig
from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.partial import Order
from skippipe_jax.models.llama import Block, DataStage, Stage, precise, rotate, rotations

if TYPE_CHECKING:
    from skippipe_jax.inference.staged_model import StagedModel

# Caches and prompts are padded to powers of two, so that few sizes are compiled.
LEAST_LENGTH = 16
# Below this every draw is the likeliest token, and the logits over it would not stay finite.
LEAST_TEMPERATURE = 1e-6


class Cache(NamedTuple):
    """Keys and values at every position, of the blocks of a stage or of one block."""

    keys: Float[Array, "*layers batch length kv_heads head_width"]
    values: Float[Array, "*layers batch length kv_heads head_width"]


def generate_tokens(
    model: StagedModel,
    order: Order,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    end: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens that go on from a prompt of at least one, until `end`, as they come.

    Raises:
        InputError: if prompt and tokens are longer than the model's context.
    """
    structures = tuple(model.structures[stage] for stage in order)
    parameters = [model.parameters[stage] for stage in order]
    length = length_for(prompt, count, model.context)
    caches = empty_caches(model, order, 1, length)
    key = jax.random.key(sampling.seed)

    def next_of(tokens: Array, start: int, last: int) -> Array:
        nonlocal caches
        tokens, caches = next_token(
            structures,
            parameters,
            caches,
            tokens,
            start,
            last,
            key,
            float(sampling.temperature),
            sampling.top_p,
        )
        return tokens

    yield from one_by_one(next_of, prompt, count, length, end)


def length_for(prompt: Sequence[int], count: int, context: int) -> int:
    """Positions of the caches for a prompt and so many tokens.

    Raises:
        InputError: if they are more than the context.
    """
    if len(prompt) + count > context:
        room = context - len(prompt)
        raise InputError(
            "--max-new-tokens",
            count,
            f"the model's context is {context} tokens, and the prompt has {len(prompt)}",
            f"Ask for {room} or fewer" if room > 0 else "Shorten the prompt",
        )
    return padded_length(len(prompt) + count, context)


def one_by_one(
    next_of: Callable[[Any, int, int], Int[Array, "1 1"]],
    prompt: Sequence[int],
    count: int,
    length: int,
    end: int | None,
) -> Iterator[int]:
    """Up to `count` tokens after a prompt, until `end`.

    `next_of` tokens [1, time], of which those behind `last` are padding, at the positions from
    `start` on, gives the one that comes next.
    """
    tokens: Any = np.zeros((1, padded_length(len(prompt), length)), np.int32)
    tokens[0, : len(prompt)] = prompt
    start, last = 0, len(prompt) - 1
    for _ in range(count):
        tokens = next_of(tokens, start, last)
        token = int(tokens[0, 0])
        if token == end:
            return
        yield token
        start, last = start + last + 1, 0


@overload
def continued(
    tokenizer: Tokenizer, prompt: str, draw: Callable[[list[int]], Iterator[int]]
) -> str: ...


@overload
def continued(
    tokenizer: Tokenizer, prompt: Sequence[int], draw: Callable[[list[int]], Iterator[int]]
) -> list[int]: ...


def continued(
    tokenizer: Tokenizer, prompt: str | Sequence[int], draw: Callable[[list[int]], Iterator[int]]
) -> str | list[int]:
    """A text that goes on from a prompt, or tokens from tokens, as `draw` takes and gives them."""
    if not isinstance(prompt, str):
        return [*draw([int(token) for token in prompt])]
    given = [tokenizer.begin, *map(int, tokenizer.encode(prompt))]
    # Some tokenizers write a token otherwise at the beginning of a text.
    decode = tokenizer.decode
    return decode([*given, *draw(given)])[len(decode(given)) :]


def text_pieces(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int], tokens: Iterable[int]
) -> Iterator[str]:
    """Return the text that tokens add to a prompt, as soon as the characters in it are whole.

    Some tokenizers write a token otherwise at the beginning of a text, so each piece is what it
    adds to the piece before it.
    """
    before, pending = list(prompt), []
    for token in tokens:
        pending.append(token)
        text = decode(before + pending)
        # A character of several bytes whose last ones are yet to come.
        if not text.endswith("\ufffd"):
            yield text[len(decode(before)) :]
            before, pending = pending, []
    if pending:
        yield decode(before + pending)[len(decode(before)) :]


def padded_length(needed: int, most: int) -> int:
    """A length that others share: the next power of two, or `most`."""
    return min(max(LEAST_LENGTH, 1 << (needed - 1).bit_length()), most)


def empty_caches(model: StagedModel, order: Order, batch: int, length: int) -> list[Cache]:
    """Room for `length` positions in each stage of the order."""
    config = model.config
    layers = config.layers_of_stages(model.stages)

    def empty(stage: int) -> Array:
        shape = (layers[stage], batch, length, config.kv_heads, config.head_width)
        return jnp.zeros(shape, config.compute_dtype)

    return [Cache(empty(stage), empty(stage)) for stage in order]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def next_token(
    structures: tuple[Any, ...],
    parameters: Sequence[Any],
    caches: Sequence[Cache],
    tokens: Int[Array, "batch time"],
    start: Int[Array, ""],
    last: Int[Array, ""],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
) -> tuple[Int[Array, "batch 1"], list[Cache]]:
    """Return the token drawn after `tokens[:, last]`, and the caches; see `advance`."""
    logits, caches = advance(structures, parameters, caches, tokens, start, last)
    drawn = sample(logits, jax.random.fold_in(key, start + last), temperature, top_p)
    return drawn[:, None], caches


def advance(
    structures: tuple[Any, ...],
    parameters: Sequence[Any],
    caches: Sequence[Cache],
    tokens: Int[Array, "batch time"],
    start: Int[Array, ""],
    last: Int[Array, ""],
) -> tuple[Float[Array, "batch vocabulary"], list[Cache]]:
    """Run tokens at the positions from `start` on through the stages, the data stage first.

    Returns the logits behind `tokens[:, last]`, and the caches with what the tokens leave there.
    Tokens behind `last` are padding: what they leave is overwritten before anything looks at it.
    """
    data_stage, x, filled = run_stages(structures, parameters, caches, tokens, start)
    return logits_behind(data_stage, x, last), filled


def run_stages(
    structures: tuple[Any, ...],
    parameters: Sequence[Any],
    caches: Sequence[Cache],
    tokens: Int[Array, "batch time"],
    start: Int[Array, ""],
) -> tuple[DataStage, Float[Array, "batch time width"], list[Cache]]:
    """The data stage, the residual stream after all stages, and the caches, as in `advance`."""
    stages = [nnx.merge(*pair) for pair in zip(structures, parameters, strict=True)]
    data_stage: DataStage = stages[0]
    x = data_stage.embedding[...][tokens].astype(data_stage.config.compute_dtype)
    filled = []
    for stage, cache in zip(stages, caches, strict=True):
        x, cache = run_stage(stage, x, cache, start)
        filled.append(cache)
    return data_stage, x, filled


def logits_behind(
    data_stage: DataStage, x: Float[Array, "batch time width"], last: Int[Array, ""]
) -> Float[Array, "batch vocabulary"]:
    """Return the logits of the token behind position `last`."""
    return data_stage.logits(jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1))[:, 0]


@precise
def run_stage(
    stage: Stage, x: Float[Array, "batch time width"], cache: Cache, start: Int[Array, ""]
) -> tuple[Float[Array, "batch time width"], Cache]:
    """Return the residual stream after all blocks of a stage, and its cache."""
    structure, parameters = nnx.split(stage.blocks)

    def run_block(x: Array, own: tuple[Any, Cache]) -> tuple[Array, Cache]:
        block: Block = nnx.merge(structure, own[0])
        attended, cache = attend(block, block.attention_norm(x), own[1], start)
        x = x + attended
        return x + block.feed_forward(block.ffn_norm(x)), cache

    return jax.lax.scan(run_block, x, (parameters, cache))


def attend(
    block: Block, x: Float[Array, "batch time width"], cache: Cache, start: Int[Array, ""]
) -> tuple[Float[Array, "batch time width"], Cache]:
    """Causal attention from positions `start` on to these and all before them."""
    config: ModelConfig = block.config
    heads = (*x.shape[:2], -1, config.head_width)
    positions = (start + jnp.arange(x.shape[1]))[None]
    by = rotations(config, positions)
    key = rotate(block.key(x).reshape(heads), by)
    cache = Cache(
        jax.lax.dynamic_update_slice_in_dim(cache.keys, key, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(
            cache.values, block.value(x).reshape(heads), start, axis=1
        ),
    )
    attended = jax.nn.dot_product_attention(
        rotate(block.query(x).reshape(heads), by),
        cache.keys,
        cache.values,
        mask=jnp.arange(cache.keys.shape[1]) <= positions[:, None, :, None],
        implementation="xla",
    )
    return block.output(attended.reshape(x.shape)), cache


def sample(
    logits: Float[Array, "batch vocabulary"],
    key: PRNGKeyArray,
    temperature: Float[Array, ""] | float,
    top_p: Float[Array, ""] | float,
) -> Int[Array, " batch"]:
    """One token of each row, drawn as `Sampling` says."""
    scaled = logits / jnp.maximum(temperature, LEAST_TEMPERATURE)
    descending = jnp.sort(scaled, axis=-1, descending=True)
    chances = jax.nn.softmax(descending, axis=-1)
    likelier = jnp.cumsum(chances, axis=-1) - chances
    least = jnp.min(jnp.where(likelier < top_p, descending, jnp.inf), axis=-1, keepdims=True)
    drawn = jax.random.categorical(key, jnp.where(scaled >= least, scaled, -jnp.inf), axis=-1)
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
