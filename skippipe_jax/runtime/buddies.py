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

from collections.abc import Callable, Collection, Iterator
from functools import partial

import jax
import numpy as np

from skippipe_jax.consensus.generations import Copies
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.state_copy import Bytes, Copy, CopyRoute, packed

# Pieces of a copy that are requested at once: one on the link, and the next one.
REQUESTED_AHEAD = 2


class BuddyCheckpoints:
    """Sender and keeper of this host's buddy checkpoints, iteration by iteration.

    Attributes:
        copies: all copies that it keeps.
    """

    def __init__(
        self,
        exchange: Exchange,
        replicas: Replicas,
        routes: Collection[CopyRoute],
        every: int,
        first: int,
        copies: Collection[Copy],
    ):
        """Begin after step `first` with the `copies` kept so far; without `routes` send none.

        Sending a copy takes `every` iterations.
        """
        self.copies = [*copies]
        self._exchange, self._replicas = exchange, replicas
        self._first, self._every = first, every
        topology = exchange.topology
        self._sent_routes = [route for route in routes if topology.is_local_node(route.source)]
        self._received_routes = [route for route in routes if topology.is_local_node(route.target)]
        self._reported: Copies = tuple(copy.name for copy in self.copies)
        self._packed: dict[int, Bytes] = {}
        self._incoming: dict[int, Copy] = {}
        self._pending = 0
        self._when_complete: Callable[[Copies], None] | None = None

    def begin(self, iteration: int) -> None:
        """Send this iteration's parts of copies, and request those of the copies kept here."""
        # The previous step is committed, so all hosts know the copies reported with it.
        self.copies = [copy for copy in self.copies if copy.name in self._reported]
        turn = (iteration - self._first) % self._every
        for route in self._sent_routes:
            if turn == 0:
                self._pack(iteration, route)
            else:
                self._offer(iteration, route, turn)
        # Copies by an earlier placement are kept until the first copies by this one are complete.
        self._is_settled = iteration - self._first >= self._every
        self._is_last_part = turn == self._every - 1
        for route in self._received_routes:
            if turn == 0:
                self._incoming[route.stage] = Copy(
                    route.stage, iteration, np.empty(route.size, np.uint8)
                )
            requests = [
                (hop, _like(piece), partial(self._arrived, route.stage, piece))
                for hop, piece in route.part(turn, self._every)
            ]
            self._pending += len(requests)
            self._exchange.ask_in_turn(iter(requests), iteration, REQUESTED_AHEAD)

    def _pack(self, iteration: int, route: CopyRoute) -> None:
        """Pack the state of a stage while nodes compute, and offer its first part.

        The step is committed only after that, so nothing overwrites the state before.
        """
        self._packed.pop(route.stage, None)
        state = self._replicas.states[route.source].to_save()

        def pack() -> None:
            self._packed[route.stage] = packed(state)

        def offer_first_part(_: float) -> None:
            self._offer(iteration, route, 0)
            self._pending -= 1
            self._check_complete()

        self._pending += 1
        self._exchange.loop.when_done(pack, offer_first_part)

    def when_complete(self, then: Callable[[Copies], None]) -> None:
        """Call `then` with the names of kept copies, once this iteration's parts are complete."""
        self._when_complete = then
        self._check_complete()

    def _report(self) -> Copies:
        """Return the names of the copies kept here, the newest of each stage."""
        if self._is_last_part:
            # An iteration that is run again brings its copy again.
            incoming = {copy.name: copy for copy in self._incoming.values()}
            self.copies = [*(c for c in self.copies if c.name not in incoming), *incoming.values()]
        newest = {copy.stage: copy for copy in sorted(self.copies, key=lambda copy: copy.step)}
        own = {route.stage for route in self._received_routes}
        self._reported = tuple(
            copy.name
            for stage, copy in sorted(newest.items())
            if stage in own or not self._is_settled
        )
        return self._reported

    def waits(self) -> Iterator[str]:
        """Yield descriptions of the copies that are waited for."""
        if self._when_complete is not None and self._pending:
            topology = self._exchange.topology
            for route in self._received_routes:
                yield (
                    f"a part of the buddy checkpoint of stage {route.stage} "
                    f"from {topology.host_text(topology.host_of[route.source])}"
                )

    def _offer(self, iteration: int, route: CopyRoute, turn: int) -> None:
        here = self._exchange.topology.sharding(route.source).first
        # The arrays may share the memory of the copy, which is not changed.
        own = (
            (hop, jax.device_put(self._packed[route.stage][piece], here))
            for hop, piece in route.part(turn, self._every)
        )
        self._exchange.give_in_turn(own, iteration)

    def _arrived(self, stage: int, piece: slice, _: float, array: jax.Array) -> None:
        self._incoming[stage].state[piece] = np.asarray(array)
        self._pending -= 1
        self._check_complete()

    def _check_complete(self) -> None:
        if self._when_complete is not None and self._pending == 0:
            then, self._when_complete = self._when_complete, None
            then(self._report())


def _like(piece: slice) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((piece.stop - piece.start,), np.uint8)
