"""Averaging over slow links: the replicas of a stage pass sums of their gradients round a ring.

The gradients are cut into one segment for each replica, and each segment into chunks. In the first
n - 1 steps a replica passes on the sum of its own chunk and of what has come; after them each
segment is summed up on one replica. In n - 1 more steps the sums go round, so that all replicas
have the same bits. Of replicas on equal meshes each device's part of the gradients goes round as it
lies: a chunk then has a row for each device. A chunk travels on as soon as it has come, so sending,
receiving and adding overlap, and every link of the ring is busy all the time, as
`skippipe_sched.timing.averaging` predicts. `skippipe_jax.runtime.pace` says how large chunks are,
and how many are asked for ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from skippipe_sched.problem.case import Case

from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.pace import LARGEST_CHUNK_BYTES, chunk_bytes, chunks_ahead
from skippipe_jax.runtime.rows import blocks_of, cut_rows, joined_blocks, joined_rows
from skippipe_jax.runtime.spread import Spread

# Of a segment, so that adding hides behind sending: so few where little is averaged, and of much so
# many, even where a link is so quick that chunks could be larger.
FEWEST_CHUNKS, ENOUGH_CHUNKS = 4, 32
# A segment is so many arrays at most: what cuts it has no more results, however many chunks go.
MOST_BLOCKS = 32

Block = Float[Array, "*rows chunks_numbers"]
Chunk = Float[Array, "*rows numbers"]


@dataclass(frozen=True)
class Ring:
    """Who passes gradients to whom: `nodes` in order, each serving a replica on its own devices.

    A segment has `chunks` chunks of `chunk_length` numbers, which lie in `blocks` of equally many.
    With more than one of `rows`, each device of a node has so many of all these for itself.
    The replica at each position asks for so many chunks `ahead`. `numbers` are those of the ring's
    hops.
    """

    stage: int
    nodes: tuple[int, ...]
    numbers: range
    blocks: int
    chunks: int
    chunk_length: int
    ahead: tuple[int, ...]
    rows: int = 1

    @classmethod
    def of(
        cls,
        case: Case,
        stage: int,
        nodes: Sequence[int],
        numbers: HopNumbers,
        length: int,
        *,
        rows: int = 1,
        width: int = 4,
        hop_bytes: float = math.inf,
    ) -> Ring:
        """Make the ring for gradients of `rows` of `length`, with hops of the next `numbers`.

        Its links are those of the `case`, and each number takes `width` bytes on them. If they
        carry anything but the ring, those are hops of `hop_bytes`.
        """
        segment, width = math.ceil(length / len(nodes)), width * rows
        largest = math.ceil(segment * width / LARGEST_CHUNK_BYTES)
        fewest = min(max(largest, FEWEST_CHUNKS), ENOUGH_CHUNKS)
        wanted = max(fewest, math.ceil(segment * width / chunk_bytes(case, nodes, hop_bytes)))
        of_block = math.ceil(wanted / MOST_BLOCKS)
        blocks = math.ceil(wanted / of_block)
        chunks = blocks * of_block
        chunk_length = math.ceil(segment / chunks)
        hops = numbers.take(_steps(nodes) * chunks * len(nodes))
        ahead = chunks_ahead(case, nodes, chunk_length * width)
        in_all = _steps(nodes) * chunks
        ahead = tuple(min(own, in_all) for own in ahead)
        return cls(stage, tuple(nodes), hops, blocks, chunks, chunk_length, ahead, rows)

    @property
    def steps(self) -> int:
        """How often each replica passes something on: 2(n - 1)."""
        return _steps(self.nodes)

    def hop(self, position: int, step: int, chunk: int) -> Hop:
        """Return what the replica at `position` passes to the next one in a step."""
        number = (step * self.chunks + chunk) * len(self.nodes) + position
        following = self.nodes[(position + 1) % len(self.nodes)]
        return Hop(self.numbers[number], self.nodes[position], following)

    def segment_sent(self, position: int, step: int) -> int:
        """Return which segment the replica at `position` passes on in a step."""
        return (position - step) % len(self.nodes)


def _steps(nodes: Sequence[int]) -> int:
    return 2 * (len(nodes) - 1)


class RingPart:
    """What one replica does in a ring. The caller sends what it is given, and tells what arrives.

    Attributes:
        unasked, ahead, left: see `RingMember`.
        travelling: what every hop carries.
    """

    def __init__(
        self,
        ring: Ring,
        node: int,
        gradients: PyTree,
        dtype: jnp.dtype,
        here: Spread | None = None,
    ):
        """Begin with the gradients of the replica on `node`; sums travel as `dtype`.

        They lie as `here` has it, where that is a mesh.
        """
        self.ring = ring
        self._here = None if here is None or here.mesh is None else here
        self.position = ring.nodes.index(node)
        self.ahead = ring.ahead[self.position]
        rows = () if ring.rows == 1 else (ring.rows,)
        self.travelling = jax.ShapeDtypeStruct((*rows, ring.chunk_length), dtype)
        self.unasked = self._arriving()
        self.left = ring.steps * ring.chunks
        self.like = jax.eval_shape(lambda tree: tree, gradients)
        # In which sums take the place of what was summed. What is sent is taken out when it is its
        # turn, so that there is never much besides.
        self.of_block = ring.chunks // ring.blocks
        length = self.of_block * ring.chunk_length
        blocks = len(ring.nodes) * ring.blocks
        if self._is_cut:
            assert self._here is not None, "is a mesh"
            self.blocks = cut_rows(gradients, self._here, blocks, length)
        else:
            if self._here is not None:
                gradients = jax.device_put(gradients, self._here.first)
            self.blocks = _cut(gradients, blocks, length)

    @property
    def _is_cut(self) -> bool:
        return self.ring.rows > 1

    def _arriving(self) -> Iterator[tuple[int, int, Hop, jax.ShapeDtypeStruct]]:
        before = (self.position - 1) % len(self.ring.nodes)
        for step in range(self.ring.steps):
            for chunk in range(self.ring.chunks):
                yield step, chunk, self.ring.hop(before, step, chunk), self.travelling

    def begin(self) -> Iterator[tuple[Hop, Array]]:
        """Return what is sent first, the own segment: chunk by chunk, as the caller takes it."""
        for chunk in range(self.ring.chunks):
            yield self.ring.hop(self.position, 0, chunk), self._own(chunk)

    def arrive(self, step: int, chunk: int, array: Array) -> tuple[Hop, Array] | None:
        """Take in what came in a step; what is sent on because of it, if anything is."""
        self.left -= 1
        block, start = self._place(self.ring.segment_sent(self.position - 1, step), chunk)
        last_sum = len(self.ring.nodes) - 2
        if step <= last_sum:
            array = _added(self.blocks[block], start, array)
        if step >= last_sum:
            # The sum of all: whoever makes it keeps it as the others get it.
            self._keep(block, start, array)
        if step + 1 == self.ring.steps:
            return None
        return self.ring.hop(self.position, step + 1, chunk), array

    def result(self) -> PyTree:
        """Return the sum of all replicas' gradients, when nothing is `left` to come."""
        if self._is_cut:
            assert self._here is not None, "is a mesh"
            return joined_rows(self.blocks, self._here, self.like)
        leaves, structure = jax.tree.flatten(self.like)
        summed = _join(self.blocks, tuple(leaf.shape for leaf in leaves))
        whole = jax.tree.unflatten(structure, summed)
        return whole if self._here is None else self._here.put(whole)

    def _place(self, segment: int, chunk: int) -> tuple[int, int]:
        """In which block a chunk is, and where in it."""
        block, chunks_before = divmod(chunk, self.of_block)
        return segment * self.ring.blocks + block, chunks_before * self.ring.chunk_length

    def _own(self, chunk: int) -> Chunk:
        block, start = self._place(self.position, chunk)
        if self.of_block == 1:
            return self.blocks[block].astype(self.travelling.dtype)
        return _taken(self.blocks[block], start, self.travelling)

    def _keep(self, block: int, start: int, summed: Chunk) -> None:
        if self.of_block == 1:
            self.blocks[block] = summed
        else:
            self.blocks[block] = _kept(self.blocks[block], start, summed)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(tree: PyTree, blocks: int, length: int) -> list[Block]:
    return blocks_of(tree, blocks, length)


@functools.partial(jax.jit, static_argnums=2)
def _taken(block: Block, start: int, like: jax.ShapeDtypeStruct) -> Chunk:
    return jax.lax.dynamic_slice_in_dim(block, start, like.shape[-1], axis=-1).astype(like.dtype)


@jax.jit
def _added(block: Block, start: int, arrived: Chunk) -> Chunk:
    own = jax.lax.dynamic_slice_in_dim(block, start, arrived.shape[-1], axis=-1)
    return (own + arrived.astype(own.dtype)).astype(arrived.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _kept(block: Block, start: int, summed: Chunk) -> Block:
    return jax.lax.dynamic_update_slice_in_dim(block, summed.astype(block.dtype), start, axis=-1)


@functools.partial(jax.jit, static_argnums=1)
def _join(blocks: list[Block], shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    return joined_blocks(blocks, shapes)
