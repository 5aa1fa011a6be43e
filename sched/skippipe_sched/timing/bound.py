"""Lower bound on the iteration time of every plan of a case.

A plan is limited above all by its data nodes: every microbatch begins and ends there, is held there
meanwhile, and memory holds only a few. The choice of these nodes is open, with a trade-off: data
nodes near each other average soon but are far from the others, data nodes all over the world are
near every node but average late. So the bound is computed for each group of nodes that can average
equally soon, and the least of these bounds holds for every plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import csr_array, diags_array, eye_array, hstack, vstack
from scipy.sparse.csgraph import connected_components, shortest_path

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.node_subset import without_skipped_stages
from skippipe_sched.problem.rules import SHARE_TOLERANCE
from skippipe_sched.timing.averaging import (
    Seconds,
    all_reduce_bytes,
    least_averaged_s,
    rings_of_iteration,
)
from skippipe_sched.timing.one_node import NodeWork, busy_s, relaxed_busy_s

OfNodes = Float[np.ndarray, " nodes"]
BetweenGroups = Float[np.ndarray, "groups groups"]
# Above this number of different nodes, the weaker bound is used.
MOST_NODES_INTERLEAVED = 64
# Round trips are listed by group of locations; the number of groups keeps the list this short.
MOST_ROUND_TRIPS = 6_400
MOST_GROUPS = 15


@lru_cache(maxsize=16)  # A command needs it before, within and after a search.
def lower_bound_s(case: Case, path_length: int) -> float:
    """Bound [s] from below `iteration_s` of every plan whose paths all visit `path_length` stages.

    It holds for any placement, any paths that keep the rules (CC1, CC3 and TC1; CC2 is not used),
    any order and any contention. The parts, each minimized over the open choices:

    - Slots (`_Bound.held_s`). A data node with memory for m microbatches holds at most m at a time,
      so all of its microbatches together are in flight for at most m times its pipeline time, less
      the waits of the first m for each other to start, and of the last m to end. The total time in
      flight follows from the round trips: each inner node must be visited its share of times (CC3,
      TC1), so the far nodes cannot be left out.
    - One node as a machine (`busy_s`): the data nodes, and the inner nodes (`_Bound.inner_s`) with
      the time before the first forward can arrive and after the last backward.
    - A node's connection as one more machine, where it is shared: it carries the hops of all
      visits, from the first forward on; for nodes that share their location with others, it is
      unknown which hops leave the location.
    - Averaging (`_Bound.rings_of`): a ring whose slowest link has bandwidth b connects nodes with
      two neighbors each by links of b or more.

    The data stage averages after the pipeline, an inner stage after its own last backward, and a
    node that is not a data node is in some inner stage.

    Where iterations follow one another without a barrier (`averaging` in mode `outer`), it is a
    bound on their mean. A node ends one iteration before it begins the next, so the limits of a
    single node still hold, slots among them: all microbatches of a data node's iteration lie
    between its first forward and its last backward. But there an inner node may begin an iteration
    before another has ended the previous one, unless there is only one data node, and rings are
    hidden behind later iterations, except as `least_averaged_s` bounds.
    """
    return float(_Bound(without_skipped_stages(case), path_length).seconds())


def _busy_s(works: Sequence[NodeWork]) -> Float[np.ndarray, " works"]:
    """Compute `busy_s` of each, or the weaker `relaxed_busy_s` if too many differ."""
    distinct = set(works)
    node_busy_s = busy_s if len(distinct) <= MOST_NODES_INTERLEAVED else relaxed_busy_s
    seconds = {work: node_busy_s(work) for work in distinct}
    return np.array([seconds[work] for work in works])


def _travel_s(hop_s: BetweenGroups, stop_s: float) -> BetweenGroups:
    """Find the shortest travel between nodes, direct or with stops of `stop_s` on the way [s]."""
    return (shortest_path(hop_s + stop_s)[:, :, None] + hop_s).min(axis=1)


class _Bound:
    """Bound of one case and path length; values that several parts need are computed once."""

    def __init__(self, case: Case, path_length: int):
        self.case = case
        self.rings = rings_of_iteration(case.averaging)
        # Whether an iteration may begin before all of the previous one has ended.
        self.overlapping = case.averaging.is_outer and case.stages[0] > 1
        self.groups = groups_of(case, path_length)
        self.group = self.groups.of_node
        self.forward_s = np.array([node.forward_s for node in case.nodes])
        self.memory = np.array([node.memory for node in case.nodes])
        self.inner = range(1, len(case.stages))
        self.visits = sum(case.microbatches) * (path_length - 1)
        costs = sorted(case.stage_cost[1:])[: path_length - 1]
        # A visit costs at least the least of them; the excess of the others is added once per path.
        self.visit_cost = costs[0] if costs else 0.0
        self.path_cost = sum(costs) - len(costs) * self.visit_cost
        self.trips = round_trips(self.groups.there_and_back_s, self.groups.count, path_length)
        self.forward_trips, self.backward_trips = (
            round_trips(hop_s, self.groups.count, path_length)
            for hop_s in (self.groups.forward_hop_s, self.groups.backward_hop_s)
        )

    def seconds(self) -> float:
        """Minimize over sets of possible data nodes; quick bounds select the sets to examine."""
        rings = self.rings_of(self.case.stages[0], self.case.stage_bytes[0])
        prices = self.prices(np.ones(len(self.groups.count), dtype=bool))
        bounds = [
            self.averaged_s(self.held_s(ring.inside[self.group], prices), ring.seconds, 0.0)
            for ring in rings
        ]
        closer: set[int] = set()
        while (least := int(np.argmin(bounds))) not in closer:
            bounds[least] = max(bounds[least], self.with_data_nodes(rings[least]))
            closer.add(least)
        return max(bounds[least], self.busiest_stage_s)

    def rings_of(self, replicas: int, stage_bytes: float) -> list[Ring]:
        """List rings such that each set of `replicas` nodes is inside one that is at least as fast.

        The nodes of a ring whose slowest link has bandwidth b are all connected by links of at
        least b and have two neighbors each, so they are in one component of the graph of such links
        after nodes with fewer neighbors are repeatedly removed.
        """
        groups = self.groups
        pieces: dict[bytes, Ring] = {}
        if replicas == 1:
            return [Ring(0.0, np.arange(len(groups.count)) == g) for g in range(len(groups.count))]
        steps = 2 * (replicas - 1)
        size = all_reduce_bytes(self.case.averaging, stage_bytes, replicas)
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
                    seconds = steps / replicas * size / bandwidth + steps * latency
                    seconds = float(self.rings.of_all_reduce * seconds)
                    pieces[members.tobytes()] = Ring(seconds, members)
        return list(pieces.values())

    def averaged_s(self, work_s: Seconds, ring_s: Seconds, least_s: float) -> Seconds:
        """Bound the end of a stage's averaging by its work, `work_s`, and its ring, `ring_s`.

        In outer mode, each of its nodes is busy for `least_s` in each iteration.
        """
        own_s = least_s if self.case.averaging.is_outer else work_s
        return least_averaged_s(self.rings, work_s, ring_s, own_s)

    def with_data_nodes(self, ring: Ring) -> float:
        """Bound an iteration with all data nodes in `ring`: they or an inner stage average last."""
        inside = ring.inside[self.group]
        ended_s, averaged_s = self.inner_s(ring)
        pipeline_s = max(
            self.held_s(inside, self.prices(ring.inside)),
            self.data_node_s(inside),
            self.unavoidable(ended_s, inside),
        )
        fewest = self.data_node_seconds[min(self.case.microbatches)]
        averaged_last_s = self.averaged_s(pipeline_s, ring.seconds, float(fewest[inside].min()))
        return max(averaged_last_s, self.unavoidable(averaged_s, inside))

    def unavoidable(self, seconds: OfNodes, inside: Bool[np.ndarray, " nodes"]) -> float:
        """Return the largest value of inner nodes, if the worst `inside` are data nodes."""
        data_nodes = self.case.stages[0]
        spared = np.sort(seconds[inside])[: inside.sum() - data_nodes]
        return float(max(np.append(seconds[~inside], spared), default=0.0))

    def data_node_s(self, inside: Bool[np.ndarray, " nodes"]) -> float:
        """Bound the pipeline by the data nodes alone, if the best ones have most to do.

        The k-th largest number of microbatches, or more, are on k nodes, one of which is no better
        than the k-th best.
        """
        counts = sorted(self.case.microbatches, reverse=True)
        return max(
            float(np.partition(self.data_node_seconds[count][inside], place)[place])
            for place, count in enumerate(counts)
        )

    @cached_property
    def data_node_seconds(self) -> dict[int, OfNodes]:
        """Busy time of each node as a data node, by number of microbatches."""
        ratio, cost = self.case.backward_ratio, self.case.stage_cost[0]
        least_s = np.full(len(self.groups.count), np.inf)
        np.minimum.at(least_s, self.group, self.forward_s)
        path_s = self.path_cost * self.forward_s.min()
        away_s = (self.forward_trips.least_s(self.visit_cost * least_s) + path_s).tolist()
        back_s = self.backward_trips.least_s(self.visit_cost * ratio * least_s) + path_s * ratio
        counts = sorted(set(self.case.microbatches))
        works = [
            NodeWork(
                count, min(node.memory, count), node.forward_s * cost, away_s[group],
                node.forward_s * cost * self.case.loss_ratio, back_s[group],
                node.forward_s * cost * ratio,
            )
            for count in counts
            for node, group in zip(self.case.nodes, self.group, strict=True)
        ]  # fmt: skip
        busy_s = _busy_s(works).reshape(len(counts), -1)
        own_s = self.forward_s * cost * (1.0 + ratio)
        sent_s = [own_s + self.sent_s(count, back_s[self.group]) for count in counts]
        return dict(zip(counts, np.maximum(busy_s, sent_s), strict=True))

    @cached_property
    def load_s(self) -> OfNodes:
        """Seconds for which a visit occupies a node's connection, whatever its path."""
        location, *_ = self.case.location_matrices
        is_alone = np.bincount(location)[location] == 1
        return np.where(is_alone & self.trips.visits.any(), self.case.visit_load_s, 0.0)

    def sent_s(self, visits: OfNodes | int, after_s: OfNodes) -> OfNodes:
        """Bound the time from a node's first hop to the end, `after_s` after the start of its last.

        The last hop carries a gradient.
        """
        case = self.case
        last_s = case.gradient_bytes / case.connection_rates[0] + case.hop_overhead_s
        return visits * self.load_s + np.maximum(0.0, after_s - last_s)

    @cached_property
    def shares(self) -> tuple[OfNodes, OfNodes]:
        """Least and most visits (CC3, TC1) of each node if it is an inner node."""
        nodes = len(self.forward_s)
        if not self.inner or not self.visits:
            return np.zeros(nodes), np.zeros(nodes)
        low, high = [], []
        kinds = {(self.case.stages[s], self.case.stage_cost[s]): s for s in self.inner}
        for (size, _), stage in kinds.items():
            visit_s = self.case.visit_s(stage)
            speed = visit_s.min() / visit_s
            least = self.visits // len(self.inner)
            most = -(-self.visits // len(self.inner))
            slow, fast = (_others(speed, size, sign) for sign in (1, -1))
            low.append(np.floor(least * speed / (speed + fast) + SHARE_TOLERANCE / 2))
            high.append(np.ceil(most * speed / (speed + slow) - SHARE_TOLERANCE / 2))
        return np.min(low, axis=0), np.max(high, axis=0)

    def inner_s(self, ring: Ring) -> tuple[OfNodes, OfNodes]:
        """Bound for each node as an inner node the ends of the pipeline and of its averaging.

        Its microbatches come from data nodes in `ring`, go there, and come back between forward and
        backward, directly or over other nodes that work on them. Where iterations overlap, only its
        busy time in an iteration counts.
        """
        case = self.case
        nodes = len(self.forward_s)
        if not self.inner:
            return np.zeros(nodes), np.zeros(nodes)
        least_s, ratio = self.forward_s.min(), case.backward_ratio
        data_s = least_s * case.stage_cost[0]
        there = _travel_s(self.groups.forward_hop_s, self.visit_cost * least_s)
        back = _travel_s(self.groups.backward_hop_s, ratio * self.visit_cost * least_s)
        head_s = data_s + there[ring.inside].min(axis=0)[self.group]
        away_s = there[:, ring.inside].min(axis=1) + back[ring.inside].min(axis=0)
        away_s = away_s[self.group] + data_s * case.loss_ratio
        tail_s = back[:, ring.inside].min(axis=1)[self.group] + data_s * case.backward_ratio
        if self.overlapping:
            head_s, tail_s = np.zeros(nodes), np.zeros(nodes)
        low = self.shares[0].astype(int)
        ended, averaged = [], []
        for (_, cost, _), ring_s in self.inner_rings_s.items():
            works = [
                NodeWork(
                    count, min(node.memory, count), node.forward_s * cost, away, 0.0, 0.0,
                    node.forward_s * cost * case.backward_ratio,
                )
                for node, count, away in zip(case.nodes, low.tolist(), away_s, strict=True)
            ]  # fmt: skip
            working_s = _busy_s(works)
            first_s = 0.0 if self.overlapping else self.forward_s * cost
            last_s = head_s + np.maximum(working_s, first_s + low * self.load_s)
            sent_s = head_s + first_s + self.sent_s(low, tail_s)
            end_s = np.maximum(head_s + working_s + tail_s, sent_s)
            last_s, end_s = (np.where(low > 0, seconds, 0.0) for seconds in (last_s, end_s))
            ended.append(end_s)
            averaged.append(self.averaged_s(last_s, ring_s[self.group], float(working_s.min())))
        return np.min(ended, axis=0), np.min(averaged, axis=0)

    @cached_property
    def inner_rings_s(self) -> dict[tuple[int, float, float], Float[np.ndarray, " groups"]]:
        """Fastest ring of each group, by kind of inner stage (size, cost, bytes)."""
        case = self.case
        least = {}
        for kind in set(
            zip(case.stages[1:], case.stage_cost[1:], case.stage_bytes[1:], strict=True)
        ):
            size, _, stage_bytes = kind
            least[kind] = np.full(len(self.groups.count), np.inf)
            for ring in self.rings_of(size, stage_bytes):
                least[kind][ring.inside] = np.minimum(least[kind][ring.inside], ring.seconds)
        return least

    @property
    def busiest_stage_s(self) -> float:
        """End of the last inner averaging for the fastest nodes and even shares (a bound) [s]."""
        case = self.case
        if not self.inner or self.visits < len(self.inner):
            return 0.0
        head_s = self.forward_s.min() * case.stage_cost[0] + float(self.groups.forward_hop_s.min())
        head_s = 0.0 if self.overlapping else head_s
        speeds = np.sort(1.0 / self.forward_s)[::-1]
        visits = self.visits // len(self.inner) * (1.0 + case.backward_ratio)
        return max(
            self.averaged_s(
                head_s + visits * cost / float(speeds[:size].sum()), float(ring_s.min()), 0.0
            )
            for (size, cost, _), ring_s in self.inner_rings_s.items()
        )

    def held_s(
        self, inside: Bool[np.ndarray, " nodes"], prices: Float[np.ndarray, " groups"]
    ) -> float:
        """Bound the pipeline that the slots of data nodes `inside` allow, for any `prices`.

        With the c microbatches of a data node in the order of their forwards and of their last
        backwards, the i-th backward ends before forward i + m starts. So the time that they are
        held, all backward ends less all forward starts, is at most m times the end of the pipeline,
        less j forwards and j backwards for j = 0 .. m-1: forwards follow one another, and so do the
        last backwards.

        Any price on visits gives a bound (Lagrange): each microbatch is held for at least its
        cheapest round trip, visits paid at their price, and every inner node earns the price of its
        visits, whose number must be within its shares. Data nodes, one for each number of
        microbatches, are then chosen as an assignment; the least pipeline time at which their slots
        suffice is a ratio, found by Dinkelbach's iteration.
        """
        case = self.case
        low, high = self.shares
        visit_s = self.forward_s * self.visit_cost * (1.0 + case.backward_ratio)
        visit_s += prices[self.group]
        earned_s = np.minimum(low * visit_s, high * visit_s)
        data_s = self.forward_s * case.stage_cost[0]
        path_s = self.path_cost * (1.0 + case.backward_ratio) * float(self.forward_s.min())
        count = np.array(case.microbatches)[:, None]
        slots = np.minimum(self.memory, count)
        trip_s = data_s * (1.0 + case.loss_ratio + case.backward_ratio) + path_s
        trip_s = trip_s + self.trips.least_s(-prices)[self.group]
        starting_s = slots * (slots - 1) / 2 * data_s * (1.0 + case.backward_ratio)
        needed_s = (count * trip_s + starting_s - earned_s)[:, inside]
        slots = slots[:, inside]
        pipeline_s = math.inf
        # Start with any choice; each later one needs less time, until none does.
        place, node = np.arange(len(count)), np.arange(len(count))
        while True:
            slots_needed_s = float(needed_s[place, node].sum() + earned_s.sum())
            ratio_s = slots_needed_s / float(slots[place, node].sum())
            if ratio_s >= pipeline_s:
                return max(0.0, pipeline_s)
            pipeline_s = ratio_s
            place, node = linear_sum_assignment(needed_s - slots * pipeline_s)

    def prices(self, inside: Bool[np.ndarray, " groups"]) -> Float[np.ndarray, " groups"]:
        """Find prices of visits [s] that make `held_s` large: dual values of a linear program.

        It minimizes the total of the round trips that visit every node as required, with data nodes
        `inside`, and all nodes of a group alike.
        """
        size = self.groups.count
        low, high, forward_s = (
            np.bincount(self.group, weights) / size for weights in (*self.shares, self.forward_s)
        )
        visit_s = forward_s * self.visit_cost * (1.0 + self.case.backward_ratio)
        groups = len(size)
        chosen = inside[self.trips.start]
        start, hops_s = self.trips.start[chosen], self.trips.hops_s[chosen]
        visits = csr_array(self.trips.visits[chosen].T.astype(float))
        starts = csr_array((np.ones(len(start)), (start, np.arange(len(start)))),
                           shape=(groups, len(start)))  # fmt: skip
        each = np.mean(self.case.microbatches) * eye_array(groups)
        # Unknowns: how often each trip is made, visits to each group, its data nodes.
        nothing, unit = csr_array((groups, groups)), eye_array(groups)
        none = csr_array((groups, len(start)))
        one = csr_array(np.repeat([[0.0, 1.0]], [len(start) + groups, groups], axis=1))
        solution = linprog(
            np.concatenate([hops_s, visit_s, 0.0 * size]),
            A_eq=vstack(
                [hstack([visits, -unit, nothing]), hstack([starts, nothing, -each]), one], "csr"
            ),
            b_eq=np.concatenate([np.zeros(2 * groups), [self.case.stages[0]]]),
            A_ub=vstack(
                [hstack([none, unit, diags_array(high)]), hstack([none, -unit, -diags_array(low)])],
                "csr",
            ),
            b_ub=np.concatenate([high * size, -low * size]),
            bounds=[(0, None)] * (len(start) + groups) + [(0, n) for n in size * inside],
        )
        if solution.x is None:  # Averaged over a group, shares may be infeasible; any prices do.
            return np.zeros(groups)
        return solution.eqlin.marginals[:groups]


def _others(speed: OfNodes, size: int, sign: int) -> OfNodes:
    """Sum the speeds of the `size` - 1 slowest (`sign` 1) or fastest (-1) other nodes."""
    order = np.argsort(sign * speed, kind="stable")
    result = np.full(len(speed), speed[order[: size - 1]].sum())
    near = order[: size - 1]
    result[near] = speed[order[:size]].sum() - speed[near]
    return result


# Groups of nodes at near locations: the fastest round trips and rings between them.


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
