"""What replicas have changed goes round the ring of their stage as it is, until all have all of it.

Each replica has one message about a fragment. In n - 1 steps it passes on its own, and then what
has come from the one before it, so every message is on every replica at the end, bit for bit. They
are cut into chunks, each of which travels on as soon as it has come.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.pace import LARGEST_CHUNK_BYTES, chunk_bytes, chunks_ahead


@dataclass(frozen=True)
class GatheringRing:
    """Who passes messages to whom: `nodes` in order, each with a replica of its own.

    `places` are those of these replicas among all of their stage, as the plan lists them. A chunk
    has `chunk_length` numbers, the last one of a message fewer. The replica at each position asks
    for so many chunks `ahead`. `numbers` are those of the ring's hops, enough for messages of
    `most_chunks`.
    """

    stage: int
    nodes: tuple[int, ...]
    places: tuple[int, ...]
    numbers: range
    chunk_length: int
    most_chunks: int
    ahead: tuple[int, ...]

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
        """Find the quickest ring of these replicas, for messages of the `longest` and less.

        Its links are those of the `case`. If they carry anything but the ring, those are hops of
        `hop_bytes`.
        """
        nodes = best_ring(case, stage, sorted(replicas))
        width = jnp.dtype(longest.dtype).itemsize
        size = min(chunk_bytes(case, nodes, hop_bytes), LARGEST_CHUNK_BYTES)
        chunk_length = max(1, math.floor(size / width))
        most_chunks = math.ceil(longest.size / chunk_length)
        steps = len(nodes) - 1
        hops = numbers.take(steps * most_chunks * len(nodes))
        ahead = chunks_ahead(case, nodes, chunk_length * width)
        places = tuple(map(replicas.index, nodes))
        return cls(stage, nodes, places, hops, chunk_length, most_chunks, ahead)

    def hop(self, position: int, step: int, chunk: int) -> Hop:
        """Return what the replica at `position` passes to the next one in a step."""
        number = (step * self.most_chunks + chunk) * len(self.nodes) + position
        following = self.nodes[(position + 1) % len(self.nodes)]
        return Hop(self.numbers[number], self.nodes[position], following)


class Gathering:
    """What one replica does in a ring, about one fragment. The caller sends and asks.

    Attributes:
        ring: round which messages go.
        position: of the replica in it.
        unasked, ahead, left: see `RingMember`.
    """

    def __init__(self, ring: GatheringRing, node: int, message: Array):
        """Begin with the message of the replica on `node`."""
        self.ring = ring
        self.position = ring.nodes.index(node)
        self.ahead = ring.ahead[self.position]
        self._own = message
        self._starts = range(0, message.size, ring.chunk_length)
        self._steps = len(ring.nodes) - 1
        self.left = self._steps * len(self._starts)
        self.unasked = self._arriving()
        # By the position of the replica that it is of, and in the order of its chunks.
        self._chunks: dict[int, dict[int, Array]] = {}

    def _arriving(self) -> Iterator[tuple[int, int, Hop, jax.ShapeDtypeStruct]]:
        before = (self.position - 1) % len(self.ring.nodes)
        for step in range(self._steps):
            for chunk, start in enumerate(self._starts):
                length = min(self.ring.chunk_length, self._own.size - start)
                like = jax.ShapeDtypeStruct((length,), self._own.dtype)
                yield step, chunk, self.ring.hop(before, step, chunk), like

    def begin(self) -> Iterator[tuple[Hop, Array]]:
        """Return what is sent first, the own message: chunk by chunk, as the caller takes it."""
        for chunk, start in enumerate(self._starts):
            length = min(self.ring.chunk_length, self._own.size - start)
            own = self._own if length == self._own.size else _taken(self._own, start, length)
            yield self.ring.hop(self.position, 0, chunk), own

    def arrive(self, step: int, chunk: int, array: Array) -> tuple[Hop, Array] | None:
        """Take in what came in a step; what is sent on because of it, if anything is."""
        self.left -= 1
        source = (self.position - 1 - step) % len(self.ring.nodes)
        self._chunks.setdefault(source, {})[chunk] = array
        if step + 1 == self._steps:
            return None
        return self.ring.hop(self.position, step + 1, chunk), array

    def messages(self) -> dict[int, Array]:
        """Return the messages of all replicas, by index, when nothing is `left` to come."""
        places = self.ring.places
        others = {
            places[source]: _joined([chunks[chunk] for chunk in sorted(chunks)])
            for source, chunks in self._chunks.items()
        }
        return {places[self.position]: self._own, **others}


@functools.partial(jax.jit, static_argnums=2)
def _taken(message: Array, start: int, length: int) -> Array:
    return jax.lax.dynamic_slice(message, (start,), (length,))


def _joined(chunks: Sequence[Array]) -> Array:
    return chunks[0] if len(chunks) == 1 else _concatenated(chunks)


@jax.jit
def _concatenated(chunks: Sequence[Array]) -> Array:
    return jnp.concatenate(chunks)
