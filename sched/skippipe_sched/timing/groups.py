"""Groups of nodes at near locations: the fastest round trips and rings between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components

from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.problem.case import Case
from skippipe_sched.timing.averaging import all_reduce_bytes, rings_of_iteration

BetweenGroups = Float[np.ndarray, "groups groups"]
# Round trips are listed by group of locations; the number of groups keeps the list this short.
MOST_ROUND_TRIPS = 6_400
MOST_GROUPS = 15


@dataclass(frozen=True)
class Groups:
    """Nodes by location; where locations are many, by group of near ones.

    `count[g]` nodes are in group g; all values between groups are the best of any pair of nodes.
    """

    of_node: Int[np.ndarray, " nodes"]
    count: Int[np.ndarray, " groups"]
    forward_hop_s: BetweenGroups
    backward_hop_s: BetweenGroups
    there_and_back_s: BetweenGroups
    latency: BetweenGroups
    bandwidth: BetweenGroups


def groups_of(case: Case, path_length: int) -> Groups:
    """Group a case's nodes, with few enough groups that their round trips can be listed."""
    location, latency, bandwidth = (matrix.copy() for matrix in case.location_matrices)
    forward_hop_s, backward_hop_s = (
        latency + size / bandwidth + case.hop_overhead_s
        for size in (case.activation_bytes, case.gradient_bytes)
    )
    alone = np.flatnonzero(np.bincount(location) == 1)
    forward_hop_s[alone, alone] = backward_hop_s[alone, alone] = np.inf
    latency[alone, alone] = np.inf
    bandwidth[alone, alone] = 0.0
    bandwidth = np.maximum(bandwidth, bandwidth.T)
    there_and_back_s = forward_hop_s + backward_hop_s.T
    group = np.arange(len(latency))
    most = _most_groups(path_length)
    if len(latency) > most:
        # Slow to import, and needed here only.
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        distances_s = (there_and_back_s + there_and_back_s.T) / 2
        np.fill_diagonal(distances_s, 0.0)
        group = fcluster(linkage(squareform(distances_s), "average"), most, "maxclust") - 1
    members = [np.flatnonzero(group == g) for g in range(group.max() + 1)]

    def best(matrix: np.ndarray, choose: np.ufunc) -> np.ndarray:
        return np.array([[choose.reduce(matrix[np.ix_(a, b)], None) for b in members]
                         for a in members])  # fmt: skip

    return Groups(
        group[location],
        np.bincount(group[location]),
        best(forward_hop_s, np.minimum),
        best(backward_hop_s, np.minimum),
        best(there_and_back_s, np.minimum),
        best(np.minimum(latency, latency.T), np.minimum),
        best(bandwidth, np.maximum),
    )


def _most_groups(path_length: int) -> int:
    """Return the most groups with few round trips: one for the start, a multiset for the rest."""
    inner = path_length - 1
    return max(
        groups
        for groups in range(1, MOST_GROUPS + 1)
        if groups * math.comb(groups + inner - 1, inner) <= MOST_ROUND_TRIPS
    )


@dataclass(frozen=True)
class RoundTrips:
    """All choices of a microbatch's start group and visited groups, each in the best order."""

    start: Int[np.ndarray, " trips"]
    visits: Int[np.ndarray, "trips groups"]
    hops_s: Float[np.ndarray, " trips"]

    def least_s(self, added_s: Float[np.ndarray, " groups"]) -> Float[np.ndarray, " groups"]:
        """Return the shortest from each group if a visit to group g takes `added_s[g]` more."""
        least = np.full(len(added_s), np.inf)
        np.minimum.at(least, self.start, self.hops_s + self.visits @ added_s)
        return least


def round_trips(
    hop_s: BetweenGroups, count: Int[np.ndarray, " groups"], path_length: int
) -> RoundTrips:
    """List round trips by Held and Karp's dynamic program; a group has nodes for `count` visits."""
    groups = np.arange(len(count))
    start = last = groups
    visits = np.zeros((len(groups), len(groups)), dtype=np.int64)
    cost_s = np.zeros(len(groups))
    for _ in range(path_length - 1):
        left = count - visits - (start[:, None] == groups) > 0
        state, following = np.nonzero(left)
        cost_s = cost_s[state] + hop_s[last[state], following]
        start, last = start[state], following
        visits = visits[state] + (groups == following[:, None])
        (start, last, *_), visits, cost_s = _cheapest(np.stack([start, last]), visits, cost_s)
    if path_length > 1:
        cost_s = cost_s + hop_s[last, start]
    (start, *_), visits, cost_s = _cheapest(start[None], visits, cost_s)
    return RoundTrips(start, visits, cost_s)


def _cheapest(
    ends: np.ndarray, visits: np.ndarray, cost_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep the cheapest of the rows that agree in `ends` and `visits`."""
    order = np.lexsort((cost_s, *visits.T, *ends))
    rows = np.vstack([ends, visits.T])[:, order]
    first = np.append(True, (rows[:, 1:] != rows[:, :-1]).any(axis=0))
    kept = order[first]
    return ends[:, kept], visits[kept], cost_s[kept]


@dataclass(frozen=True)
class Ring:
    """Groups whose nodes can average among themselves in `seconds` at best."""

    seconds: float
    inside: Bool[np.ndarray, " groups"]


def rings_of(
    groups: Groups, replicas: int, stage_bytes: float, policy: AveragingPolicy
) -> list[Ring]:
    """List rings such that every set of `replicas` nodes is inside one that is at least as fast.

    The nodes of a ring whose slowest link has bandwidth b are all connected by links of at least b
    and have two neighbors each, so they are in one component of the graph of such links after nodes
    with fewer neighbors are repeatedly removed.
    """
    pieces: dict[bytes, Ring] = {}
    if replicas == 1:
        return [Ring(0.0, np.arange(len(groups.count)) == g) for g in range(len(groups.count))]
    steps = 2 * (replicas - 1)
    share = rings_of_iteration(policy).of_all_reduce
    size = all_reduce_bytes(policy, stage_bytes, replicas)
    for bandwidth in np.unique(groups.bandwidth[groups.bandwidth > 0])[::-1]:
        linked = groups.bandwidth >= bandwidth
        inside = np.ones(len(groups.count), dtype=bool)
        while True:
            neighbours = linked @ (groups.count * inside) - np.diag(linked)
            kept = inside & (neighbours >= min(replicas - 1, 2))
            if (kept == inside).all():
                break
            inside = kept
        _, piece = connected_components(linked & inside & inside[:, None], directed=False)
        for label in np.unique(piece[inside]):
            members = inside & (piece == label)
            if groups.count[members].sum() >= replicas and members.tobytes() not in pieces:
                latency = groups.latency[np.ix_(members, members)].min()
                seconds = share * (steps / replicas * size / bandwidth + steps * latency)
                pieces[members.tobytes()] = Ring(float(seconds), members)
    return list(pieces.values())
