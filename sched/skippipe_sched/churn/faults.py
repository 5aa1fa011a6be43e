"""When nodes vanish and when they are back: drawn by a seed, the same for every policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Change(NamedTuple):
    """A node is lost, or is there again, at a time [s]."""

    time_s: float
    node: int
    is_back: bool


def draw_changes(
    nodes: int, mtbf_s: float, repair_s: float, end_s: float, seed: int
) -> tuple[Change, ...]:
    """Draw all changes before `end_s`, in order of time; all nodes are there at first.

    A node that is there is lost after a time that is exponential with the mean `mtbf_s`, so its
    faults are a Poisson process while it is there, and it is back `repair_s` later. Each node has
    luck of its own, the same at every rate: with half the `mtbf_s` each of its lives is half as
    long.
    """
    lives = (_of_node(node, mtbf_s, repair_s, end_s, seed) for node in range(nodes))
    return tuple(heapq.merge(*lives))


def _of_node(
    node: int, mtbf_s: float, repair_s: float, end_s: float, seed: int
) -> Iterator[Change]:
    random = np.random.default_rng((seed, node))
    time_s = mtbf_s * random.standard_exponential()
    while time_s < end_s:
        yield Change(time_s, node, is_back=False)
        time_s += repair_s
        if time_s >= end_s:
            return
        yield Change(time_s, node, is_back=True)
        time_s += mtbf_s * random.standard_exponential()


class Attendance:
    """Which nodes are there, as time goes on.

    Attributes:
        there: the nodes that are there now.
    """

    def __init__(self, nodes: int, changes: tuple[Change, ...]):
        """Take `changes` in order of time; all nodes are there before the first."""
        self.there = set(range(nodes))
        self._changes = changes
        self._next = 0

    @property
    def next_s(self) -> float:
        """When the next change comes [s]; infinite if there is none."""
        done = self._next == len(self._changes)
        return float("inf") if done else self._changes[self._next].time_s

    def take(self) -> Change:
        """Let the next change come."""
        change = self._changes[self._next]
        self._next += 1
        (self.there.add if change.is_back else self.there.discard)(change.node)
        return change
