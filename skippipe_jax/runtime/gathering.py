"""Ring all-gather of the messages of a stage's replicas in `outer` mode.

Each of n replicas has one message about a fragment. In n - 1 steps it sends first its own message,
then those received from its predecessor, so that every message reaches every replica unchanged.
Messages are cut into chunks, each of which is sent on as soon as it has arrived.
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
    """Ring of `nodes` in order, each with a separate replica.

    `places` are the indices of their replicas in the stage, in the order of the plan. A chunk has
    `chunk_length` numbers, the last one of a message possibly fewer. The replica at each position
    requests `ahead` chunks in advance. `numbers` are those of the ring's hops, enough for messages
    of `most_chunks`.
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
        """Find the fastest ring of these replicas over the links of `case`.

        Messages have at most the size of `longest`. If the links also carry hops, these have
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
        """Return the hop by which the replica at `position` sends a chunk in a step."""
        number = (step * self.most_chunks + chunk) * len(self.nodes) + position
        following = self.nodes[(position + 1) % len(self.nodes)]
        return Hop(self.numbers[number], self.nodes[position], following)


class Gathering:
    """Part of one replica in the all-gather of a fragment. The caller sends and requests.

    Attributes:
        ring: the ring of the messages.
        position: position of the replica in it.
        unrequested, ahead, left: see `RingMember`.
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
        self.unrequested = self._arriving()
        # Received chunks by the position of their replica, and by their number.
        self._chunks: dict[int, dict[int, Array]] = {}

    def _arriving(self) -> Iterator[tuple[int, int, Hop, jax.ShapeDtypeStruct]]:
        before = (self.position - 1) % len(self.ring.nodes)
        for step in range(self._steps):
            for chunk, start in enumerate(self._starts):
                length = min(self.ring.chunk_length, self._own.size - start)
                like = jax.ShapeDtypeStruct((length,), self._own.dtype)
                yield step, chunk, self.ring.hop(before, step, chunk), like

    def begin(self) -> Iterator[tuple[Hop, Array]]:
        """Yield the chunks of the replica's own message, which are sent first, and their hops."""
        for chunk, start in enumerate(self._starts):
            length = min(self.ring.chunk_length, self._own.size - start)
            own = self._own if length == self._own.size else _taken(self._own, start, length)
            yield self.ring.hop(self.position, 0, chunk), own

    def arrive(self, step: int, chunk: int, array: Array) -> tuple[Hop, Array] | None:
        """Store a chunk that arrived in a step; return it with its next hop, if there is one."""
        self.left -= 1
        source = (self.position - 1 - step) % len(self.ring.nodes)
        self._chunks.setdefault(source, {})[chunk] = array
        if step + 1 == self._steps:
            return None
        return self.ring.hop(self.position, step + 1, chunk), array

    def messages(self) -> dict[int, Array]:
        """Return the messages of all replicas by index, once no chunk is `left`."""
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
