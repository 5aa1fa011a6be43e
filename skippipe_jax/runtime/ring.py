"""Rings of a stage's replicas for slow links: sums of gradients, and messages of `outer` mode.

All-reduce: the gradients are cut into one segment for each of n replicas, and each segment into
chunks. In the first n - 1 steps a replica sends the sum of its chunk and the received one; then
each segment is summed on one replica. In n - 1 more steps the sums go round the ring, so that all
replicas have the same bits. If the replicas have equal meshes, the shards of each device go round
as they are, cut like the gradients of a single device.

All-gather: each replica has one message about a fragment. In n - 1 steps it sends first its own
message, then those received from its predecessor, so that every message reaches every replica
unchanged.

A chunk is sent on as soon as it has arrived, so sending, receiving and adding overlap, and every
link of the ring is always busy, as `skippipe_sched.timing.averaging` predicts.

A link sends arrays in the order in which they were both offered and requested (see
`skippipe_jax.runtime.transport`). If a ring shares links with hops, because its hosts serve several
nodes, an activation would wait for all data of the ring ahead of it. Chunks therefore take a small
share of a hop's time, and a host requests no more of them than keep the link busy. Inputs of
operations are requested long in advance: once offered, an input is sent after these few chunks and
before all others.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, PyTree
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.node_sharding import NodeSharding

# The amount that a server copies at a time: larger chunks would not be faster.
LARGEST_CHUNK_BYTES = 1 << 20
# Share of a hop's bytes. Two chunks, the least in flight, delay a hop by an eighth of its time.
SHARE_OF_HOP = 1 / 16
# A chunk of any size takes about a millisecond of a core, so it is to occupy the link for 20 ms. It
# has an overhead of 400 bytes, which is to be about a hundredth of it.
LEAST_CHUNK_S = 0.02
SMALLEST_CHUNK_BYTES = 1 << 15
# Time that a receiver may take to request the next chunk.
ANSWER_S = 0.02
# Chunks of a segment, so that adding overlaps with sending: the fewest for small gradients, and
# enough for large ones, even if a link is so fast that chunks could be larger.
FEWEST_CHUNKS, ENOUGH_CHUNKS = 4, 32

Segment = Float[Array, " chunks_numbers"]
Chunk = Float[Array, " numbers"]


def chunk_bytes(case: Case, nodes: Sequence[int], hop_bytes: float) -> float:
    """Return the maximum bytes of a chunk of a ring over nodes in this order.

    Hops of `hop_bytes` share its links; `math.inf` means that none do.
    """
    bandwidth = case.link_matrices[1]
    following = (*nodes[1:], nodes[0])
    slowest = min(float(bandwidth[link]) for link in zip(nodes, following, strict=True))
    of_hop = min(SHARE_OF_HOP * hop_bytes, LARGEST_CHUNK_BYTES)
    return max(of_hop, SMALLEST_CHUNK_BYTES, slowest * LEAST_CHUNK_S)


def chunks_ahead(case: Case, nodes: Sequence[int], size: float) -> tuple[int, ...]:
    """Return how many chunks of `size` bytes each node requests in advance from its predecessor.

    These are one chunk on the link and as many as the link carries in a round trip.
    """
    latency, bandwidth = case.link_matrices
    before = (nodes[-1], *nodes[:-1])
    ahead = []
    for link in zip(before, nodes, strict=True):
        round_trip_s = latency[link] + latency[link[::-1]] + ANSWER_S
        ahead.append(1 + math.ceil(bandwidth[link] * round_trip_s / size))
    return tuple(ahead)


@dataclass(frozen=True)
class Ring:
    """Ring of `nodes` in order, each with a replica, through which chunks pass.

    In each of the `steps` a replica sends at most `chunks` chunks of at most `chunk_length`
    numbers. The replica at each position requests `ahead` chunks in advance.

    With several `shards`, each device of a node has shards of the gradients, and the chunks of a
    segment are those of the devices in turn. For messages, `places` are the indices of the replicas
    in the stage, in the order of the plan.
    """

    stage: int
    nodes: tuple[int, ...]
    steps: int
    chunks: int
    chunk_length: int
    ahead: tuple[int, ...]
    shards: int = 1
    places: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        case: Case,
        stage: int,
        nodes: Sequence[int],
        length: int,
        *,
        shards: int = 1,
        width: int = 4,
        hop_bytes: float = math.inf,
    ) -> Ring:
        """Make the all-reduce of gradients of `shards` of `length`.

        Its links are those of the `case`, and each number takes `width` bytes on them. If the links
        also carry hops, these have `hop_bytes`.
        """
        segment, steps = math.ceil(length / len(nodes)), 2 * (len(nodes) - 1)
        size = segment * width * shards
        largest = math.ceil(size / LARGEST_CHUNK_BYTES)
        fewest = min(max(largest, FEWEST_CHUNKS), ENOUGH_CHUNKS)
        wanted = max(fewest, math.ceil(size / chunk_bytes(case, nodes, hop_bytes)))
        of_shard = math.ceil(wanted / shards)
        chunks, chunk_length = shards * of_shard, math.ceil(segment / of_shard)
        ahead = chunks_ahead(case, nodes, chunk_length * width)
        ahead = tuple(min(own, steps * chunks) for own in ahead)
        return cls(stage, tuple(nodes), steps, chunks, chunk_length, ahead, shards)

    @classmethod
    def of_messages(
        cls,
        case: Case,
        stage: int,
        replicas: Sequence[int],
        longest: jax.ShapeDtypeStruct,
        *,
        hop_bytes: float = math.inf,
    ) -> Ring:
        """Make the all-gather of messages, in the fastest ring of these replicas by the `case`.

        Messages have at most the size of `longest`; the last chunk of one may have fewer numbers.
        If the links also carry hops, these have `hop_bytes`.
        """
        nodes = best_ring(case, stage, sorted(replicas))
        width, steps = jnp.dtype(longest.dtype).itemsize, len(nodes) - 1
        size = min(chunk_bytes(case, nodes, hop_bytes), LARGEST_CHUNK_BYTES)
        chunk_length = max(1, math.floor(size / width))
        chunks = math.ceil(longest.size / chunk_length)
        ahead = chunks_ahead(case, nodes, chunk_length * width)
        given = stage, nodes, steps, chunks, chunk_length, ahead
        return cls(*given, places=tuple(map(replicas.index, nodes)))

    def hop(self, position: int, step: int, chunk: int) -> Hop:
        """Return the hop by which the replica at `position` sends a chunk in a step."""
        what = "messages" if self.places else "gradients"
        following = self.nodes[(position + 1) % len(self.nodes)]
        name = f"{what} of stage {self.stage}: {position}.{step}.{chunk}"
        return Hop(name, self.nodes[position], following)

    @property
    def hops(self) -> Iterator[Hop]:
        """All hops."""
        every = itertools.product(range(len(self.nodes)), range(self.steps), range(self.chunks))
        return itertools.starmap(self.hop, every)

    def segment_sent(self, position: int, step: int) -> int:
        """Return the segment that the replica at `position` sends in a step of an all-reduce."""
        return (position - step) % len(self.nodes)


class RingMember(ABC):
    """Part of one replica in a ring. The caller sends the returned chunks, and passes in arrivals.

    Attributes:
        ring: the ring.
        position: position of the replica in it.
        unrequested: step, chunk, hop and shape of all arrivals that have not been requested, in the
            order in which they are sent.
        ahead: number of chunks to request in advance.
        left: number of chunks that have not arrived.
    """

    def __init__(self, ring: Ring, node: int, likes: Sequence[jax.ShapeDtypeStruct]):
        """Begin on `node`; `likes` are the shapes of the chunks of each step."""
        self.ring = ring
        self.position = ring.nodes.index(node)
        self.ahead = ring.ahead[self.position]
        self.left = ring.steps * len(likes)
        self._likes = likes
        self.unrequested = self._arriving()

    def _arriving(self) -> Iterator[tuple[int, int, Hop, jax.ShapeDtypeStruct]]:
        before = (self.position - 1) % len(self.ring.nodes)
        for step in range(self.ring.steps):
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
        if step + 1 == self.ring.steps:
            return None
        return self.ring.hop(self.position, step + 1, chunk), array

    @abstractmethod
    def _own(self, chunk: int) -> Array:
        """Return a chunk that is sent first."""

    @abstractmethod
    def _received(self, step: int, chunk: int, array: Array) -> Array:
        """Store a chunk that arrived in a step; return the chunk to send on."""


class RingPart(RingMember):
    """Part of one replica in a ring all-reduce."""

    def __init__(
        self,
        ring: Ring,
        node: int,
        gradients: PyTree,
        dtype: jnp.dtype,
        here: NodeSharding | None = None,
    ):
        """Begin with the gradients of the replica on `node`; hops carry sums as `dtype`.

        `here` has the devices of the node, by default one. The gradients may be sharded over them.
        """
        shards = (None,) if here is None else here.devices[: ring.shards]
        likes = [
            jax.ShapeDtypeStruct(
                (ring.chunk_length,), dtype, sharding=device and SingleDeviceSharding(device)
            )
            for device in shards
        ]
        super().__init__(ring, node, likes * (ring.chunks // ring.shards))
        self._shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding),
            gradients,
        )
        # In the segments of each shard, sums replace the gradients. A chunk is copied out only when
        # it is sent, so that little memory is used in addition.
        length = ring.chunks // ring.shards * ring.chunk_length
        if here is not None and ring.shards == 1:
            gradients = jax.device_put(gradients, here.first)
        own = [gradients]
        if ring.shards > 1:
            own = [jax.tree.map(lambda leaf, d=d: _shard_on(leaf, d), gradients) for d in shards]
        self._segments = [_cut(tree, len(ring.nodes), length) for tree in own]

    def _received(self, step: int, chunk: int, array: Chunk) -> Chunk:
        segment = self.ring.segment_sent(self.position - 1, step)
        segments, start = self._place(chunk)
        last_sum = len(self.ring.nodes) - 2
        if step <= last_sum:
            array = _added(segments[segment], start, array)
        if step >= last_sum:
            # The complete sum: its replica also keeps it in the rounded form that it sends.
            segments[segment] = _kept(segments[segment], start, array)
        return array

    def result(self) -> PyTree:
        """Return the sum of all replicas' gradients, once no chunk is `left`."""
        leaves, structure = jax.tree.flatten(self._shapes)
        if self.ring.shards == 1:
            summed = _join(self._segments[0], tuple(leaf.shape for leaf in leaves))
            shardings = [leaf.sharding for leaf in leaves]
            return structure.unflatten(jax.device_put(summed, shardings))
        shapes = tuple(leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
        summed = zip(*(_join(own, shapes) for own in self._segments), strict=True)
        return structure.unflatten(
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(parts))
            for leaf, parts in zip(leaves, summed, strict=True)
        )

    def _place(self, chunk: int) -> tuple[list[Segment], int]:
        """Return the segments on a chunk's device, and its start in each of them."""
        number, shard = divmod(chunk, self.ring.shards)
        return self._segments[shard], number * self.ring.chunk_length

    def _own(self, chunk: int) -> Chunk:
        segments, start = self._place(chunk)
        dtype = self._likes[chunk].dtype
        return _taken(segments[self.position], start, self.ring.chunk_length, dtype)


class Gathering(RingMember):
    """Part of one replica in the all-gather of a fragment."""

    def __init__(self, ring: Ring, node: int, message: Array):
        """Begin with the message of the replica on `node`."""
        likes = [
            jax.ShapeDtypeStruct((min(ring.chunk_length, message.size - start),), message.dtype)
            for start in range(0, message.size, ring.chunk_length)
        ]
        super().__init__(ring, node, likes)
        self._message = message
        # Received chunks by the position of their replica, and by their number.
        self._chunks: dict[int, dict[int, Array]] = {}

    def _own(self, chunk: int) -> Array:
        if len(self._likes) == 1:
            return self._message
        like = self._likes[chunk]
        return _taken(self._message, chunk * self.ring.chunk_length, like.size, like.dtype)

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


def _shard_on(array: Array, device: jax.Device) -> Array:
    """Return the shard of an array on a device."""
    return next(own.data for own in array.addressable_shards if own.device == device)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(tree: PyTree, segments: int, length: int) -> list[Segment]:
    """Cut the numbers of a tree into segments of one `length`, the last padded with zeros."""
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])
    return jnp.split(jnp.pad(flat, (0, segments * length - flat.size)), segments)


@functools.partial(jax.jit, static_argnums=1)
def _join(segments: Sequence[Segment], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Join the segments to arrays of these shapes."""
    flat = jnp.concatenate(segments)
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    return [
        flat[start : start + math.prod(shape)].reshape(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]


_concatenated = jax.jit(jnp.concatenate)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _taken(array: Array, start: int, length: int, dtype: jnp.dtype) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, start, length).astype(dtype)


@jax.jit
def _added(segment: Segment, start: int, arrived: Chunk) -> Chunk:
    own = jax.lax.dynamic_slice_in_dim(segment, start, arrived.size)
    return (own + arrived.astype(own.dtype)).astype(arrived.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _kept(segment: Segment, start: int, summed: Chunk) -> Segment:
    return jax.lax.dynamic_update_slice_in_dim(segment, summed.astype(segment.dtype), start, axis=0)
