"""Copies of each stage's state, which a host of another stage keeps should all others be lost.

The buddy of a stage is the first host, of those that serve the next stages, that does not serve the
stage itself. It follows from the placement, so all hosts know it.

A copy is made of the state after a step, and is on its way during the next `recovery.buddy_every`
iterations: in each a part of it, piece by piece, beside the hops of that iteration. A host holds
the gradients of an iteration, as the others hear of it, once its part of the copies has come, too.
So when a step counts, the parts of that iteration are where they belong, and what a host keeps it
has told before anybody could ask for it.
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

# So many pieces of a copy are asked for at once: one is on the link, and the next one is due.
AHEAD = 2


@dataclass(frozen=True)
class Way:
    """How copies of a stage go: from its first replica to a node of its buddy."""

    stage: int
    size: int
    source: int
    target: int
    hops: tuple[Hop, ...]

    def part(self, turn: int, every: int) -> Iterator[tuple[Hop, slice]]:
        """Return the pieces that go in one of so many iterations, each by its hop."""
        length = -(-self.size // every)
        begin = min(turn * length, self.size)
        here = pieces(min(length, self.size - begin))
        return (
            (hop, slice(begin + piece.start, begin + piece.stop))
            for hop, piece in zip(self.hops, here, strict=False)
        )


def ways_of(topology: Topology, config: Config) -> list[Way]:
    """List the ways of all stages that have a buddy: hosts that serve all stages have none."""
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
    """What this host gives and keeps of copies, from iteration to iteration.

    Attributes:
        copies: all that it keeps.
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
        """Begin with what was kept before, after step `first`; without `ways` nothing is copied.

        A copy is on its way during `every` iterations.
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
        """Give this iteration's part of copies, and ask for that of those that are kept here."""
        # The step before counts, so all that was told then is known.
        self.copies = [copy for copy in self.copies if copy.name in self._told]
        turn = (iteration - self._first) % self._every
        for way in self._giving:
            if turn == 0:
                self._pack(iteration, way)
            else:
                self._offer(iteration, way, turn)
        # Hosts that have been buddies of other stages are so no longer once all have their copies.
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
        """Pack the state of a stage while nodes compute, and offer the first part of it.

        The step counts only when that is done, so nothing writes over the state before.
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
        """Call `then` with what is kept, once all is packed and has come in this iteration."""
        self._then = then
        self._look()

    def _tell(self) -> Copies:
        """Tell what is kept here, now that all has come: of each stage the newest copy."""
        if self._is_last_part:
            # One that an iteration has brought which is run again comes again.
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
        """Return what is waited for."""
        if self._then is not None and self._left:
            host_of = self._exchange.topology.host_of
            for way in self._keeping:
                yield f"a part of the copy of stage {way.stage} from host {host_of[way.source]}"

    def _offer(self, iteration: int, way: Way, turn: int) -> None:
        here = self._exchange.topology.spread(way.source).first
        # What is offered may share its memory, which stays as it is until the next copy.
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
