"""Ring all-reduce of the gradients of a stage's replicas, for slow links.

The gradients are cut into one segment for each of n replicas, and each segment into chunks. In the
first n - 1 steps a replica sends the sum of its chunk and the received one; then each segment is
summed on one replica. In n - 1 more steps the sums go round the ring, so that all replicas have the
same bits. If the replicas have equal meshes, the shards of each device go round as they are: a
chunk then has a row for each device. A chunk is sent on as soon as it has arrived, so sending,
receiving and adding overlap, and every link of the ring is always busy, as
`skippipe_sched.timing.averaging` predicts. `skippipe_jax.runtime.pace` determines the size of
chunks, and the number that is requested in advance.
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
from skippipe_jax.runtime.spread import NodeSharding

# Chunks of a segment, so that adding overlaps with sending: the fewest for small gradients, and
# enough for large ones, even if a link is so fast that chunks could be larger.
FEWEST_CHUNKS, ENOUGH_CHUNKS = 4, 32
# Most arrays of a segment, which limits the results of the function that cuts the gradients.
MOST_BLOCKS = 32

Block = Float[Array, "*rows chunks_numbers"]
Chunk = Float[Array, "*rows numbers"]


@dataclass(frozen=True)
class Ring:
    """Ring of `nodes` in order, each with a replica on separate devices.

    A segment has `chunks` chunks of `chunk_length` numbers, stored in `blocks` arrays of equally
    many chunks. With several `rows`, a node has these once for each of its devices. The replica at
    each position requests `ahead` chunks in advance. `numbers` are those of the ring's hops.
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

        Its links are those of the `case`, and each number takes `width` bytes on them. If the links
        also carry hops, these have `hop_bytes`.
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
        """Number of steps, in each of which a replica sends one segment: 2(n - 1)."""
        return _steps(self.nodes)

    def hop(self, position: int, step: int, chunk: int) -> Hop:
        """Return the hop by which the replica at `position` sends a chunk in a step."""
        number = (step * self.chunks + chunk) * len(self.nodes) + position
        following = self.nodes[(position + 1) % len(self.nodes)]
        return Hop(self.numbers[number], self.nodes[position], following)

    def segment_sent(self, position: int, step: int) -> int:
        """Return the segment that the replica at `position` sends in a step."""
        return (position - step) % len(self.nodes)


def _steps(nodes: Sequence[int]) -> int:
    return 2 * (len(nodes) - 1)


class RingPart:
    """Part of one replica in a ring. The caller sends the returned chunks, and passes in arrivals.

    Attributes:
        unrequested, ahead, left: see `RingMember`.
        travelling: shape and dtype of the array of each hop.
    """

    def __init__(
        self,
        ring: Ring,
        node: int,
        gradients: PyTree,
        dtype: jnp.dtype,
        here: NodeSharding | None = None,
    ):
        """Begin with the gradients of the replica on `node`; hops carry sums as `dtype`.

        If `here` is a mesh, the gradients are sharded over it.
        """
        self.ring = ring
        self._here = None if here is None or here.mesh is None else here
        self.position = ring.nodes.index(node)
        self.ahead = ring.ahead[self.position]
        rows = () if ring.rows == 1 else (ring.rows,)
        self.travelling = jax.ShapeDtypeStruct((*rows, ring.chunk_length), dtype)
        self.unrequested = self._arriving()
        self.left = ring.steps * ring.chunks
        self.like = jax.eval_shape(lambda tree: tree, gradients)
        # In `blocks`, sums replace the gradients. A chunk is copied out only when it is sent, so
        # that little memory is used in addition.
        self.of_block = ring.chunks // ring.blocks
        length = self.of_block * ring.chunk_length
        blocks = len(ring.nodes) * ring.blocks
        if self._is_cut:
            assert self._here is not None, "the node has no mesh"
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
        """Yield the chunks of the replica's own segment, which are sent first, and their hops."""
        for chunk in range(self.ring.chunks):
            yield self.ring.hop(self.position, 0, chunk), self._own(chunk)

    def arrive(self, step: int, chunk: int, array: Array) -> tuple[Hop, Array] | None:
        """Add or store a chunk that arrived in a step; return what to send next, if anything."""
        self.left -= 1
        block, start = self._place(self.ring.segment_sent(self.position - 1, step), chunk)
        last_sum = len(self.ring.nodes) - 2
        if step <= last_sum:
            array = _added(self.blocks[block], start, array)
        if step >= last_sum:
            # The complete sum: its replica also keeps it in the rounded form that it sends.
            self._keep(block, start, array)
        if step + 1 == self.ring.steps:
            return None
        return self.ring.hop(self.position, step + 1, chunk), array

    def result(self) -> PyTree:
        """Return the sum of all replicas' gradients, once no chunk is `left`."""
        if self._is_cut:
            assert self._here is not None, "the node has no mesh"
            return joined_rows(self.blocks, self._here, self.like)
        leaves, structure = jax.tree.flatten(self.like)
        summed = _join(self.blocks, tuple(leaf.shape for leaf in leaves))
        whole = jax.tree.unflatten(structure, summed)
        return whole if self._here is None else self._here.put(whole)

    def _place(self, segment: int, chunk: int) -> tuple[int, int]:
        """Return the block of a chunk, and its start in the block."""
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
