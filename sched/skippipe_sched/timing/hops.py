"""Arrival times of hops that queue for links and for the connections of nodes.

A node's connection carries all that it sends to other locations, whatever the target. The rule,
`passed`, is plain code that runs interpreted and also compiled within `skippipe_sched.search`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float

from skippipe_sched.problem.case import Case

Parts = tuple[float, float, float, float, float]
"""Parts of a hop [s], -inf for a resource without a queue.

Seconds for which the hop occupies its sender, its connection, the link, and the slower one of link
and receiver; and its latency.
"""


def hop_parts(case: Case, kind: str, source: int, target: int) -> Parts:
    """Return the parts of the hop to an operation (F, L or B), for `passed`."""
    if case.shares_connections:
        return tuple(parts_of_hops(case)[int(kind == "B"), source, target].tolist())
    alone_s = case.hop_duration(kind, source, target)
    return 0.0, -np.inf, alone_s if case.contention == "link" else -np.inf, alone_s, 0.0


@lru_cache(maxsize=8)
def parts_of_hops(case: Case) -> Float[np.ndarray, "2 nodes nodes 5"]:
    """Compute the parts of all hops of a case of shared connections; cached.

    Index 0 is for hops with an activation, index 1 with a gradient.
    """
    latency, bandwidth = case.pair_matrices
    sending, receiving = case.connection_rates
    location, *_ = case.location_matrices
    is_wide_area = location[:, None] != location
    parts = np.empty((2, *latency.shape, 5))
    for own, size in zip(parts, (case.activation_bytes, case.gradient_bytes), strict=True):
        link_s = size / bandwidth
        own[..., 0] = case.hop_overhead_s
        own[..., 1] = np.where(is_wide_area, (size / sending)[:, None], -np.inf)
        own[..., 2] = link_s
        own[..., 3] = np.where(is_wide_area, np.maximum(link_s, size / receiving), link_s)
        own[..., 4] = latency
    return parts


def passed(ready_s, uplink_free_s, link_free_s, hop):
    """Queue a hop behind earlier ones on its source's connection and on its link.

    Returns when its bytes are on the link, when connection and link are free again, and when it
    arrives [s].
    """
    # Without `max`, which would take the interpreter longer than all the rest.
    overhead_s, uplink_s, link_s, slower_s, latency_s = hop
    start_s = (ready_s if ready_s >= uplink_free_s else uplink_free_s) + overhead_s
    sent_s = start_s if start_s >= link_free_s else link_free_s
    left_s, through_s = start_s + uplink_s, sent_s + slower_s
    arrival_s = (through_s if through_s >= left_s else left_s) + latency_s
    return sent_s, left_s, sent_s + link_s, arrival_s


class Queues:
    """Times until which links and connections are occupied, as hops queue for them."""

    def __init__(self, case: Case):
        """Start with all of them free."""
        self.case = case
        # By node and by pair of nodes; None for hops without a queue.
        self.free_s: dict[int | tuple[int, int] | None, float] = {}

    def all_left_s(self, node: int, ready_s: float) -> float:
        """Return when a node's connection is free for data that is ready at `ready_s` [s]."""
        return max(ready_s, self.free_s.get(node, -np.inf))

    def offer_s(self, kind: str, source: int, target: int, ready_s: float) -> float:
        """Send as `send`, and return when the connection of `source` begins with it [s]."""
        hop = hop_parts(self.case, kind, source, target)
        begin_s = self.all_left_s(source, ready_s) if hop[1] > -np.inf else ready_s
        self.send(kind, source, target, ready_s)
        return begin_s

    def send(
        self, kind: str, source: int, target: int, ready_s: float, factor: float = 1.0
    ) -> tuple[float, float]:
        """Send the input of an operation (F, L or B) from `source` to `target`.

        Returns when it is on the link and when it arrives [s], if all parts take `factor` times as
        long.
        """
        hop = hop_parts(self.case, kind, source, target)
        uplink, link = source if hop[1] > -np.inf else None, (source, target)
        uplink_s, link_s = (self.free_s.get(key, -np.inf) for key in (uplink, link))
        times = passed(ready_s, uplink_s, link_s, [factor * seconds for seconds in hop])
        sent_s, self.free_s[uplink], self.free_s[link], arrival_s = times
        return sent_s, arrival_s


# Functions that are compiled together by `search.compiled`.
ON_ARRAYS = (passed,)
