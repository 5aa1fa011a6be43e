"""Averaging over slow links: the replicas of a stage pass sums of their gradients round a ring.

The gradients are cut into one segment for each replica, and each segment into chunks. In the first
n - 1 steps a replica passes on the sum of its own chunk and of what has come; after them each
segment is summed up on one replica. In n - 1 more steps the sums go round, so that all replicas
have the same bits. A chunk travels on as soon as it has come, so sending, receiving and adding
overlap, and every link of the ring is busy all the time, as `skippipe_sched.timing.averaging`
predicts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from skippipe_jax.program.hops import Hop, HopNumbers

CHUNK_BYTES = 1 << 20
# Enough chunks that adding hides behind sending, not so many that each costs more than it carries.
FEWEST_CHUNKS, MOST_CHUNKS = 4, 32


@dataclass(frozen=True)
class Ring:
    """Who passes gradients to whom: `nodes` in order, each serving a replica on its own device.

    A segment has `chunks` chunks of `chunk_length` numbers. `numbers` are those of its hops.
    """

    stage: int
    nodes: tuple[int, ...]
    numbers: range
    chunks: int
    chunk_length: int

    @classmethod
    def of(cls, stage: int, nodes: Sequence[int], numbers: HopNumbers, length: int) -> Ring:
        """The ring for gradients of `length` numbers, with hops of the next `numbers`."""
        segment = math.ceil(length / len(nodes))
        wanted = math.ceil(segment * 4 / CHUNK_BYTES)
        chunks = min(max(wanted, FEWEST_CHUNKS), MOST_CHUNKS)
        hops = numbers.take(_steps(nodes) * chunks * len(nodes))
        return cls(stage, tuple(nodes), hops, chunks, math.ceil(segment / chunks))

    @property
    def steps(self) -> int:
        """How often each replica passes something on: 2(n - 1)."""
        return _steps(self.nodes)

    def hop(self, position: int, step: int, chunk: int) -> Hop:
        """What the replica at `position` passes to the next one in a step."""
        number = (step * self.chunks + chunk) * len(self.nodes) + position
        following = self.nodes[(position + 1) % len(self.nodes)]
        return Hop(self.numbers[number], self.nodes[position], following)

    def segment_sent(self, position: int, step: int) -> int:
        """Which segment the replica at `position` passes on in a step."""
        return (position - step) % len(self.nodes)


def _steps(nodes: Sequence[int]) -> int:
    return 2 * (len(nodes) - 1)


class RingPart:
    """What one replica does in a ring. The caller sends what it is given, and tells what arrives.

    Attributes:
        unasked: step, chunk and hop of all that comes and has not been asked for, in the order in
            which it is sent.
        travelling: what every hop carries.
        left: how much has yet to come.
    """

    def __init__(self, ring: Ring, node: int, gradients: PyTree, dtype: jnp.dtype):
        """Begin with the gradients of the replica on `node`; sums travel as `dtype`."""
        self.ring = ring
        self.position = ring.nodes.index(node)
        self.travelling = jax.ShapeDtypeStruct((ring.chunk_length,), dtype)
        self.unasked = self._arriving()
        self.left = ring.steps * ring.chunks
        self.like = jax.eval_shape(lambda tree: tree, gradients)
        parts = _cut(gradients, len(ring.nodes) * ring.chunks, ring.chunk_length)
        self.parts = [
            parts[segment * ring.chunks : (segment + 1) * ring.chunks]
            for segment in range(len(ring.nodes))
        ]

    def _arriving(self) -> Iterator[tuple[int, int, Hop]]:
        before = (self.position - 1) % len(self.ring.nodes)
        for step in range(self.ring.steps):
            for chunk in range(self.ring.chunks):
                yield step, chunk, self.ring.hop(before, step, chunk)

    def begin(self) -> Iterator[tuple[Hop, Array]]:
        """What is sent first: the replica's own segment."""
        for chunk in range(self.ring.chunks):
            yield self._sent(0, chunk)

    def arrive(self, step: int, chunk: int, array: Array) -> tuple[Hop, Array] | None:
        """Take in what came in a step; what is sent on because of it, if anything is."""
        self.left -= 1
        segment = self.ring.segment_sent(self.position - 1, step)
        is_sum_of_all = step >= len(self.ring.nodes) - 1
        own = self.parts[segment][chunk]
        self.parts[segment][chunk] = array if is_sum_of_all else _add(own, array)
        return self._sent(step + 1, chunk) if step + 1 < self.ring.steps else None

    def result(self) -> PyTree:
        """The sum of all replicas' gradients, when nothing is `left` to come."""
        leaves, structure = jax.tree.flatten(self.like)
        chunks = [chunk for segment in self.parts for chunk in segment]
        return jax.tree.unflatten(structure, _join(chunks, tuple(leaf.shape for leaf in leaves)))

    def _sent(self, step: int, chunk: int) -> tuple[Hop, Array]:
        segment = self.ring.segment_sent(self.position, step)
        array = self.parts[segment][chunk].astype(self.travelling.dtype)
        if step == len(self.ring.nodes) - 1:
            # The sum of all: whoever sends it keeps what the others get.
            self.parts[segment][chunk] = array
        return self.ring.hop(self.position, step, chunk), array


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(tree: PyTree, parts: int, length: int) -> list[Float[Array, " length"]]:
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])
    flat = jnp.pad(flat, (0, parts * length - flat.size))
    return [flat[part * length : (part + 1) * length] for part in range(parts)]


@functools.partial(jax.jit, static_argnums=1)
def _join(parts: list[Array], shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    flat = jnp.concatenate(parts).astype(jnp.float32)
    starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [
        flat[start : start + math.prod(shape)].reshape(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]


@jax.jit
def _add(own: Array, arrived: Array) -> Array:
    return own + arrived.astype(own.dtype)
