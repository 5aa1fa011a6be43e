"""Layout of the nodes of a case during a division: on a stage of a lane, or idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from jaxtyping import Int

from skippipe_sched.division.parts import Cut, Whole

# Number of draws until a possible change is found.
TRIES = 20
# Number of cuts that are examined for a set of nodes.
SCREENED = 8
# Share of the first layouts in which all lanes have about as many nodes, whatever their work.
ALIKE_SHARE = 0.4
# Share of the first layouts that leave nodes idle.
FEWER_SHARE = 0.3


@dataclass(frozen=True)
class Place:
    """Nodes of a lane in the order of their stages, and its cut."""

    cut: Cut
    nodes: tuple[int, ...]

    @property
    def local(self) -> Int[np.ndarray, " nodes"]:
        """Number of each of `nodes` in the lane's own case, whose nodes are in ascending order."""
        return np.searchsorted(np.sort(self.nodes), self.nodes)

    def stage(self, number: int) -> slice:
        """Return the position of a stage's nodes in `nodes`."""
        start = sum(self.cut.sizes[:number])
        return slice(start, start + self.cut.sizes[number])

    def without(self, stage: int, node: int) -> Place:
        """Return a copy with one replica less."""
        sizes = _changed(self.cut.sizes, stage, -1)
        return Place(
            replace(self.cut, sizes=sizes), tuple(own for own in self.nodes if own != node)
        )

    def with_node(self, stage: int, node: int) -> Place:
        """Return a copy with one replica more."""
        at = self.stage(stage).stop
        sizes = _changed(self.cut.sizes, stage, 1)
        return Place(replace(self.cut, sizes=sizes), (*self.nodes[:at], node, *self.nodes[at:]))


@dataclass(frozen=True)
class Layout:
    """Places of all lanes, and the idle nodes."""

    places: tuple[Place, ...]
    idle: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of nodes of each lane."""
        return tuple(len(place.nodes) for place in self.places)

    @property
    def groups(self) -> tuple[frozenset[int], ...]:
        """Set of nodes of each lane."""
        return tuple(frozenset(place.nodes) for place in self.places)


def _changed(sizes: tuple[int, ...], stage: int, by: int) -> tuple[int, ...]:
    return (*sizes[:stage], sizes[stage] + by, *sizes[stage + 1 :])


Placed = Callable[[int, Sequence[int], np.random.Generator], Place]


class LayoutSampler:
    """Generator of layouts: initial ones, and ones with small changes.

    With `equal`, the numbers of nodes of any two lanes differ by one at most.
    """

    def __init__(self, whole: Whole, work: Sequence[float], placed: Placed, *, equal: bool):
        """Take the `work` of each lane, in any unit; `placed` puts nodes on a lane's stages."""
        self.placed = placed
        self.whole = whole
        self.work = np.array(work)
        self.equal = equal
        self.near_s = whole.case.round_trip_s + whole.case.round_trip_s.T

    def first(self, random: np.random.Generator) -> Layout:
        """Place nodes about in proportion to the work, in the order of a tour or in any order."""
        counts = self.counts(random)
        is_tour = random.random() < 0.5
        nodes = random.permutation(len(self.whole.case.nodes)).tolist()
        nodes = self.tour(nodes) if is_tour else nodes
        places = [Place(Cut(1, (), 1), ())] * len(counts)
        for lane in random.permutation(len(counts)):
            own, nodes = nodes[: counts[lane]], nodes[counts[lane] :]
            places[lane] = self.placed(int(lane), own, random)
        return Layout(tuple(places), tuple(nodes))

    def counts(self, random: np.random.Generator) -> np.ndarray:
        """Draw the number of nodes of each lane; usually all nodes are used."""
        lanes, fewest = len(self.work), self.whole.fewest_nodes
        total = len(self.whole.case.nodes)
        if random.random() < FEWER_SHARE:
            total = int(random.integers(lanes * fewest, total + 1))
        alike = self.equal or random.random() < ALIKE_SHARE
        share = self.work ** (0.0 if alike else random.uniform(0.0, 2.0))
        counts = np.full(lanes, fewest)
        first = random.permutation(lanes)
        for _ in range(total - counts.sum()):
            counts[first[np.argmax((share / counts)[first])]] += 1
        return counts

    def tour(self, left: list[int]) -> list[int]:
        """Order nodes as a tour that starts at the last one and always visits the nearest next."""
        nodes = [left.pop()]
        while left:
            nodes.append(left.pop(int(np.argmin(self.near_s[nodes[-1], left]))))
        return nodes

    def cuts(self, nodes: int, random: np.random.Generator) -> list[Cut]:
        """Draw some of the cuts that this number of nodes may have, preferring promising ones."""
        merges = self.whole.merges
        possible = [merged for merged in merges if self.whole.can_cut(nodes, merged)] or merges
        found: dict[Cut, None] = {}
        for _ in range(SCREENED):
            cuts = self.whole.cuts(nodes, possible[random.integers(len(possible))])
            found[cuts[int(len(cuts) * random.random() ** 2)]] = None
        return list(found)

    def changed(
        self, layout: Layout, ends: Sequence[float], random: np.random.Generator
    ) -> Layout | None:
        """Return a copy with one or two changes; None if none is found."""
        for _ in range(TRIES):
            changes = 1 + random.integers(2)
            other = reduce(
                lambda now, _: self.with_change(now, ends, random) if now else None,
                range(changes),
                layout,
            )
            counts = other.counts if other else ()
            if other and other != layout and not (self.equal and max(counts) - min(counts) > 1):
                return other
        return None

    def with_change(
        self, layout: Layout, ends: Sequence[float], random: np.random.Generator
    ) -> Layout | None:
        """Move one node elsewhere, or give a lane another cut; return None if impossible."""
        places = list(layout.places)
        idle = list(layout.idle)
        lanes = len(places)
        kind = random.random()
        if kind < 0.1 and lanes > 1:
            one, other = random.permutation(lanes)[:2]
            places[one], places[other] = places[other], places[one]
            return Layout(tuple(places), tuple(idle))
        if kind < 0.2:
            lane = int(random.integers(lanes))
            places[lane] = self.placed(lane, places[lane].nodes, random)
            return Layout(tuple(places), tuple(idle))
        # -1 means idle; the lane that ends last takes nodes more often than others.
        giver = int(random.integers(-1, lanes))
        taker = int(np.argmax(ends)) if random.random() < 0.4 else int(random.integers(-1, lanes))
        if kind < 0.5:
            giver = taker
        if giver >= 0:
            stages = [stage for stage, size in enumerate(places[giver].cut.sizes) if size > 1]
            if not stages:
                return None
            stage = stages[random.integers(len(stages))]
            replicas = places[giver].nodes[places[giver].stage(stage)]
            node = replicas[random.integers(len(replicas))]
            places[giver] = places[giver].without(stage, node)
        else:
            if not idle:
                return None
            node = idle.pop(int(random.integers(len(idle))))
        if taker >= 0:
            sizes = places[taker].cut.sizes
            stage = int(random.integers(len(sizes))) if random.random() < 0.7 else 0
            if stage == 0 and sizes[0] == sum(self.whole.case.microbatches):
                return None
            places[taker] = places[taker].with_node(stage, node)
        else:
            idle.append(node)
        return Layout(tuple(places), tuple(idle))
