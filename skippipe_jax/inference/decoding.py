"""Decoding with caches: each token runs through the stages once, many sequences side by side.

A `Generator` has slots, each for one sequence. Sequences enter and leave them while others go on,
and all arrays are of a few fixed sizes, so few programs serve all sequences. A stage runs by
itself, over a cache of its own: a `Decoder` may as well be one whose stages are on other hosts.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from skippipe_sched.errors import InputError

from skippipe_jax.config.sampling import Sampling
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest, ScoredToken
from skippipe_jax.inference.partial import StageOrder
from skippipe_jax.inference.stage_set import StageSet
from skippipe_jax.inference.token_sampling import (
    Penalties,
    SamplingRows,
    TokenScores,
    penalized,
    sample_tokens,
    score_tokens,
)
from skippipe_jax.models.branch_scales import ScaleTable
from skippipe_jax.models.llama import (
    Block,
    DataStage,
    Rotations,
    StageStructure,
    rotations,
)

Prompt = TypeVar("Prompt", str, list[int])
"""A text, or tokens."""
MIN_LENGTH = 16
"""Caches and spans of prompts are padded to powers of two from here on, so few are compiled."""
PREFILL_TOKENS = 128
"""The most tokens of a prompt that run through the stages at once."""
BATCH_PREFILL_TOKENS = 1024
"""The most tokens, padding included, of several prompts that run through the stages at once."""
ROWS_FACTOR = 4
"""Factor between the numbers of slots that one program may run: 1, 4, 16, ..., or all."""
FIRST_PAGE = 64
"""Positions of the first page of a cache; each later page has as many as all before it."""


class KVPage(NamedTuple):
    """Keys and values of a stage at consecutive positions of every slot.

    Attention reads whole pages: XLA would copy a part of a longer array in each step. On a CPU
    several pages are read at once, by one thread each.
    """

    keys: Float[Array, "layer slot kv_heads page head_width"]
    values: Float[Array, "layer slot kv_heads page head_width"]


class Step(NamedTuple):
    """Tokens that run through the stages together.

    Attributes:
        tokens: one of each of the first slots, or a span of the prompt of each or of one slot.
        positions: the place of each in its sequence; that of padding is the length of the caches.
        slot: whose prompt it is; None if each row is the slot of its number.
    """

    tokens: Int[np.ndarray, "row time"]
    positions: Int[np.ndarray, "row time"]
    slot: int | None = None


class Decoder:
    """Model, or mixture of models, that a `Generator` decodes with.

    Attributes:
        slots: number of sequences that it holds at a time.
        length: largest number of positions of a sequence.
        vocabulary_size: number of tokens in the vocabulary.
        is_single_model: whether it scores prompts, and lets sequences run along some stages.
        waits: whether `next_logits` waits for other hosts; else it returns before the result.
    """

    slots: int
    length: int
    vocabulary_size: int
    is_single_model = True
    waits = False

    def begin(self, slot: int, stages: StageOrder | None) -> None:
        """Let a new sequence in a slot run along these stages; None is all."""

    def end(self, slot: int) -> None:
        """Forget the sequence in a slot."""

    def stages_of(self, slot: int) -> StageOrder | None:
        """Return the stages that have run for all tokens of a sequence; None if there are none."""
        return None

    def close(self) -> None:
        """Wait for nothing any more; another thread may call this."""

    def prefill(
        self, step: Step, targets: Int[np.ndarray, "1 time"] | None = None
    ) -> TokenScores | None:
        """Take in tokens that come next in sequences; score `targets` behind those of one slot."""
        raise NotImplementedError

    def next_logits(self, step: Step) -> Float[Array, "row vocabulary"]:
        """Take in a token of each of the first slots, and return the logits of the one behind it.

        Several models together take one of every slot.
        """
        raise NotImplementedError


class LanguageModel(Protocol):
    """Model, or mixture of models, that text is generated with."""

    @property
    def context(self) -> int:
        """Most tokens in a sequence."""
        ...

    def decoder(self, slots: int, length: int) -> Decoder:
        """Return a decoder of `slots` sequences of `length` positions."""
        ...


class StageExecutor(Decoder):
    """The `Decoder` of one model: runs its stages, each over a cache of its own."""

    def __init__(
        self,
        model: StageSet,
        order: StageOrder,
        slots: int,
        length: int,
        local_stages: StageOrder | None = None,
        scales: ScaleTable | None = None,
    ):
        """Make room for so many sequences of so many positions in each stage of an order.

        `local_stages` are the stages of this host, if others run elsewhere. With `scales`, what
        blocks of inner stages add is multiplied by those of as many stages as run.
        """
        self.model, self.order, self.slots, self.length = model, order, slots, length
        self._scales = scales
        config = model.config
        self.vocabulary_size = config.vocabulary_size

        self._page_ends = [min(end, length) for end in _powers(FIRST_PAGE, length)]

        def empty(stage: int, size: int) -> Array:
            shape = (model.cut[stage], slots, config.kv_heads, size, config.head_width)
            # Where the weights are, from the beginning: the first step compiles for all others.
            place = jax.tree.leaves(model.parameters[stage])[0].sharding
            return jax.device_put(jnp.zeros(shape, config.compute_dtype), place)

        sizes = np.diff(self._page_ends, prepend=0).tolist()
        self._caches = {
            stage: [KVPage(empty(stage, size), empty(stage, size)) for size in sizes]
            for stage in local_stages or order
        }
        # By slot: the stages of the model that its sequence does not use.
        self._skipped: list[frozenset[int]] = [frozenset()] * slots

    def begin(self, slot: int, stages: StageOrder | None) -> None:
        """Do what `Decoder.begin` says."""
        used = set(self.order if stages is None else stages)
        self._skipped[slot] = frozenset(range(self.model.stages)) - used

    def end(self, slot: int) -> None:
        """Do what `Decoder.end` says."""
        self._skipped[slot] = frozenset()

    def stages_of(self, slot: int) -> StageOrder | None:
        """Return what `Decoder.stages_of` says."""
        return tuple(stage for stage in self.order if stage not in self._skipped[slot])

    def forward(
        self,
        stage: int,
        x: Array | np.ndarray,
        step: Step,
        scales: Float[np.ndarray, "row block 2"] | None = None,
    ) -> Array:
        """Return the residual stream [row time width] after a stage, whose cache then knows it.

        The data stage takes tokens [row time]. What blocks add is multiplied by `scales`.
        """
        last = int(step.positions[step.positions < self.length].max(initial=0))
        pages = bisect.bisect_right(self._page_ends, last) + 1
        structure, parameters = self.model.structures[stage], self.model.parameters[stage]
        cache = self._caches[stage]
        after, cache[:pages] = run_stage(
            structure, parameters, cache[:pages], x, step.positions, step.slot, scales
        )
        return after

    def skipped_by(self, step: Step) -> list[frozenset[int]]:
        """Return, for each row of a step, the stages that its sequence does not use."""
        if step.slot is not None:
            return [self._skipped[step.slot]]
        return self._skipped[: len(step.positions)]

    def run(self, step: Step) -> Float[Array, "row time width"]:
        """Return the residual stream after all stages of the order."""
        x = self.forward(self.order[0], step.tokens, step)
        return self.follow(self.order[1:], x, step, self.skipped_by(step))

    def follow(
        self,
        stages: StageOrder,
        x: Array | np.ndarray,
        step: Step,
        skipped: Sequence[Collection[int]],
    ) -> Float[Array, "row time width"]:
        """Return the residual stream after these inner stages; each row skips some of the model."""
        scales = None
        if self._scales is not None:
            scales = self._scales[[self.model.stages - len(own) - 1 for own in skipped]]
        for stage in stages:
            skips = np.array([stage in own for own in skipped])
            if skips.all():
                continue
            own = None if scales is None else scales[:, [*self.model.cut.blocks(stage)]]
            after = self.forward(stage, x, step, own)
            x = _unless_skipped(skips, x, after) if skips.any() else after
        return jnp.asarray(x)

    def prefill(
        self, step: Step, targets: Int[np.ndarray, "1 time"] | None = None
    ) -> TokenScores | None:
        """Do what `Decoder.prefill` says."""
        x = self.run(step)
        if targets is None:
            return None
        return _scored_logits(self.model.structures[0], self.model.parameters[0], x, targets)

    def next_logits(self, step: Step) -> Float[Array, "row vocabulary"]:
        """Return what `Decoder.next_logits` says."""
        return _logits(self.model.structures[0], self.model.parameters[0], self.run(step))

    def warm_up_steps(self) -> Iterator[Step]:
        """Yield a step for each program that sequences may need."""
        for end in self._page_ends:
            for time in _powers(MIN_LENGTH, min(end, PREFILL_TOKENS)):
                positions = np.full((1, time), self.length, np.int32)
                positions[0, 0] = end - 1
                yield Step(np.zeros((1, time), np.int32), positions, 0)
            for rows in batch_sizes(self.slots):
                positions = np.full((rows, 1), self.length, np.int32)
                positions[0] = end - 1
                yield Step(np.zeros((rows, 1), np.int32), positions)

    def warm_up(self) -> None:
        """Compile whatever sequences may need, while all slots are empty."""
        for step in self.warm_up_steps():
            if step.slot is not None:
                self.prefill(step, step.tokens)
                continue
            x = self.run(step)
            _unless_skipped(np.zeros(len(x), bool), x, x)


def span_of(tokens: Sequence[int], start: int, slot: int, length: int) -> Step:
    """Return the step of a slot's tokens from a position on, padded for caches of a length."""
    step = _empty_step(1, padded_length(len(tokens), PREFILL_TOKENS), length)._replace(slot=slot)
    _put(step, 0, tokens, start)
    return step


def _empty_step(rows: int, time: int, length: int) -> Step:
    """Return a step of padding alone, for caches of a length."""
    return Step(np.zeros((rows, time), np.int32), np.full((rows, time), length, np.int32))


def _put(step: Step, row: int, tokens: Sequence[int], start: int) -> None:
    """Put tokens into a row of a step, the first of them at position `start`."""
    step.tokens[row, : len(tokens)] = tokens
    step.positions[row, : len(tokens)] = start + np.arange(len(tokens))


def batch_sizes(slots: int) -> list[int]:
    """Return how many of so many slots may run together."""
    rows = [1]
    while rows[-1] < slots:
        rows.append(min(ROWS_FACTOR * rows[-1], slots))
    return rows


def _powers(least: int, most: int) -> list[int]:
    """Return the lengths that `padded_length` gives between these two."""
    lengths = [least]
    while lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    return lengths


@jax.jit
def _unless_skipped(
    skips: Bool[Array, " row"], before: Float[Array, "row time width"], after: Array
) -> Float[Array, "row time width"]:
    return jnp.where(skips[:, None, None], before, after)


@functools.partial(jax.jit, static_argnums=0)
def _scored_logits(
    structure: StageStructure,
    parameters: Any,
    x: Float[Array, "1 time width"],
    targets: Int[Array, "1 time"],
) -> TokenScores:
    scores = score_tokens(structure.merge(parameters).logits(x), targets)
    return TokenScores(*(part[0] for part in scores))


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    structure: StageStructure, parameters: Any, x: Float[Array, "row 1 width"]
) -> Float[Array, "row vocabulary"]:
    return structure.merge(parameters).logits(x)[:, 0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def run_stage(
    structure: StageStructure,
    parameters: Any,
    cache: list[KVPage],
    x: Array,
    positions: Int[Array, "row time"],
    slot: Int[Array, ""] | None,
    scales: Float[Array, "row block 2"] | None,
) -> tuple[Float[Array, "row time width"], list[KVPage]]:
    """Return the residual stream after all blocks of a stage, and its cache.

    The cache has the first pages, up to the last position. What attention and the feed-forward of
    a block add is multiplied by `scales`.
    """
    stage = structure.merge(parameters)
    if isinstance(stage, DataStage):
        x = stage.embedding[...][x].astype(stage.config.compute_dtype)
    of_block, of_blocks = nnx.split(stage.blocks)
    # Without the barrier XLA computes sines and cosines again for each layer and head.
    by = jax.lax.optimization_barrier(rotations(stage.config, positions))

    def run_block(
        carry: tuple[Array, list[KVPage]], block_inputs: tuple[Array, Any, Array | None]
    ) -> Any:
        (x, cache), (layer, block_parameters, factors) = carry, block_inputs
        block: Block = nnx.merge(of_block, block_parameters)
        normed = block.attention_norm(x)
        added, cache = attend_cached(block, normed, cache, layer, by, positions, slot)
        x = x + times(added, factors, 0)
        return (x + times(block.feed_forward(block.ffn_norm(x)), factors, 1), cache), None

    def times(branch: Array, factors: Array | None, which: int) -> Array:
        if factors is None:
            return branch
        return branch * factors[:, which, None, None].astype(branch.dtype)

    # Carried along, the cache is written in place; as outputs of the loop it would be copied.
    layers = jnp.arange(cache[0].keys.shape[0])
    block_scales = None if scales is None else jnp.moveaxis(scales, 1, 0)
    with jax.default_matmul_precision(stage.config.matmul_precision):
        (x, cache), _ = jax.lax.scan(run_block, (x, cache), (layers, of_blocks, block_scales))
    return x, cache


def attend_cached(
    block: Block,
    x: Float[Array, "row time width"],
    cache: list[KVPage],
    layer: Int[Array, ""],
    by: Rotations,
    positions: Int[Array, "row time"],
    slot: Int[Array, ""] | None,
) -> tuple[Float[Array, "row time width"], list[KVPage]]:
    """Causal attention of tokens to all positions of their slots that the cache has pages for."""
    query, key, value = block.project(x, by)
    rows = jnp.arange(len(x))[:, None] if slot is None else slot
    sizes = [page.keys.shape[-2] for page in cache]
    ends = np.cumsum(sizes).tolist()

    def written(cached: Array, new: Array, end: int) -> Array:
        size = cached.shape[-2]
        place = positions - (end - size)
        # What belongs to another page, or is padding behind the last, is not written.
        place = jnp.where(place < 0, size, place)
        return cached.at[layer, rows, :, place].set(new, mode="drop")

    def seen(cached: Array) -> Array:
        start = (layer, 0 if slot is None else slot, 0, 0, 0)
        return jax.lax.dynamic_slice(cached, start, (1, len(x), *cached.shape[2:]))[0]

    cache = [
        KVPage(written(page.keys, key, end), written(page.values, value, end))
        for page, end in zip(cache, ends, strict=True)
    ]
    kv_heads, width = key.shape[-2:]
    grouped = query.reshape(*x.shape[:2], kv_heads, -1, width)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = [product("rtkgw,rksw->rkgts", grouped, seen(page.keys)) for page in cache]
    is_past = jnp.arange(ends[-1]) <= positions[:, None, None, :, None]
    scores = jnp.where(is_past, jnp.concatenate(scores, -1) / np.sqrt(width), -jnp.inf)
    weights = jnp.split(jax.nn.softmax(scores).astype(x.dtype), ends[:-1], axis=-1)
    mixed = sum(
        product("rkgts,rksw->rtkgw", own, seen(page.values))
        for own, page in zip(weights, cache, strict=True)
    )
    return block.output(jnp.astype(mixed, x.dtype).reshape(x.shape)), cache


class Generator:
    """Draws tokens of many requests at once, by continuous batching.

    A request waits for a slot, its prompt runs through the stages, and from then on it gets a token
    in each step, as all that have a slot do. Its tokens do not depend on who else is there, but for
    rounding: as many slots run together as have to.
    """

    def __init__(self, decoder: Decoder, prompt_tokens: int | None = None):
        """Begin with empty slots.

        Between two draws at most so many tokens of prompts run through the stages, or a span of
        them that is longer. None is all that there are, and then several run side by side.
        """
        self.decoder, self._prompt_tokens = decoder, prompt_tokens
        slots = decoder.slots
        self._waiting: deque[tuple[int, DecodeRequest]] = deque()
        # By slot: those whose prompt runs through the stages, and those that get tokens.
        self._entering: dict[int, _Entering] = {}
        self._running: dict[int, tuple[int, DecodeRequest]] = {}
        self._submitted = 0
        # Of the token of each slot that is to run next. An empty slot has a place behind the cache.
        self._tokens = np.zeros((slots, 1), np.int32)
        self._positions = np.full((slots, 1), decoder.length, np.int32)
        self._rows = SamplingRows.empty(slots)
        self._penalties: Penalties | None = None

    @property
    def slots(self) -> int:
        """Number of requests that get tokens at a time."""
        return self.decoder.slots

    @property
    def is_busy(self) -> bool:
        """Tell whether there are requests that are not done."""
        return bool(self._waiting or self._entering or self._running)

    def submit(self, request: DecodeRequest, number: int | None = None) -> int:
        """Let a request wait for a slot; return its number, by default counted from 0.

        Raises:
            InputError: if it has no prompt, asks for nothing, or is longer than a slot; or asks
                several models together for scores of its prompt, or for some stages.
        """
        prompt_length, count = len(request.prompt), request.max_new_tokens
        length = self.decoder.length
        least = 0 if request.scores_prompt else 1
        # The last token of a prompt that is only scored is a target, and takes no position.
        if prompt_length < 1 or count < least or prompt_length + count > length + (count == 0):
            problem = f"a slot has {length} positions, and the prompt has {prompt_length} tokens"
            remedy = (
                "Give a prompt, and request at least one token, at most as many as fit after it"
            )
            raise InputError("max_new_tokens", count, problem, remedy)
        for name, neutral in (("scores_prompt", False), ("stages", None)):
            value = getattr(request, name)
            if value != neutral and not self.decoder.is_single_model:
                problem = "needs a single model, not an ensemble"
                raise InputError(name, value, problem, "Leave it out")
        number = self._submitted if number is None else number
        self._waiting.append((number, request))
        self._submitted += 1
        return number

    def cancel(self, number: int) -> None:
        """Draw no more tokens of a request, and free its slot; one that is done has none."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        for slot in [slot for slot, entry in self._entering.items() if entry.number == number]:
            del self._entering[slot]
            self.decoder.end(slot)
        for slot in [slot for slot, (running, _) in self._running.items() if running == number]:
            self._leave(slot)

    def clear(self) -> None:
        """Drop all requests, and free their slots."""
        self._waiting.clear()
        numbers = [number for number, _ in self._running.values()]
        numbers += [entering.number for entering in self._entering.values()]
        for number in numbers:
            self.cancel(number)

    def close(self) -> None:
        """Wait for no other host any more; another thread may call this."""
        self.decoder.close()

    def step(self, on_wait: Callable[[], None] = lambda: None) -> list[Decoded]:
        """Give waiting requests the empty slots, and draw a token for each whose prompt is in.

        That is none for requests that want none, of which only prompts are scored. `on_wait` is
        called before this waits for other hosts or for the logits of tokens.
        """
        if self.decoder.waits:
            on_wait()
        for slot in range(self.decoder.slots):
            if self._waiting and slot not in self._running and slot not in self._entering:
                entering = self._entering[slot] = _Entering(*self._waiting.popleft())
                self.decoder.begin(slot, entering.request.stages)
        decoded, prompts = [], dict[int, tuple[ScoredToken, ...]]()
        run = 0
        while self._entering and (self._prompt_tokens is None or run < self._prompt_tokens):
            run += self._run_spans()
            for slot in [slot for slot, own in self._entering.items() if not own.left]:
                entering = self._entering.pop(slot)
                number, request, scored = entering.number, entering.request, tuple(entering.scored)
                if request.max_new_tokens == 0:
                    stages = self.decoder.stages_of(slot)
                    decoded.append(Decoded(number, True, None, scored, stages))
                    self.decoder.end(slot)
                else:
                    self._enter(slot, number, request)
                    prompts[number] = scored
        return [*decoded, *(self._draw(prompts, on_wait) if self._running else ())]

    def _run_spans(self) -> int:
        """Run the next spans of prompts, but not their last tokens; return of how many tokens."""
        joined = {
            slot: own.left
            for slot, own in self._entering.items()
            if own.left and not own.request.scores_prompt
        }
        rows = self._rows_for(joined) if joined and self._prompt_tokens is None else 1
        if rows == 1:
            return self._run_span(*next(iter(self._entering.items())))
        time = padded_length(max(joined.values()), max(BATCH_PREFILL_TOKENS // rows, 1))
        counts = {slot: min(left, time) for slot, left in joined.items()}
        if 2 * sum(counts.values()) < rows * time:  # Most of it would be padding.
            return self._run_span(*next(iter(self._entering.items())))
        step = _empty_step(rows, time, self.decoder.length)
        for slot, count in counts.items():
            entering = self._entering[slot]
            _put(step, slot, entering.request.prompt[entering.done :][:count], entering.done)
            entering.done += count
        self.decoder.prefill(step)
        return sum(counts.values())

    def _run_span(self, slot: int, entering: _Entering) -> int:
        """Run the next span of one prompt, but not its last token; return of how many tokens."""
        prompt, start = entering.request.prompt, entering.done
        span = prompt[start:][: min(PREFILL_TOKENS, entering.left)]
        if not len(span):
            return 0
        step = span_of(span, start, slot, self.decoder.length)
        targets, next_tokens = np.zeros_like(step.tokens), prompt[start + 1 :][: len(span)]
        targets[0, : len(span)] = next_tokens
        scores = self.decoder.prefill(step, targets if entering.request.scores_prompt else None)
        if scores is not None:
            entering.scored += scores.tokens(next_tokens, [entering.request.likeliest] * len(span))
        entering.done += len(span)
        return len(span)

    def _enter(self, slot: int, number: int, request: DecodeRequest) -> None:
        """Let the last token of the prompt draw the first one of the request."""
        self._running[slot] = number, request
        self._tokens[slot], self._positions[slot] = request.prompt[-1], len(request.prompt) - 1
        self._rows.set(slot, request.sampling)
        if request.sampling.has_penalties and self._penalties is None:
            self._penalties = Penalties.empty(self.slots, self.decoder.vocabulary_size)
        if self._penalties is not None:
            self._penalties.set(slot, request.sampling, request.prompt)

    def _rows_for(self, slots: Iterable[int]) -> int:
        """Return how many of the first slots run in a step that these slots take part in."""
        needed = max(slots) + 1 if self.decoder.is_single_model else self.slots
        return next(rows for rows in batch_sizes(self.slots) if rows >= needed)

    def _draw(
        self, prompts: Mapping[int, tuple[ScoredToken, ...]], on_wait: Callable[[], None]
    ) -> list[Decoded]:
        """Draw a token for each request that runs; those of `prompts` have theirs told first."""
        rows = self._rows_for(self._running)
        step = Step(self._tokens[:rows], self._positions[:rows])
        logits = likelihoods = self.decoder.next_logits(step)
        running = list(self._running.items())
        if any(request.sampling.has_penalties for _, (_, request) in running):
            assert self._penalties is not None
            logits = penalized(logits, *(own[:rows] for own in self._penalties))
        sampling = (own[:rows] for own in self._rows)
        drawing = sample_tokens(logits, step.positions[:, 0], *sampling)
        if not self.decoder.waits:
            on_wait()
        drawn = np.asarray(drawing)
        counts: list[int | None] = [None] * rows
        for slot, (_, request) in running:
            counts[slot] = request.likeliest
        if any(count is not None for count in counts):
            scored = score_tokens(likelihoods, drawn).tokens(drawn, counts)
        else:
            scored = [ScoredToken(int(token)) for token in drawn]
        decoded = []
        for slot, (number, request) in running:
            token = scored[slot].token
            self._tokens[slot] = token
            self._positions[slot] += 1
            if self._penalties is not None:
                self._penalties.counts[slot, token] += 1
            count = int(self._positions[slot, 0]) - len(request.prompt) + 1
            is_last = token in request.ends or count == request.max_new_tokens
            stages = self.decoder.stages_of(slot)
            decoded.append(Decoded(number, is_last, scored[slot], prompts.get(number, ()), stages))
            if is_last:
                self._leave(slot)
        return decoded

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self.decoder.end(slot)
        self._positions[slot], self._rows.temperatures[slot] = self.decoder.length, 0.0

    def warm_up(self) -> None:
        """Compile what draws tokens, before the first request."""
        penalties = Penalties.empty(self.slots, self.decoder.vocabulary_size)
        for rows in batch_sizes(self.slots):
            step = Step(self._tokens[:rows], self._positions[:rows])
            logits = self.decoder.next_logits(step)
            for own in (logits, penalized(logits, *(one[:rows] for one in penalties))):
                sampling = (one[:rows] for one in self._rows)
                drawn = np.asarray(sample_tokens(own, step.positions[:, 0], *sampling))
            score_tokens(logits, drawn)


@dataclass
class _Entering:
    """A request whose prompt has run through the stages as far as `done`."""

    number: int
    request: DecodeRequest
    done: int = 0
    scored: list[ScoredToken] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of tokens that still have to run; the last one of a prompt draws the next."""
        return len(self.request.prompt) - 1 - self.done


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    end: int | None = None,
) -> Iterator[int]:
    """Yield up to `count` tokens that continue a prompt of at least one token, until `end`.

    Raises:
        InputError: if prompt and tokens are longer than the model's context.
    """
    room = model.context - len(prompt)
    if count > room:
        raise InputError(
            "--max-new-tokens",
            count,
            f"the model's context is {model.context} tokens, and the prompt has {len(prompt)}",
            f"Ask for {room} or fewer" if room > 0 else "Shorten the prompt",
        )
    if count < 1:
        return
    length = padded_length(len(prompt) + count, model.context)
    generator = Generator(model.decoder(1, length))
    ends = frozenset() if end is None else frozenset([end])
    generator.submit(DecodeRequest(prompt, count, sampling, ends))
    while generator.is_busy:
        for decoded in generator.step():
            if decoded.drawn is not None and decoded.drawn.token != end:
                yield decoded.drawn.token


def continuation(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
) -> Any:
    """Return the text that continues a text, or the tokens that continue tokens, as `Prompt`.

    Raises:
        InputError: if prompt and tokens are longer than the model's context.
    """
    tokens = [tokenizer.begin, *tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
    given = [int(token) for token in tokens]
    drawn = [*generate_tokens(model, given, max_new_tokens, sampling, tokenizer.end)]
    if not isinstance(prompt, str):
        return drawn
    # Some tokenizers write a token otherwise at the beginning of a text.
    return tokenizer.decode([*given, *drawn])[len(tokenizer.decode(given)) :]


def padded_length(needed: int, most: int, least: int = MIN_LENGTH) -> int:
    """Return the next power of two, at least `least` and at most `most`, as a shared length."""
    return min(max(least, 1 << (needed - 1).bit_length()), most)
