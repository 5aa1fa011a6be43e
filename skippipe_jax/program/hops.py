"""Hops of an iteration and their numbers, which only this module allocates.

A number identifies the same hop on every host. All hosts therefore take the same numbers in the
same order: for the paths of all plans, for the rings of the stages, for totals, and for held-out
microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hop:
    """Transfer from node to node, identified within its iteration by `number`."""

    number: int
    source: int
    target: int


class HopNumbers:
    """Allocator of hop numbers, each of which it gives out once.

    Attributes:
        free: the first number that is free, as are all above it.
    """

    def __init__(self, free: int = 0):
        """Start at number `free`."""
        self.free = free

    def take(self, count: int) -> range:
        """Take the next `count` numbers."""
        taken = range(self.free, self.free + count)
        self.free = taken.stop
        return taken
