"""Decoding with caches: each token runs through the stages once, many sequences side by side.

A `Generator` has slots, each for one sequence. Sequences enter and leave them while others go on,
and all arrays are of a few fixed sizes, so few programs serve all sequences. A stage runs by
itself, over a cache of its own: a `Decoder` may as well be one whose stages are on other hosts.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped, UInt
from skippipe_sched.errors import InputError

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.partial import Order
from skippipe_jax.models.llama import Block, DataStage, Stage, precise, rotations

if TYPE_CHECKING:
    from skippipe_jax.inference.language_model import LanguageModel
    from skippipe_jax.inference.staged_model import StagedModel

LEAST_LENGTH = 16
"""Caches and spans of prompts are padded to powers of two from here on, so few are compiled."""
PREFILL_TOKENS = 128
"""The most tokens of a prompt that run through the stages at once."""
LEAST_ATTENDED = 128
"""Attention looks at a power of two of positions, at least so many, not at all of a long cache."""
# Below this every draw is the likeliest token, and the logits over it would not stay finite.
LEAST_TEMPERATURE = 1e-6


class KVCache(NamedTuple):
    """Keys and values of a stage at every position of every slot."""

    keys: Float[Array, "layer slot kv_heads length head_width"]
    values: Float[Array, "layer slot kv_heads length head_width"]


class Step(NamedTuple):
    """Tokens that run through the stages together.

    Attributes:
        tokens: one of each slot, or a span of one slot's prompt.
        positions: the place of each in its sequence; that of padding is the length of the caches.
        slot: whose prompt it is; None if each row is the slot of its number.
    """

    tokens: Int[np.ndarray, "row time"]
    positions: Int[np.ndarray, "row time"]
    slot: int | None = None


class Decoder(Protocol):
    """What a `Generator` decodes with: a model, or several together."""

    @property
    def slots(self) -> int:
        """How many sequences it holds at a time."""
        ...

    @property
    def length(self) -> int:
        """How many positions each of them may have."""
        ...

    def prefill(self, step: Step) -> None:
        """Take in tokens that come next in the sequence of one slot."""
        ...

    def next_logits(self, step: Step) -> Float[Array, "slot vocabulary"]:
        """Take in a token of each slot, and return the logits of the one behind it."""
        ...


class StageExecutor:
    """The `Decoder` of one model: runs its stages, each over a cache of its own."""

    def __init__(self, model: StagedModel, order: Order, slots: int, length: int):
        """Make room for so many sequences of so many positions in each stage of an order."""
        self.model, self.order, self.slots, self.length = model, order, slots, length
        config = model.config

        def empty(stage: int) -> Array:
            shape = (model.cut[stage], slots, config.kv_heads, length, config.head_width)
            return jnp.zeros(shape, config.compute_dtype)

        self._caches = {stage: KVCache(empty(stage), empty(stage)) for stage in order}

    def forward(self, stage: int, x: Array | np.ndarray, step: Step) -> Array:
        """Return the residual stream [row time width] after a stage, whose cache then knows it.

        The data stage takes tokens [row time].
        """
        last = step.positions[step.positions < self.length].max(initial=0)
        attended = padded_length(int(last) + 1, self.length, LEAST_ATTENDED)
        structure, parameters = self.model.structures[stage], self.model.parameters[stage]
        after, self._caches[stage] = _forward(
            (structure, attended), parameters, self._caches[stage], x, step.positions, step.slot
        )
        return after

    def run(self, step: Step) -> Float[Array, "row time width"]:
        """Return the residual stream after all stages of the order."""
        x = self.forward(self.order[0], step.tokens, step)
        for stage in self.order[1:]:
            x = self.forward(stage, x, step)
        return x

    def prefill(self, step: Step) -> None:
        """Do what `Decoder.prefill` says."""
        self.run(step)

    def next_logits(self, step: Step) -> Float[Array, "slot vocabulary"]:
        """Return what `Decoder.next_logits` says."""
        return _logits(self.model.structures[0], self.model.parameters[0], self.run(step))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _forward(
    static: tuple[Any, int],
    parameters: Any,
    cache: KVCache,
    x: Array,
    positions: Int[Array, "row time"],
    slot: Int[Array, ""] | None,
) -> tuple[Float[Array, "row time width"], KVCache]:
    """Merge a stage and run it; `static` is its structure, and how many positions are looked at."""
    structure, attended = static
    return run_stage(nnx.merge(structure, parameters), x, cache, positions, slot, attended)


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    structure: Any, parameters: Any, x: Float[Array, "slot 1 width"]
) -> Float[Array, "slot vocabulary"]:
    return nnx.merge(structure, parameters).logits(x)[:, 0]


@precise
def run_stage(
    stage: Stage,
    x: Array,
    cache: KVCache,
    positions: Int[Array, "row time"],
    slot: Int[Array, ""] | None,
    attended: int,
) -> tuple[Float[Array, "row time width"], KVCache]:
    """Return the residual stream after all blocks of a stage, and its cache."""
    if isinstance(stage, DataStage):
        x = stage.embedding[...][x].astype(stage.config.compute_dtype)
    structure, parameters = nnx.split(stage.blocks)

    def run_block(carried: tuple[Array, KVCache], own: tuple[Array, Any]) -> Any:
        (x, cache), (layer, block_parameters) = carried, own
        block: Block = nnx.merge(structure, block_parameters)
        normed = block.attention_norm(x)
        added, cache = attend(block, normed, cache, layer, positions, slot, attended)
        x = x + added
        return (x + block.feed_forward(block.ffn_norm(x)), cache), None

    # Carried along, the cache is written in place; as outputs of the loop it would be copied.
    layers = jnp.arange(cache.keys.shape[0])
    (x, cache), _ = jax.lax.scan(run_block, (x, cache), (layers, parameters))
    return x, cache


def attend(
    block: Block,
    x: Float[Array, "row time width"],
    cache: KVCache,
    layer: Int[Array, ""],
    positions: Int[Array, "row time"],
    slot: Int[Array, ""] | None,
    attended: int,
) -> tuple[Float[Array, "row time width"], KVCache]:
    """Causal attention of tokens to the first `attended` positions of their slots."""
    query, key, value = block.project(x, rotations(block.config, positions))
    rows = jnp.arange(len(x))[:, None] if slot is None else slot

    def written(cached: Array, new: Array) -> Array:
        # Behind the last position, where padding is, nothing is written.
        return cached.at[layer, rows, :, positions].set(new, mode="drop")

    def seen(cached: Array) -> Array:
        _, slots, heads, _, width = cached.shape
        start = (layer, 0 if slot is None else slot, 0, 0, 0)
        size = (1, slots if slot is None else 1, heads, attended, width)
        return jax.lax.dynamic_slice(cached, start, size)[0]

    cache = KVCache(written(cache.keys, key), written(cache.values, value))
    keys, values = seen(cache.keys), seen(cache.values)
    grouped = query.reshape(*x.shape[:2], keys.shape[1], -1, keys.shape[-1])
    scores = jnp.einsum(
        "rtkgw,rksw->rkgts", grouped, keys, preferred_element_type=jnp.float32
    ) / np.sqrt(keys.shape[-1])
    is_past = jnp.arange(attended) <= positions[:, None, None, :, None]
    weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("rkgts,rksw->rtkgw", weights, values)
    return block.output(mixed.reshape(x.shape)), cache


@dataclass(frozen=True)
class DecodeRequest:
    """A sequence that is asked for.

    Attributes:
        prompt: at least one token.
        max_new_tokens: how many may come after it.
        sampling: how these are drawn.
        end: the token behind which none is drawn.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    end: int | None = None


class DecodedToken(NamedTuple):
    """A token that was drawn for a request, and whether it is the last; the end mark is one too."""

    request: int
    token: int
    is_last: bool


class Generator:
    """Draws tokens of many requests at once, by continuous batching.

    A request waits for a slot, its prompt runs through the stages, and from then on it gets a token
    in each step, as all that have a slot do. Its tokens do not depend on who else is there.
    """

    def __init__(self, decoder: Decoder):
        """Begin with empty slots."""
        self.decoder = decoder
        slots = decoder.slots
        self._waiting: deque[tuple[int, DecodeRequest]] = deque()
        self._running: dict[int, tuple[int, DecodeRequest]] = {}  # By slot.
        self._submitted = 0
        # Of the token of each slot that is to run next. An empty slot has a place behind the cache.
        self._tokens = np.zeros((slots, 1), np.int32)
        self._positions = np.full((slots, 1), decoder.length, np.int32)
        self._keys = np.stack([_key_data(0)] * slots)
        self._temperatures = np.zeros(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)

    @property
    def is_busy(self) -> bool:
        """Tell whether there are requests that are not done."""
        return bool(self._waiting or self._running)

    def submit(self, request: DecodeRequest) -> int:
        """Let a request wait for a slot; return its number, from 0.

        Raises:
            InputError: if it has no prompt, asks for no token, or is longer than a slot.
        """
        given, count, length = len(request.prompt), request.max_new_tokens, self.decoder.length
        if given < 1 or count < 1 or given + count > length:
            problem = f"a slot has {length} positions, and the prompt has {given} tokens"
            remedy = "Give a prompt, and ask for one token or more, as many as fit behind it"
            raise InputError("max_new_tokens", count, problem, remedy)
        self._waiting.append((self._submitted, request))
        self._submitted += 1
        return self._submitted - 1

    def cancel(self, number: int) -> None:
        """Draw no more tokens of a request, and free its slot; one that is done has none."""
        self._waiting = deque(own for own in self._waiting if own[0] != number)
        for slot in [slot for slot, (own, _) in self._running.items() if own == number]:
            self._leave(slot)

    def step(self) -> list[DecodedToken]:
        """Give waiting requests the empty slots, and draw a token for each slot that is taken."""
        for slot in range(self.decoder.slots):
            if slot not in self._running and self._waiting:
                self._enter(slot, *self._waiting.popleft())
        if not self._running:
            return []
        logits = self.decoder.next_logits(Step(self._tokens, self._positions))
        by = self._keys, self._positions[:, 0], self._temperatures, self._top_p
        drawn = np.asarray(_draw(logits, *by))
        found = []
        for slot, (number, request) in list(self._running.items()):
            token = int(drawn[slot])
            self._tokens[slot] = token
            self._positions[slot] += 1
            count = int(self._positions[slot, 0]) - len(request.prompt) + 1
            is_last = token == request.end or count == request.max_new_tokens
            found.append(DecodedToken(number, token, is_last))
            if is_last:
                self._leave(slot)
        return found

    def _enter(self, slot: int, number: int, request: DecodeRequest) -> None:
        """Run all of a prompt but its last token, which draws the first one of the request."""
        prompt, last = np.asarray(request.prompt, np.int32), len(request.prompt) - 1
        for start in range(0, last, PREFILL_TOKENS):
            span = prompt[start : min(start + PREFILL_TOKENS, last)]
            shape = 1, padded_length(len(span), PREFILL_TOKENS)
            tokens = np.zeros(shape, np.int32)
            positions = np.full(shape, self.decoder.length, np.int32)
            tokens[0, : len(span)], positions[0, : len(span)] = span, start + np.arange(len(span))
            self.decoder.prefill(Step(tokens, positions, slot))
        how = request.sampling
        self._running[slot] = number, request
        self._tokens[slot], self._positions[slot] = prompt[last], last
        self._keys[slot] = _key_data(how.seed)
        self._temperatures[slot], self._top_p[slot] = how.temperature, how.top_p

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._positions[slot], self._temperatures[slot] = self.decoder.length, 0.0


def _key_data(seed: int) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


@jax.jit
def _draw(
    logits: Float[Array, "slot vocabulary"],
    keys: UInt[Array, "slot _"],
    positions: Int[Array, " slot"],
    temperatures: Float[Array, " slot"],
    top_p: Float[Array, " slot"],
) -> Int[Array, " slot"]:
    """One token of each slot: by the key of its seed, and the place of the token before it."""

    def drawn() -> Array:
        own = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), positions)
        return sample(logits, own, temperatures, top_p)

    # Most often the likeliest tokens are asked for, and nothing need be sorted.
    likeliest = lambda: jnp.argmax(logits, axis=-1)  # noqa: E731
    return jax.lax.cond(jnp.any(temperatures > 0), drawn, likeliest)


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    end: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens that go on from a prompt of at least one, until `end`, as they come.

    Raises:
        InputError: if prompt and tokens are longer than the model's context.
    """
    length = length_for(prompt, count, model.context)
    if count < 1:
        return
    generator = Generator(model.decoder(1, length))
    generator.submit(DecodeRequest(prompt, count, sampling, end))
    while generator.is_busy:
        for decoded in generator.step():
            if decoded.token != end:
                yield decoded.token


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


class TextStream:
    """The text that tokens add to a prompt, as soon as the characters in it are whole.

    Some tokenizers write a token otherwise at the beginning of a text, so each piece is what it
    adds to the piece before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]):
        """Begin behind a prompt; `decode` makes text of tokens."""
        self._decode, self._before, self._pending = decode, list(prompt), []

    def push(self, token: int) -> str:
        """Take the next token, and return what is whole with it: "" if nothing new is."""
        self._pending.append(token)
        text = self._decode(self._before + self._pending)
        # A character of several bytes whose last ones are yet to come.
        if text.endswith("\ufffd"):
            return ""
        return self._taken(text)

    def rest(self) -> str:
        """Return what is left when no token comes any more."""
        return self._taken(self._decode(self._before + self._pending)) if self._pending else ""

    def _taken(self, text: str) -> str:
        piece = text[len(self._decode(self._before)) :]
        self._before, self._pending = self._pending, []
        return piece


def padded_length(needed: int, most: int, least: int = LEAST_LENGTH) -> int:
    """A length that others share: the next power of two, or `most`."""
    return min(max(least, 1 << (needed - 1).bit_length()), most)


def sample(
    logits: Float[Array, "batch vocabulary"],
    keys: Shaped[PRNGKeyArray, " batch"],
    temperatures: Float[Array, " batch"],
    top_p: Float[Array, " batch"],
) -> Int[Array, " batch"]:
    """One token of each row, drawn as `Sampling` says."""
    scaled = logits / jnp.maximum(temperatures, LEAST_TEMPERATURE)[:, None]
    descending = jnp.sort(scaled, axis=-1, descending=True)
    chances = jax.nn.softmax(descending, axis=-1)
    is_needed = jnp.cumsum(chances, axis=-1) - chances < top_p[:, None]
    least = jnp.min(jnp.where(is_needed, descending, jnp.inf), axis=-1, keepdims=True)
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(scaled >= least, scaled, -jnp.inf))
    return jnp.where(temperatures > 0, drawn, jnp.argmax(logits, axis=-1))
