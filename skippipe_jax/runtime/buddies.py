"""Buddy checkpoints: in-memory copies of each stage's state on a host of another stage.

The buddy of a stage is the first host, in the order of the following stages, that does not serve
the stage itself. It follows from the placement, so all hosts agree on it.

A copy is made of the state after a step, and is sent during the next `recovery.buddy_every`
iterations: one part in each, in pieces, beside the hops of that iteration. A host contributes to
the commit of an iteration only once that iteration's parts of copies have arrived, too. When a step
is committed, its parts are therefore complete, and every host has reported its copies before any
other host could request them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from skippipe_jax.config import Config
from skippipe_jax.consensus.generations import Copies
from skippipe_jax.models.footprint import copied_bytes
from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.copied import Bytes, Copy, packed, pieces, pieces_of_copies
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.topology import Topology

# Pieces of a copy that are requested at once: one on the link, and the next one.
AHEAD = 2


@dataclass(frozen=True)
class Way:
    """Route of the copies of a stage: from its first replica to a node of its buddy."""

    stage: int
    size: int
    source: int
    target: int
    hops: tuple[Hop, ...]

    def part(self, turn: int, every: int) -> Iterator[tuple[Hop, slice]]:
        """Return the pieces that are sent in iteration `turn` of `every`, and their hops."""
        length = -(-self.size // every)
        begin = min(turn * length, self.size)
        here = pieces(min(length, self.size - begin))
        return (
            (hop, slice(begin + piece.start, begin + piece.stop))
            for hop, piece in zip(self.hops, here, strict=False)
        )


def ways_of(topology: Topology, config: Config) -> list[Way]:
    """Return the routes of all stages with a buddy: a stage that all hosts serve has none."""
    plan, host_of = topology.plan, topology.host_of
    sizes = copied_bytes(config, len(plan.stages))
    numbers = iter(topology.copies)
    ways = []
    for stage, own in enumerate(pieces_of_copies(config, len(plan.stages))):
        taken = [*itertools.islice(numbers, len(own))]
        serving = {host_of[node] for node in plan.stages[stage]}
        further = (*plan.stages[stage + 1 :], *plan.stages[:stage])
        target = next(
            (node for nodes in further for node in nodes if host_of[node] not in serving), None
        )
        if target is not None:
            source = topology.replicas[stage][0]
            hops = tuple(Hop(number, source, target) for number in taken)
            ways.append(Way(stage, sizes[stage], source, target, hops))
    return ways


class Buddies:
    """Sender and keeper of this host's buddy checkpoints, iteration by iteration.

    Attributes:
        copies: all copies that it keeps.
    """

    def __init__(
        self,
        exchange: Exchange,
        replicas: Replicas,
        ways: Collection[Way],
        every: int,
        first: int,
        copies: Collection[Copy],
    ):
        """Begin after step `first` with the `copies` kept so far; without `ways` send none.

        Sending a copy takes `every` iterations.
        """
        self.copies = [*copies]
        self._exchange, self._replicas = exchange, replicas
        self._first, self._every = first, every
        topology = exchange.topology
        self._giving = [way for way in ways if topology.is_here(way.source)]
        self._keeping = [way for way in ways if topology.is_here(way.target)]
        self._told: Copies = tuple(copy.name for copy in self.copies)
        self._given: dict[int, Bytes] = {}
        self._coming: dict[int, Copy] = {}
        self._left = 0
        self._then: Callable[[Copies], None] | None = None

    def begin(self, iteration: int) -> None:
        """Send this iteration's parts of copies, and request those of the copies kept here."""
        # The previous step is committed, so all hosts know the copies reported with it.
        self.copies = [copy for copy in self.copies if copy.name in self._told]
        turn = (iteration - self._first) % self._every
        for way in self._giving:
            if turn == 0:
                self._pack(iteration, way)
            else:
                self._offer(iteration, way, turn)
        # Copies by an earlier placement are kept until the first copies by this one are complete.
        self._is_settled = iteration - self._first >= self._every
        self._is_last_part = turn == self._every - 1
        for way in self._keeping:
            if turn == 0:
                self._coming[way.stage] = Copy(way.stage, iteration, np.empty(way.size, np.uint8))
            unasked = way.part(turn, self._every)
            asked = [*way.part(turn, self._every)]
            self._left += len(asked)
            for _ in range(AHEAD):
                self._ask_next(iteration, way.stage, unasked)

    def _pack(self, iteration: int, way: Way) -> None:
        """Pack the state of a stage while nodes compute, and offer its first part.

        The step is committed only after that, so nothing overwrites the state before.
        """
        self._given.pop(way.stage, None)
        state = self._replicas.states[way.source].to_save()

        def pack() -> None:
            self._given[way.stage] = packed(state)

        def go_on(_: float) -> None:
            self._offer(iteration, way, 0)
            self._left -= 1
            self._look()

        self._left += 1
        self._exchange.loop.when_done(pack, go_on)

    def when_there(self, then: Callable[[Copies], None]) -> None:
        """Call `then` with the names of kept copies, once this iteration's parts are complete."""
        self._then = then
        self._look()

    def _tell(self) -> Copies:
        """Return the names of the copies kept here, the newest of each stage."""
        if self._is_last_part:
            # An iteration that is run again brings its copy again.
            coming = {copy.name: copy for copy in self._coming.values()}
            self.copies = [*(c for c in self.copies if c.name not in coming), *coming.values()]
        newest = {copy.stage: copy for copy in sorted(self.copies, key=lambda copy: copy.step)}
        own = {way.stage for way in self._keeping}
        self._told = tuple(
            copy.name
            for stage, copy in sorted(newest.items())
            if stage in own or not self._is_settled
        )
        return self._told

    def waits(self) -> Iterator[str]:
        """Yield descriptions of the copies that are waited for."""
        if self._then is not None and self._left:
            host_of = self._exchange.topology.host_of
            for way in self._keeping:
                yield (
                    f"a part of the buddy checkpoint of stage {way.stage} "
                    f"from host {host_of[way.source]}"
                )

    def _offer(self, iteration: int, way: Way, turn: int) -> None:
        here = self._exchange.topology.spread(way.source).first
        # The arrays may share the memory of the copy, which is not changed.
        own = (
            (hop, jax.device_put(self._given[way.stage][piece], here))
            for hop, piece in way.part(turn, self._every)
        )
        self._exchange.give_in_turn(own, iteration)

    def _ask_next(self, iteration: int, stage: int, own: Iterator[tuple[Hop, slice]]) -> None:
        for hop, piece in itertools.islice(own, 1):
            like = jax.ShapeDtypeStruct((piece.stop - piece.start,), np.uint8)
            then = partial(self._arrived, iteration, stage, piece, own)
            self._exchange.ask(hop, iteration, like, then)

    def _arrived(
        self,
        iteration: int,
        stage: int,
        piece: slice,
        own: Iterator[tuple[Hop, slice]],
        _: float,
        array: jax.Array,
    ) -> None:
        self._coming[stage].state[piece] = np.asarray(array)
        self._left -= 1
        self._ask_next(iteration, stage, own)
        self._look()

    def _look(self) -> None:
        if self._then is not None and self._left == 0:
            then, self._then = self._then, None
            then(self._tell())
