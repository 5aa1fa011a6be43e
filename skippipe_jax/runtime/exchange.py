"""Event-driven sending and receiving of hops, between hosts and between nodes of this host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import PyTree
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.hops import Queues

from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.events import EventLoop, Then
from skippipe_jax.runtime.node_sharding import whole
from skippipe_jax.runtime.ring import RingMember
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

Arrived = Callable[[float, Any], None]
"""Callback with the time of arrival, and the array, or the arrays, of a hop."""

Request = tuple[Hop, PyTree, Arrived]
"""Hop, shapes and dtypes of its arrays, and what to call when they have arrived."""


class Exchange:
    """Sender and receiver of this host's hops. Each hop of an iteration is sent once."""

    def __init__(self, loop: EventLoop, topology: Topology, links: Mapping[int, HostLink]):
        """Use `links`, where `links[h]` leads to host h, and the events of `loop`."""
        self.loop = loop
        self.topology = topology
        self.links = links
        # Between nodes of this host: arrays sent before they were requested, and the reverse.
        self.offered: dict[tuple[int, Hop], PyTree] = {}
        self.requested: dict[tuple[int, Hop], tuple[PyTree, Arrived]] = {}
        self._connections: dict[Case, Queues] = {}

    def connections(self, case: Case) -> Queues | None:
        """Return the queues of the nodes' connections, or None if the case does not share any."""
        if not case.shares_connections:
            return None
        return self._connections.setdefault(case, Queues(case))

    def give(self, hop: Hop, iteration: int, arrays: PyTree) -> None:
        """Send the arrays of a hop, or pass them on to a node of this host."""
        if not self.topology.is_local_node(hop.target):
            sent = arrays if self._keeps_sharding(hop) else jax.tree.map(whole, arrays)
            self.links[self.topology.host_of[hop.target]].send(hop, iteration, sent)
            return
        name = iteration, hop
        if name in self.requested:
            self._deliver(arrays, *self.requested.pop(name))
        else:
            self.offered[name] = arrays

    def put(self, hop: Hop, arrays: PyTree) -> PyTree:
        """Put what a hop carries on the node of this host to which it leads."""
        sharding = self.topology.sharding(hop.target)
        return jax.device_put(arrays, jax.tree.map(lambda own: sharding.of_hop(own.shape), arrays))

    def ask(self, hop: Hop, iteration: int, like: PyTree, then: Arrived) -> None:
        """Request the arrays of a hop; call `then` with their time of arrival and the arrays.

        They have the shardings of `like`, by default that of activations on the node.
        """
        sharding, name = self.topology.sharding(hop.target), (iteration, hop)
        there = jax.tree.map(lambda own: own.sharding or sharding.of_hop(own.shape), like)
        if not self.topology.is_local_node(hop.source):
            here = there
            if not self._keeps_sharding(hop):
                here = jax.tree.map(lambda own: own.sharding or sharding.first, like)
            like = jax.tree.map(
                lambda own, sharding: jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=sharding),
                like,
                here,
            )
            link = self.links[self.topology.host_of[hop.source]]
            arrays = link.receive(hop, iteration, like)
            self.loop.when_ready(
                arrays,
                lambda at_s: then(at_s, arrays if here == there else jax.device_put(arrays, there)),
            )
        elif name in self.offered:
            self._deliver(self.offered.pop(name), there, then)
        else:
            self.requested[name] = there, then

    def give_in_turn(self, own: Iterator[tuple[Hop, jax.Array]], iteration: int) -> None:
        """Send one array after another, with other events processed in between."""
        for hop, array in itertools.islice(own, 1):
            self.give(hop, iteration, array)
            self.loop.post(lambda _: self.give_in_turn(own, iteration))

    def ask_in_turn(self, requests: Iterator[Request], iteration: int, ahead: int) -> None:
        """Request `ahead` arrays, and another one after each arrival."""

        def ask_next() -> None:
            for hop, like, then in itertools.islice(requests, 1):
                self.ask(hop, iteration, like, partial(arrive, then))

        def arrive(then: Arrived, at_s: float, array: jax.Array) -> None:
            then(at_s, array)
            ask_next()

        for _ in range(ahead):
            ask_next()

    def run_ring(self, member: RingMember, iteration: int, then: Then) -> None:
        """Run a replica's part in a ring; call `then` when all chunks have arrived."""

        def arrive(step: int, chunk: int, at_s: float, array: jax.Array) -> None:
            following = member.arrive(step, chunk, array)
            if following is not None:
                hop, sent = following
                self.give(hop, iteration, sent)
            if member.left == 0:
                then(at_s)

        self.give_in_turn(member.begin(), iteration)
        requests = (
            (hop, like, partial(arrive, step, chunk))
            for step, chunk, hop, like in member.unrequested
        )
        self.ask_in_turn(requests, iteration, member.ahead)

    def _keeps_sharding(self, hop: Hop) -> bool:
        """Return whether both nodes of a hop have equal meshes; otherwise it is sent whole."""
        meshes = self.topology.meshes
        return meshes[hop.source] == meshes[hop.target]

    def _deliver(self, arrays: PyTree, there: PyTree, then: Arrived) -> None:
        arrays = jax.device_put(arrays, there)
        self.loop.at(self.loop.last_event_s, lambda at_s: then(at_s, arrays))
