"""Layout of the nodes of a case during a division: on a stage of a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from jaxtyping import Int

from skippipe_sched.division.parts import Cut, Whole

# Number of draws until a possible change is found.
TRIES = 20
# Number of cuts that are examined for a set of nodes.
SCREENED = 8
# Share of the first layouts in which all lanes have about as many nodes, whatever their work.
EQUAL_SHARE = 0.4


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

    def moved(self, node: int, target: int) -> Place:
        """Return a copy with a node on another stage."""
        stages = [
            [own for own in self.nodes[self.stage(stage)] if own != node]
            for stage in range(len(self.cut.sizes))
        ]
        stages[target].append(node)
        sizes = tuple(map(len, stages))
        return Place(replace(self.cut, sizes=sizes), tuple(chain.from_iterable(stages)))


Layout = tuple[Place, ...]
"""Places of all lanes."""

Placed = Callable[[int, Sequence[int], np.random.Generator], Place]


class LayoutSampler:
    """Generator of layouts: initial ones, and ones with small changes.

    All nodes are used. How many each lane gets is drawn once, equal or by the work: small changes
    at most exchange the numbers of two lanes.
    """

    def __init__(self, whole: Whole, work: Sequence[float], placed: Placed):
        """Take the `work` of each lane, in any unit; `placed` puts nodes on a lane's stages."""
        self.placed = placed
        self.whole = whole
        self.work = np.array(work)
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
        return tuple(places)

    def counts(self, random: np.random.Generator) -> np.ndarray:
        """Share out all nodes, equally or by the work; return the number of each lane."""
        lanes = len(self.work)
        share = self.work ** (0.0 if random.random() < EQUAL_SHARE else random.uniform(0.0, 2.0))
        counts = np.full(lanes, self.whole.fewest_nodes)
        first = random.permutation(lanes)
        for _ in range(len(self.whole.case.nodes) - counts.sum()):
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
            other = layout
            for _ in range(1 + random.integers(2)):
                other = self.with_change(other, ends, random)
            if other != layout:
                return other
        return None

    def with_change(
        self, layout: Layout, ends: Sequence[float], random: np.random.Generator
    ) -> Layout:
        """Let two lanes exchange all nodes, cut one anew, or move a node to another stage.

        If the change is impossible, the layout is returned as it is.
        """
        places = list(layout)
        lanes = len(places)
        kind = random.random()
        # The lane that ends last is changed more often than others.
        lane = int(np.argmax(ends)) if random.random() < 0.4 else int(random.integers(lanes))
        if kind < 0.15 and lanes > 1:
            one, other = random.permutation(lanes)[:2]
            places[one], places[other] = places[other], places[one]
        elif kind < 0.4:
            places[lane] = self.placed(lane, places[lane].nodes, random)
        else:
            sizes = places[lane].cut.sizes
            sources = [stage for stage, size in enumerate(sizes) if size > 1]
            target = int(random.integers(len(sizes))) if random.random() < 0.7 else 0
            # Each data node sends a microbatch.
            has_room = target > 0 or sizes[0] < sum(self.whole.case.microbatches)
            if sources and has_room:
                source = places[lane].stage(sources[random.integers(len(sources))])
                replicas = places[lane].nodes[source]
                node = replicas[random.integers(len(replicas))]
                places[lane] = places[lane].moved(node, target)
        return tuple(places)
