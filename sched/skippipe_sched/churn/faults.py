"""Times at which nodes fail and return, drawn from a seed and equal for every policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Change(NamedTuple):
    """Loss or return of a node at a time [s]."""

    time_s: float
    node: int
    is_return: bool


def draw_changes(
    nodes: int, mtbf_s: float, repair_s: float, end_s: float, seed: int
) -> tuple[Change, ...]:
    """Draw all changes before `end_s`, in order of time; all nodes are present at first.

    A present node fails after an exponentially distributed time with mean `mtbf_s`, so its faults
    are a Poisson process while it is present. It returns `repair_s` later. Each node has its own
    random numbers, the same at every rate: with half the `mtbf_s`, each of its lives is half as
    long.
    """
    lives = (_changes_of_node(node, mtbf_s, repair_s, end_s, seed) for node in range(nodes))
    return tuple(heapq.merge(*lives))


def _changes_of_node(
    node: int, mtbf_s: float, repair_s: float, end_s: float, seed: int
) -> Iterator[Change]:
    random = np.random.default_rng((seed, node))
    time_s = mtbf_s * random.standard_exponential()
    while time_s < end_s:
        yield Change(time_s, node, is_return=False)
        time_s += repair_s
        if time_s >= end_s:
            return
        yield Change(time_s, node, is_return=True)
        time_s += mtbf_s * random.standard_exponential()


class AvailabilityTrace:
    """Set of present nodes over time.

    Attributes:
        present: the nodes that are present now.
    """

    def __init__(self, nodes: int, changes: tuple[Change, ...]):
        """Take `changes` in order of time; all nodes are present before the first."""
        self.present = set(range(nodes))
        self._changes = changes
        self._next = 0

    @property
    def next_s(self) -> float:
        """Time of the next change [s]; infinite if there is none."""
        done = self._next == len(self._changes)
        return float("inf") if done else self._changes[self._next].time_s

    def apply_next(self) -> Change:
        """Apply the next change and return it."""
        change = self._changes[self._next]
        self._next += 1
        (self.present.add if change.is_return else self.present.discard)(change.node)
        return change
