"""Rings of a stage's replicas for slow links: sums of gradients, and messages of `outer` mode.

All-reduce: the gradients are cut into one segment for each of n replicas, and each segment into
chunks. In the first n - 1 steps a replica sends the sum of its chunk and the received one; then
each segment is summed on one replica. In n - 1 more steps the sums go round the ring, so that all
replicas have the same bits. If the replicas have equal meshes, the shards of each device go round
as they are: a chunk then has a row for each device.

All-gather: each replica has one message about a fragment. In n - 1 steps it sends first its own
message, then those received from its predecessor, so that every message reaches every replica
unchanged.

A chunk is sent on as soon as it has arrived, so sending, receiving and adding overlap, and every
link of the ring is always busy, as `skippipe_sched.timing.averaging` predicts.
`skippipe_jax.runtime.pace` determines the size of chunks, and the number that is requested in
advance.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.averaging import best_ring

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
class _ChunkRing:
    """Ring of `nodes` in order, each with a replica, through which chunks pass.

    In each step a replica sends at most `chunks` chunks of at most `chunk_length` numbers. The
    replica at each position requests `ahead` chunks in advance. `numbers` are those of all hops.
    """

    stage: int
    nodes: tuple[int, ...]
    numbers: range
    chunks: int
    chunk_length: int
    ahead: tuple[int, ...]

    def hop(self, position: int, step: int, chunk: int) -> Hop:
        """Return the hop by which the replica at `position` sends a chunk in a step."""
        return self._hop((step * self.chunks + chunk) * len(self.nodes) + position)

    @property
    def hops(self) -> list[Hop]:
        """All hops, in the order of their numbers."""
        return [self._hop(place) for place in range(len(self.numbers))]

    def _hop(self, place: int) -> Hop:
        position = place % len(self.nodes)
        following = self.nodes[(position + 1) % len(self.nodes)]
        return Hop(self.numbers[place], self.nodes[position], following)


@dataclass(frozen=True)
class Ring(_ChunkRing):
    """Ring all-reduce. A segment has `chunks` chunks, stored in `blocks` arrays of equally many.

    The replicas are on separate devices. With several `rows`, a node has each block once for each
    of its devices.
    """

    blocks: int
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
        in_all = 2 * (len(nodes) - 1) * chunks
        hops = numbers.take(in_all * len(nodes))
        ahead = chunks_ahead(case, nodes, chunk_length * width)
        ahead = tuple(min(own, in_all) for own in ahead)
        return cls(stage, tuple(nodes), hops, chunks, chunk_length, ahead, blocks, rows)

    @property
    def steps(self) -> int:
        """Number of steps, in each of which a replica sends one segment."""
        return 2 * (len(self.nodes) - 1)

    def segment_sent(self, position: int, step: int) -> int:
        """Return the segment that the replica at `position` sends in a step."""
        return (position - step) % len(self.nodes)


@dataclass(frozen=True)
class GatheringRing(_ChunkRing):
    """Ring all-gather, with hops for messages of at most `chunks` chunks.

    `places` are the indices of the replicas in the stage, in the order of the plan. The last chunk
    of a message may have fewer numbers.
    """

    places: tuple[int, ...]

    @classmethod
    def of(
        cls,
        case: Case,
        stage: int,
        replicas: Sequence[int],
        numbers: HopNumbers,
        longest: jax.ShapeDtypeStruct,
        *,
        hop_bytes: float = math.inf,
    ) -> GatheringRing:
        """Find the fastest ring of these replicas over the links of `case`.

        Messages have at most the size of `longest`. If the links also carry hops, these have
        `hop_bytes`.
        """
        nodes = best_ring(case, stage, sorted(replicas))
        width = jnp.dtype(longest.dtype).itemsize
        size = min(chunk_bytes(case, nodes, hop_bytes), LARGEST_CHUNK_BYTES)
        chunk_length = max(1, math.floor(size / width))
        chunks = math.ceil(longest.size / chunk_length)
        hops = numbers.take((len(nodes) - 1) * chunks * len(nodes))
        ahead = chunks_ahead(case, nodes, chunk_length * width)
        places = tuple(map(replicas.index, nodes))
        return cls(stage, nodes, hops, chunks, chunk_length, ahead, places)


AnyRing = TypeVar("AnyRing", bound=_ChunkRing)


class RingMember(ABC, Generic[AnyRing]):
    """Part of one replica in a ring. The caller sends the returned chunks, and passes in arrivals.

    Attributes:
        ring: the ring.
        position: position of the replica in it.
        unrequested: step, chunk, hop and shape of all arrivals that have not been requested, in the
            order in which they are sent.
        ahead: number of chunks to request in advance.
        left: number of chunks that have not arrived.
    """

    def __init__(self, ring: AnyRing, node: int, steps: int, likes: Sequence[jax.ShapeDtypeStruct]):
        """Begin on `node`; `likes` are the shapes of the chunks of each of the `steps`."""
        self.ring = ring
        self.position = ring.nodes.index(node)
        self.ahead = ring.ahead[self.position]
        self.left = steps * len(likes)
        self._steps, self._likes = steps, likes
        self.unrequested = self._arriving()

    def _arriving(self) -> Iterator[tuple[int, int, Hop, jax.ShapeDtypeStruct]]:
        before = (self.position - 1) % len(self.ring.nodes)
        for step in range(self._steps):
            for chunk, like in enumerate(self._likes):
                yield step, chunk, self.ring.hop(before, step, chunk), like

    def begin(self) -> Iterator[tuple[Hop, Array]]:
        """Yield the chunks that are sent first, and their hops."""
        for chunk in range(len(self._likes)):
            yield self.ring.hop(self.position, 0, chunk), self._own(chunk)

    def arrive(self, step: int, chunk: int, array: Array) -> tuple[Hop, Array] | None:
        """Process a chunk that arrived in a step; return what to send next, if anything."""
        self.left -= 1
        array = self._received(step, chunk, array)
        if step + 1 == self._steps:
            return None
        return self.ring.hop(self.position, step + 1, chunk), array

    @abstractmethod
    def _own(self, chunk: int) -> Array:
        """Return a chunk that is sent first."""

    @abstractmethod
    def _received(self, step: int, chunk: int, array: Array) -> Array:
        """Store a chunk that arrived in a step; return the chunk to send on."""


class RingPart(RingMember[Ring]):
    """Part of one replica in a ring all-reduce.

    Attributes:
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
        rows = () if ring.rows == 1 else (ring.rows,)
        self.travelling = jax.ShapeDtypeStruct((*rows, ring.chunk_length), dtype)
        super().__init__(ring, node, ring.steps, [self.travelling] * ring.chunks)
        self._here = None if here is None or here.mesh is None else here
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

    def _received(self, step: int, chunk: int, array: Chunk) -> Chunk:
        block, start = self._place(self.ring.segment_sent(self.position - 1, step), chunk)
        last_sum = len(self.ring.nodes) - 2
        if step <= last_sum:
            array = _added(self.blocks[block], start, array)
        if step >= last_sum:
            # The complete sum: its replica also keeps it in the rounded form that it sends.
            self._keep(block, start, array)
        return array

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


class Gathering(RingMember[GatheringRing]):
    """Part of one replica in the all-gather of a fragment."""

    def __init__(self, ring: GatheringRing, node: int, message: Array):
        """Begin with the message of the replica on `node`."""
        likes = [
            jax.ShapeDtypeStruct((min(ring.chunk_length, message.size - start),), message.dtype)
            for start in range(0, message.size, ring.chunk_length)
        ]
        super().__init__(ring, node, len(ring.nodes) - 1, likes)
        self._message = message
        # Received chunks by the position of their replica, and by their number.
        self._chunks: dict[int, dict[int, Array]] = {}

    def _own(self, chunk: int) -> Array:
        if len(self._likes) == 1:
            return self._message
        return _taken(self._message, chunk * self.ring.chunk_length, self._likes[chunk])

    def _received(self, step: int, chunk: int, array: Array) -> Array:
        source = (self.position - 1 - step) % len(self.ring.nodes)
        self._chunks.setdefault(source, {})[chunk] = array
        return array

    def messages(self) -> dict[int, Array]:
        """Return all messages by the indices of their replicas, once no chunk is `left`."""
        places = self.ring.places
        others = {
            places[source]: _concatenated([chunks[chunk] for chunk in sorted(chunks)])
            for source, chunks in self._chunks.items()
        }
        return {places[self.position]: self._message, **others}


_cut = jax.jit(blocks_of, static_argnums=(1, 2))
_join = jax.jit(joined_blocks, static_argnums=1)
_concatenated = jax.jit(jnp.concatenate)


@functools.partial(jax.jit, static_argnums=2)
def _taken(block: Array, start: int, like: jax.ShapeDtypeStruct) -> Array:
    return jax.lax.dynamic_slice_in_dim(block, start, like.shape[-1], axis=-1).astype(like.dtype)


@jax.jit
def _added(block: Block, start: int, arrived: Chunk) -> Chunk:
    own = jax.lax.dynamic_slice_in_dim(block, start, arrived.shape[-1], axis=-1)
    return (own + arrived.astype(own.dtype)).astype(arrived.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _kept(block: Block, start: int, summed: Chunk) -> Block:
    return jax.lax.dynamic_update_slice_in_dim(block, summed.astype(block.dtype), start, axis=-1)
