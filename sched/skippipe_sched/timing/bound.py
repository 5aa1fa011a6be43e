"""A time that no plan of a case can beat.

A plan is bound by its data nodes above all: every microbatch begins and ends there, is held there
all the while, and memory holds only a few. Which nodes these are is left open, but not for
nothing: data nodes near to each other average soon and have far to go to the others, data nodes
all over the world are near to every node and average late. So the bound is taken for each group
of nodes that can average equally soon, and the least of them holds for every plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import csr_array, diags_array, eye_array, hstack, vstack
from scipy.sparse.csgraph import connected_components, shortest_path

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.rules import SHARE_TOLERANCE

# Round trips are listed by group of locations, with no more groups than keep the list this short.
MOST_ROUND_TRIPS = 6_400
MOST_GROUPS = 15
# Beyond these a weaker bound must do: interleavings of one node's operations that are followed, and
# how many nodes that differ are looked at so closely.
MOST_INTERLEAVINGS = 1_000
MOST_NODES_INTERLEAVED = 64


def lower_bound_s(case: Case, path_length: int) -> float:
    """A bound [s] below `iteration_s` of every plan whose paths all visit `path_length` stages.

    It holds for any placement, any paths that keep the rules (CC1, CC3 and TC1; CC2 is not used),
    any order and either contention. The parts, each the least over what is left open:

    - Slots (`_Bound.held_s`). A data node with memory for m microbatches holds at most m at a
      time, so all of its microbatches together are away for at most m times its pipeline time,
      less what the first m must wait for each other to start, and the last m to end. How long the
      microbatches are away in total follows from their round trips: each inner node must be
      visited its share of times (CC3, TC1), so none can leave the far nodes out.
    - One node as a machine (`busy_s`): the data nodes, and the inner nodes (`_Bound.inner_s`) with
      the time before the first forward can be there and after the last backward.
    - Averaging (`_rings`): a ring whose slowest link has bandwidth b joins nodes with two
      neighbours each by links of b or more.

    The data stage averages after the pipeline, an inner stage after its own last backward, and a
    node that is no data node is in some inner stage.
    """
    return _Bound(case, path_length).seconds()


@dataclass(frozen=True)
class _Groups:
    """Nodes by location; where locations are many, by group of near ones.

    `count[g]` nodes are in group g; between groups everything is the best of any pair of nodes.
    """

    of_node: Int[np.ndarray, " nodes"]
    count: Int[np.ndarray, " groups"]
    hop_s: Float[np.ndarray, "groups groups"]
    there_and_back_s: Float[np.ndarray, "groups groups"]
    latency: Float[np.ndarray, "groups groups"]
    bandwidth: Float[np.ndarray, "groups groups"]


def _groups(case: Case, path_length: int) -> _Groups:
    names = sorted({node.location for node in case.nodes})
    location = np.array([names.index(node.location) for node in case.nodes])
    latency, bandwidth = case.link_table.matrices(names)
    hop_s = latency + case.activation_bytes / bandwidth + case.hop_overhead_s
    alone = np.flatnonzero(np.bincount(location) == 1)
    hop_s[alone, alone] = np.inf
    latency[alone, alone] = np.inf
    bandwidth[alone, alone] = 0.0
    bandwidth = np.maximum(bandwidth, bandwidth.T)
    both_ways_s = hop_s + hop_s.T
    group = np.arange(len(names))
    most = _most_groups(path_length)
    if len(names) > most:
        # Slow to import, and needed here only.
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        apart_s = both_ways_s.copy()
        np.fill_diagonal(apart_s, 0.0)
        group = fcluster(linkage(squareform(apart_s), "average"), most, "maxclust") - 1
    members = [np.flatnonzero(group == g) for g in range(group.max() + 1)]

    def best(matrix: np.ndarray, choose: np.ufunc) -> np.ndarray:
        return np.array([[choose.reduce(matrix[np.ix_(a, b)], None) for b in members]
                         for a in members])  # fmt: skip

    return _Groups(
        group[location],
        np.bincount(group[location]),
        best(hop_s, np.minimum),
        best(both_ways_s, np.minimum),
        best(np.minimum(latency, latency.T), np.minimum),
        best(bandwidth, np.maximum),
    )


def _most_groups(path_length: int) -> int:
    """How many groups leave the round trips few: a group for the start, a multiset for the rest."""
    inner = path_length - 1
    return max(
        groups
        for groups in range(1, MOST_GROUPS + 1)
        if groups * math.comb(groups + inner - 1, inner) <= MOST_ROUND_TRIPS
    )


@dataclass(frozen=True)
class _RoundTrips:
    """All choices of the groups that a microbatch starts from and visits, in the best order."""

    start: Int[np.ndarray, " trips"]
    visits: Int[np.ndarray, "trips groups"]
    hops_s: Float[np.ndarray, " trips"]

    def least_s(self, added_s: Float[np.ndarray, " groups"]) -> Float[np.ndarray, " groups"]:
        """The quickest from each group if a visit to group g takes `added_s[g]` more."""
        least = np.full(len(added_s), np.inf)
        np.minimum.at(least, self.start, self.hops_s + self.visits @ added_s)
        return least


def _round_trips(
    hop_s: Float[np.ndarray, "groups groups"], count: Int[np.ndarray, " groups"], path_length: int
) -> _RoundTrips:
    """Held and Karp's dynamic program, from every group; a group has nodes for `count` visits."""
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
    return _RoundTrips(start, visits, cost_s)


def _cheapest(
    ends: np.ndarray, visits: np.ndarray, cost_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the rows that agree in `ends` and `visits` the one that costs least."""
    order = np.lexsort((cost_s, *visits.T, *ends))
    rows = np.vstack([ends, visits.T])[:, order]
    first = np.append(True, (rows[:, 1:] != rows[:, :-1]).any(axis=0))
    kept = order[first]
    return ends[:, kept], visits[kept], cost_s[kept]


class NodeWork(NamedTuple):
    """What one node must do: microbatches, how many at a time, and how long everything takes [s].

    `away_s` passes at least between a forward and the loss, `away_back_s` between the loss and the
    backward. On an inner node the loss takes no time.
    """

    microbatches: int
    memory: int
    forward_s: float
    away_s: float
    loss_s: float
    away_back_s: float
    backward_s: float


def _busy_s(works: Sequence[NodeWork]) -> Float[np.ndarray, " works"]:
    """`busy_s` of each, or where they are many and differ the weaker `busy_apart_s`."""
    distinct = set(works)
    reckon = busy_s if len(distinct) <= MOST_NODES_INTERLEAVED else busy_apart_s
    seconds = {work: reckon(work) for work in distinct}
    return np.array([seconds[work] for work in works])


@lru_cache(maxsize=1024)
def busy_s(work: NodeWork) -> float:
    """The least time [s] from a node's first forward to its last backward, on a node by itself.

    The node runs one operation at a time, and at most `memory` microbatches are between the start
    of their forward and the end of their backward. Microbatches are alike but for when they are
    away, so the first forward may be paired with the first loss and the first backward, and so
    on: sorting keeps every least distance. What is left is how the three sequences interleave,
    and every interleaving that no other outdoes is followed, unless they become too many.
    """
    microbatches, memory, forward_s, away_s, loss_s, away_back_s, backward_s = work
    # By operations started of each kind: when the node is free, when losses and backwards may be.
    states = {(0, 0, 0): [((0.0,), (), ())]}
    followed = 0
    for _ in range(3 * microbatches):
        longer = defaultdict(set)
        for (forwards, losses, backwards), futures in states.items():
            followed += len(futures)
            for (free_s,), to_loss, to_backward in futures:
                if forwards < microbatches and forwards - backwards < memory:
                    end_s = free_s + forward_s
                    future = _future(end_s, (*to_loss, end_s + away_s), to_backward)
                    longer[forwards + 1, losses, backwards].add(future)
                if to_loss:
                    end_s = max(free_s, to_loss[0]) + loss_s
                    future = _future(end_s, to_loss[1:], (*to_backward, end_s + away_back_s))
                    longer[forwards, losses + 1, backwards].add(future)
                if to_backward:
                    end_s = max(free_s, to_backward[0]) + backward_s
                    future = _future(end_s, to_loss, to_backward[1:])
                    longer[forwards, losses, backwards + 1].add(future)
        if followed > MOST_INTERLEAVINGS:
            return busy_apart_s(work)
        states = {key: _undominated(futures) for key, futures in longer.items()}
    (ends,) = states.values()
    return min(free_s for (free_s,), _, _ in ends)


_Future = tuple[tuple[float], tuple[float, ...], tuple[float, ...]]


def _future(free_s: float, to_loss: tuple[float, ...], to_backward: tuple[float, ...]) -> _Future:
    """What may be before the node is free makes no difference."""
    return (
        (free_s,),
        tuple(max(free_s, time_s) for time_s in to_loss),
        tuple(max(free_s, time_s) for time_s in to_backward),
    )


def _undominated(futures: set[_Future]) -> list[_Future]:
    kept: list[tuple[float, ...]] = []
    result = []
    for future in sorted(futures):
        times = sum(future, ())
        if not any(all(a <= b for a, b in zip(k, times, strict=True)) for k in kept):
            kept.append(times)
            result.append(future)
    return result


def busy_apart_s(work: NodeWork) -> float:
    """A bound [s] below `busy_s`: forwards, losses and backwards as if on a node of their own."""
    microbatches, memory, forward_s, away_s, loss_s, away_back_s, backward_s = work
    forward = loss = backward = 0.0
    ends: list[float] = []
    for number in range(microbatches):
        forward += forward_s
        if number >= memory:
            forward = max(forward, ends[number - memory] + forward_s)
        loss = max(loss, forward + away_s) + loss_s
        backward = max(backward, loss + away_back_s) + backward_s
        ends.append(backward)
    return max(backward, microbatches * (forward_s + loss_s + backward_s))


@dataclass(frozen=True)
class _Ring:
    """Groups whose nodes can average in `seconds` at best, if they do it with each other only."""

    seconds: float
    inside: Bool[np.ndarray, " groups"]


def _rings(groups: _Groups, replicas: int, stage_bytes: float) -> list[_Ring]:
    """For every set of `replicas` nodes one of these holds it and takes no longer than its ring.

    The nodes of a ring whose slowest link has bandwidth b are all joined by links of at least b
    and have two neighbours each, so they lie in one piece of the graph of such links that is left
    when nodes with fewer neighbours are taken away again and again.
    """
    pieces: dict[bytes, _Ring] = {}
    if replicas == 1:
        return [_Ring(0.0, np.arange(len(groups.count)) == g) for g in range(len(groups.count))]
    steps = 2 * (replicas - 1)
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
                seconds = steps / replicas * stage_bytes / bandwidth + steps * latency
                pieces[members.tobytes()] = _Ring(float(seconds), members)
    return list(pieces.values())


class _Bound:
    """One case and path length; what several parts of the bound need is reckoned once."""

    def __init__(self, case: Case, path_length: int):
        self.case = case
        self.groups = _groups(case, path_length)
        self.group = self.groups.of_node
        self.forward_s = np.array([node.forward_s for node in case.nodes])
        self.memory = np.array([node.memory for node in case.nodes])
        self.inner = range(1, len(case.stages))
        self.visits = sum(case.microbatches) * (path_length - 1)
        costs = sorted(case.stage_cost[1:])[: path_length - 1]
        # A visit costs at least the least of them, and what the others cost more comes once a path.
        self.visit_cost = costs[0] if costs else 0.0
        self.path_cost = sum(costs) - len(costs) * self.visit_cost
        self.trips = _round_trips(self.groups.there_and_back_s, self.groups.count, path_length)
        self.one_way = _round_trips(self.groups.hop_s, self.groups.count, path_length)

    def seconds(self) -> float:
        """The least over where the data nodes may be; quick estimates decide what to look at."""
        rings = _rings(self.groups, self.case.stages[0], self.case.stage_bytes[0])
        prices = self.prices(np.ones(len(self.groups.count), dtype=bool))
        bounds = [ring.seconds + self.held_s(ring.inside[self.group], prices) for ring in rings]
        closer: set[int] = set()
        while (least := int(np.argmin(bounds))) not in closer:
            bounds[least] = max(bounds[least], self.with_data_nodes(rings[least]))
            closer.add(least)
        return max(bounds[least], self.busiest_stage_s)

    def with_data_nodes(self, ring: _Ring) -> float:
        """If all data nodes are in `ring`: they average last, or an inner stage does."""
        inside = ring.inside[self.group]
        ended_s, averaged_s = self.inner_s(ring)
        pipeline_s = max(
            self.held_s(inside, self.prices(ring.inside)),
            self.data_node_s(inside),
            self.unavoidable(ended_s, inside),
        )
        return max(pipeline_s + ring.seconds, self.unavoidable(averaged_s, inside))

    def unavoidable(
        self, seconds: Float[np.ndarray, " nodes"], inside: Bool[np.ndarray, " nodes"]
    ) -> float:
        """The greatest of what inner nodes take if as many of those `inside` are data nodes."""
        data_nodes = self.case.stages[0]
        spared = np.sort(seconds[inside])[: inside.sum() - data_nodes]
        return float(max(np.append(seconds[~inside], spared), default=0.0))

    def data_node_s(self, inside: Bool[np.ndarray, " nodes"]) -> float:
        """The pipeline on the data nodes by themselves, if the best ones have most to do.

        The k-th largest number of microbatches, or more, are on k nodes, one of which is no better
        than the k-th best.
        """
        counts = sorted(self.case.microbatches, reverse=True)
        return max(
            float(np.partition(self.data_node_seconds[count][inside], place)[place])
            for place, count in enumerate(counts)
        )

    @cached_property
    def data_node_seconds(self) -> dict[int, Float[np.ndarray, " nodes"]]:
        """By number of microbatches: how long each node would be busy as a data node."""
        ratio, cost = self.case.backward_ratio, self.case.stage_cost[0]
        least_s = np.full(len(self.groups.count), np.inf)
        np.minimum.at(least_s, self.group, self.forward_s)
        path_s = self.path_cost * self.forward_s.min()
        away_s = (self.one_way.least_s(self.visit_cost * least_s) + path_s).tolist()
        back_s = self.one_way.least_s(self.visit_cost * ratio * least_s) + path_s * ratio
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
        return dict(zip(counts, _busy_s(works).reshape(len(counts), -1), strict=True))

    @cached_property
    def shares(self) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
        """The least and the most visits (CC3, TC1) of each node if it is an inner node."""
        nodes = len(self.forward_s)
        if not self.inner or not self.visits:
            return np.zeros(nodes), np.zeros(nodes)
        speed = self.forward_s.min() / self.forward_s
        low, high = [], []
        for size in set(self.case.stages[1:]):
            least = self.visits // len(self.inner)
            most = -(-self.visits // len(self.inner))
            slow, fast = (self.others(speed, size, sign) for sign in (1, -1))
            low.append(np.floor(least * speed / (speed + fast) + SHARE_TOLERANCE / 2))
            high.append(np.ceil(most * speed / (speed + slow) - SHARE_TOLERANCE / 2))
        return np.min(low, axis=0), np.max(high, axis=0)

    @staticmethod
    def others(
        speed: Float[np.ndarray, " nodes"], size: int, sign: int
    ) -> Float[np.ndarray, " nodes"]:
        """Speeds of the `size` - 1 slowest (`sign` 1) or fastest (-1) other nodes, together."""
        order = np.argsort(sign * speed, kind="stable")
        result = np.full(len(speed), speed[order[: size - 1]].sum())
        near = order[: size - 1]
        result[near] = speed[order[:size]].sum() - speed[near]
        return result

    def inner_s(
        self, ring: _Ring
    ) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
        """For each node as an inner node: the end of the pipeline, and of its stage's averaging.

        Its microbatches come from data nodes in `ring` and go there and come back between forward
        and backward, straight or over other nodes that work on them.
        """
        case = self.case
        nodes = len(self.forward_s)
        if not self.inner:
            return np.zeros(nodes), np.zeros(nodes)
        data_s = self.forward_s.min() * case.stage_cost[0]
        there, back = (self.travel_s(ratio) for ratio in (1.0, case.backward_ratio))
        head_s = data_s + there[ring.inside].min(axis=0)[self.group]
        away_s = there[:, ring.inside].min(axis=1) + back[ring.inside].min(axis=0)
        away_s = away_s[self.group] + data_s * case.loss_ratio
        tail_s = back[:, ring.inside].min(axis=1)[self.group] + data_s * case.backward_ratio
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
            last_s = np.where(low > 0, head_s + _busy_s(works), 0.0)
            ended.append(np.where(low > 0, last_s + tail_s, 0.0))
            averaged.append(last_s + ring_s[self.group])
        return np.min(ended, axis=0), np.min(averaged, axis=0)

    def travel_s(self, ratio: float) -> Float[np.ndarray, "groups groups"]:
        """From a node to another one; a stop on the way takes `ratio` forwards of the fastest."""
        hop_s = self.groups.hop_s
        stop_s = ratio * self.visit_cost * self.forward_s.min()
        stopping_s = shortest_path(hop_s + stop_s)
        return (stopping_s[:, :, None] + hop_s).min(axis=1)

    @cached_property
    def inner_rings_s(self) -> dict[tuple[int, float, float], Float[np.ndarray, " groups"]]:
        """By inner stages that differ (size, cost, bytes): the quickest ring of each group."""
        case = self.case
        least = {}
        for kind in set(
            zip(case.stages[1:], case.stage_cost[1:], case.stage_bytes[1:], strict=True)
        ):
            size, _, stage_bytes = kind
            least[kind] = np.full(len(self.groups.count), np.inf)
            for ring in _rings(self.groups, size, stage_bytes):
                least[kind][ring.inside] = np.minimum(least[kind][ring.inside], ring.seconds)
        return least

    @property
    def busiest_stage_s(self) -> float:
        """The end of any inner stage's averaging if its nodes are the fastest and share evenly."""
        case = self.case
        if not self.inner or self.visits < len(self.inner):
            return 0.0
        head_s = self.forward_s.min() * case.stage_cost[0] + float(self.groups.hop_s.min())
        speeds = np.sort(1.0 / self.forward_s)[::-1]
        visits = self.visits // len(self.inner) * (1.0 + case.backward_ratio)
        return max(
            head_s + visits * cost / float(speeds[:size].sum()) + float(ring_s.min())
            for (size, cost, _), ring_s in self.inner_rings_s.items()
        )

    def held_s(
        self, inside: Bool[np.ndarray, " nodes"], prices: Float[np.ndarray, " groups"]
    ) -> float:
        """The pipeline that the slots of data nodes `inside` allow, whatever the `prices`.

        With the c microbatches of a data node in the order of their forwards and of their last
        backwards, the i-th backward ends before forward i + m starts. So the time that they are
        held, all backward ends less all forward starts, is at most m times the end of the
        pipeline, less j forwards and j backwards for j = 0 .. m-1: forwards follow one another,
        and so do the last backwards.

        Any price on visits gives a bound (Lagrange): each microbatch is held for at least its
        cheapest round trip, visits paid at their price, and every inner node earns the price of
        its visits, of which it must have a number between its shares. Data nodes, one for each
        number of microbatches, are then chosen as an assignment; the least pipeline time at which
        their slots suffice is a ratio, found by Dinkelbach's iteration.
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
        # Start with some choice; each later one needs less time, until none does.
        place, node = np.arange(len(count)), np.arange(len(count))
        while True:
            slots_needed_s = float(needed_s[place, node].sum() + earned_s.sum())
            ratio_s = slots_needed_s / float(slots[place, node].sum())
            if ratio_s >= pipeline_s:
                return max(0.0, pipeline_s)
            pipeline_s = ratio_s
            place, node = linear_sum_assignment(needed_s - slots * pipeline_s)

    def prices(self, inside: Bool[np.ndarray, " groups"]) -> Float[np.ndarray, " groups"]:
        """Prices of visits that make `held_s` large: dual values of a linear program.

        It seeks the round trips that take least in total and visit every node as they must, data
        nodes being `inside`, with all nodes of a group alike.
        """
        case, trips = self.case, self.trips
        groups = len(self.groups.count)
        chosen = inside[trips.start]
        start, hops_s = trips.start[chosen], trips.hops_s[chosen]
        visits = csr_array(trips.visits[chosen].T.astype(float))
        size = self.groups.count
        low, high, forward_s = (
            np.bincount(self.group, weights) / size for weights in (*self.shares, self.forward_s)
        )
        starts = csr_array((np.ones(len(start)), (start, np.arange(len(start)))),
                           shape=(groups, len(start)))  # fmt: skip
        each = np.mean(case.microbatches) * eye_array(groups)
        # Unknown: how often each trip is made, visits to each group, its data nodes.
        nothing, unit = csr_array((groups, groups)), eye_array(groups)
        none = csr_array((groups, len(start)))
        one = csr_array(np.repeat([[0.0, 1.0]], [len(start) + groups, groups], axis=1))
        solution = linprog(
            np.concatenate(
                [hops_s, forward_s * self.visit_cost * (1.0 + case.backward_ratio), 0.0 * size]
            ),
            A_eq=vstack(
                [hstack([visits, -unit, nothing]), hstack([starts, nothing, -each]), one], "csr"
            ),
            b_eq=np.concatenate([np.zeros(2 * groups), [case.stages[0]]]),
            A_ub=vstack(
                [
                    hstack([none, unit, diags_array(high)]),
                    hstack([none, -unit, -diags_array(low)]),
                ],
                "csr",
            ),
            b_ub=np.concatenate([high * size, -low * size]),
            bounds=[(0, None)] * (len(start) + groups) + [(0, n) for n in size * inside],
        )
        if solution.x is None:  # As an average, groups need not meet shares; any prices will do.
            return np.zeros(groups)
        return solution.eqlin.marginals[:groups]
