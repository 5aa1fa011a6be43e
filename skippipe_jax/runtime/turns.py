"""Ready queue: choice of the next operation on a node.

A node keeps to its order in the plan (`strict`), or lets an operation whose input has arrived
overtake one that still waits (`ready-first`). The choice is local to the node, and nodes still
cannot deadlock:

Take the order in which the simulator starts all operations of the plan. At any moment, let x be the
first operation in it that no node has started. All inputs of x come from operations that have been
started, so its input will arrive. On its node, x is the first of the remaining operations. A node
lets an operation overtake only if the remaining ones can still run in the plan's order within its
memory, so x may start as soon as its node is free. Hence there is progress until all is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from skippipe_sched.problem.plan import Operation

IN_FLIGHT_CHANGE = {"F": 1, "L": 0, "B": -1}


class ReadyQueue:
    """Ready queue of the operations of one node in one iteration."""

    def __init__(self, order: Sequence[Operation], memory: float, *, ready_first: bool):
        """Begin with nothing in flight; `order` has at most `memory` microbatches in flight."""
        self.left = list(order)
        self.memory = memory
        self.ready_first = ready_first
        self.in_flight = 0
        self.arrived: set[Operation] = set()

    def arrive(self, operation: Operation) -> None:
        """Note that the input of an operation has arrived."""
        self.arrived.add(operation)

    def take(self) -> Operation | None:
        """Return the operation to start now on a free node, or None if the node has to wait."""
        in_flight = most_in_flight = self.in_flight
        for position, operation in enumerate(self.left):
            # A forward that overtakes is in flight in addition to all that it passes.
            fits = operation.kind != "F" or most_in_flight < self.memory
            if fits and operation in self.arrived:
                del self.left[position]
                self.in_flight += IN_FLIGHT_CHANGE[operation.kind]
                return operation
            if not self.ready_first:
                return None
            in_flight += IN_FLIGHT_CHANGE[operation.kind]
            most_in_flight = max(most_in_flight, in_flight)
        return None
