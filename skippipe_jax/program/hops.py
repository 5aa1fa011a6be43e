"""The hops of an iteration and their numbers, which are handed out here and nowhere else.

A number names a hop on every host alike. All hosts therefore take the same numbers in the same
order: for what goes along the paths of any plan, for the rings of the stages, for totals, and for
held-out microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hop:
    """One transfer of an iteration, from node to node. `number` names it in the iteration."""

    number: int
    source: int
    target: int


class HopNumbers:
    """Hands out the numbers of hops, each once.

    Attributes:
        free: numbers from here on have not been taken.
    """

    def __init__(self, free: int = 0):
        """Numbers below `free` have been taken before."""
        self.free = free

    def take(self, count: int) -> range:
        """Take the next `count` numbers."""
        taken = range(self.free, self.free + count)
        self.free = taken.stop
        return taken
