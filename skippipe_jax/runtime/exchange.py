"""Giving and asking for what hops carry, as events: between hosts and between nodes of this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.hops import Queues

from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.events import EventLoop
from skippipe_jax.runtime.spread import whole
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

Arrived = Callable[[float, jax.Array], None]
"""Called with the moment at which something came, and with what came."""


class Exchange:
    """What this host gives to nodes and gets from them. Each hop of an iteration is given once."""

    def __init__(self, loop: EventLoop, topology: Topology, links: Mapping[int, HostLink]):
        """`links[h]` leads to host h."""
        self.loop = loop
        self.topology = topology
        self.links = links
        # Between nodes of this host: what was given before it was asked for, and the reverse.
        self.given: dict[tuple[int, Hop], jax.Array] = {}
        self.wanted: dict[tuple[int, Hop], Arrived] = {}
        self._connections: dict[Case, Queues] = {}

    def connections(self, case: Case) -> Queues | None:
        """Return until when each node's connection is taken, if it is shared in this case."""
        if not case.shares_connections:
            return None
        return self._connections.setdefault(case, Queues(case))

    def give(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Send an array, or pass it on to a node of this host."""
        if not self.topology.is_here(hop.target):
            sent = array if self._goes_as_it_lies(hop) else whole(array)
            self.links[self.topology.host_of[hop.target]].send(hop, iteration, sent)
            return
        array = jax.device_put(array, self.topology.spread(hop.target).of_hop(array.shape))
        name = iteration, hop
        if name in self.wanted:
            self._hand_over(array, self.wanted.pop(name))
        else:
            self.given[name] = array

    def ask(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct, then: Arrived) -> None:
        """Call `then` with what a hop brings, and when it came."""
        name = iteration, hop
        if not self.topology.is_here(hop.source):
            link = self.links[self.topology.host_of[hop.source]]
            there = self.topology.spread(hop.target).of_hop(like.shape)
            if self._goes_as_it_lies(hop):
                like = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=there)
                array = link.receive(hop, iteration, like)
                self.loop.when_ready(array, lambda at_s: then(at_s, array))
            else:
                array = link.receive(hop, iteration, like)
                self.loop.when_ready(array, lambda at_s: then(at_s, jax.device_put(array, there)))
        elif name in self.given:
            self._hand_over(self.given.pop(name), then)
        else:
            self.wanted[name] = then

    def _goes_as_it_lies(self, hop: Hop) -> bool:
        """Tell whether both nodes of a hop have equal meshes; else it is sent whole."""
        meshes = self.topology.meshes
        return meshes[hop.source] == meshes[hop.target]

    def _hand_over(self, array: jax.Array, then: Arrived) -> None:
        self.loop.at(self.loop.last_event_s, lambda at_s: then(at_s, array))
