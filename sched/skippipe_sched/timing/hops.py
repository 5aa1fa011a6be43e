"""When hops arrive: they follow one another on links, and on the connections of nodes.

A node's connection carries what it sends to other locations, whichever node that goes to. Plain
code on arrays: it runs as it is, and also, compiled, within `skippipe_sched.search`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from skippipe_sched.problem.case import Case


class Hops(NamedTuple):
    """What the hops of a case take [s], first those with an activation, then with a gradient.

    `alone_s` is what one takes that meets no other. `follow` tells whether hops follow one another
    on links, and `connections` whether on the connections of nodes, too: only then is the rest
    more than one number of each kind.
    """

    alone_s: np.ndarray  # 2, nodes, nodes
    follow: bool
    connections: bool
    overhead_s: float
    latency_s: np.ndarray  # nodes, nodes
    uplink_s: np.ndarray  # 2, nodes
    link_s: np.ndarray  # 2, nodes, nodes
    downlink_s: np.ndarray  # 2, nodes
    location: np.ndarray  # nodes


@lru_cache(maxsize=8)
def hops_of(case: Case) -> Hops:
    """Reckon what hops take in a case; kept, as all that simulates asks."""
    sizes = np.array([case.activation_bytes, case.gradient_bytes])
    latency, bandwidth = case.pair_matrices
    sending, receiving = case.connection_rates
    location, _, _ = case.location_matrices
    if not case.shares_connections:
        latency, bandwidth, location = np.zeros((1, 1)), np.ones((1, 1)), np.zeros(1, np.int64)
        sending = receiving = np.ones(1)
    return Hops(
        alone_s=np.stack([case.forward_hop_s, case.backward_hop_s]),
        follow=case.contention != "none",
        connections=case.shares_connections,
        overhead_s=case.hop_overhead_s,
        latency_s=latency,
        uplink_s=sizes[:, None] / sending,
        link_s=sizes[:, None, None] / bandwidth,
        downlink_s=sizes[:, None] / receiving,
        location=location,
    )


def hop_between(hops, backward, source, target):
    """Return what a hop takes, with a gradient if `backward` is 1, else with an activation [s].

    That is of its sender, of the sender's connection, of the link, of the slower one of link and
    receiver, and on its way (`passed`). Of what it neither waits for, nor others for it, minus
    infinity.
    """
    alone_s = hops.alone_s[backward, source, target]
    if not hops.connections:
        return 0.0, -np.inf, alone_s if hops.follow else -np.inf, alone_s, 0.0
    latency_s, link_s = hops.latency_s[source, target], hops.link_s[backward, source, target]
    if hops.location[source] == hops.location[target]:
        return hops.overhead_s, -np.inf, link_s, link_s, latency_s
    slower_s = max(link_s, hops.downlink_s[backward, target])
    return hops.overhead_s, hops.uplink_s[backward, source], link_s, slower_s, latency_s


def passed(ready_s, uplink_free_s, link_free_s, hop):
    """Let a hop follow those before it on its source's connection, and on its link.

    Returns when its bytes are on the link, when connection and link are free again, and when it
    arrives [s].
    """
    # Without `max`, which takes the interpreter longer than all the rest.
    overhead_s, uplink_s, link_s, slower_s, latency_s = hop
    start_s = (ready_s if ready_s >= uplink_free_s else uplink_free_s) + overhead_s
    sent_s = start_s if start_s >= link_free_s else link_free_s
    left_s, through_s = start_s + uplink_s, sent_s + slower_s
    arrival_s = (through_s if through_s >= left_s else left_s) + latency_s
    return sent_s, left_s, sent_s + link_s, arrival_s


class Queues:
    """Until when links and connections are taken, as hops go one after another."""

    def __init__(self, case: Case):
        """Begin with all of them free."""
        self.hops = hops_of(case)
        # By node and by pair of nodes; None for what no hop waits for.
        self.free_s: dict[int | tuple[int, int] | None, float] = {}

    def all_left_s(self, node: int, ready_s: float) -> float:
        """Return when a node's connection is free for what is ready at `ready_s` [s]."""
        return max(ready_s, self.free_s.get(node, -np.inf))

    def offer_s(self, kind: str, source: int, target: int, ready_s: float) -> float:
        """Send as `send`, and return when the connection of `source` begins with it [s]."""
        hop = hop_between(self.hops, int(kind == "B"), source, target)
        begin_s = self.all_left_s(source, ready_s) if hop[1] > -np.inf else ready_s
        self.send(kind, source, target, ready_s)
        return begin_s

    def send(
        self, kind: str, source: int, target: int, ready_s: float, factor: float = 1.0
    ) -> tuple[float, float]:
        """Send the input of an operation (F, L or B) from `source` to `target`.

        Returns when it is on the link and when it arrives [s], if all takes `factor` times as long.
        """
        hop = hop_between(self.hops, int(kind == "B"), source, target)
        uplink, link = source if hop[1] > -np.inf else None, (source, target)
        uplink_s, link_s = (self.free_s.get(key, -np.inf) for key in (uplink, link))
        times = passed(ready_s, uplink_s, link_s, [factor * float(seconds) for seconds in hop])
        sent_s, self.free_s[uplink], self.free_s[link], arrival_s = times
        return sent_s, arrival_s


# What is compiled together, where it is.
ON_ARRAYS = (hop_between, passed)
