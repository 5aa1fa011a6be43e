"""Which operation a node runs next.

A node keeps to its order in the plan (`strict`), or lets an operation whose input has arrived go
ahead of one that still waits (`ready-first`). Then it looks no further than itself, and still no
nodes ever wait for each other in a circle:

Take the order in which the simulator starts all operations of the plan. At any moment, let x be the
first operation in it that has not been started anywhere. All that x needs has been started, so its
input will arrive. It is the first of those that are left on its node. A node lets an operation go
ahead only if those left can then still run in the plan's order within its memory, so x may start as
soon as its node is free. Hence something always goes on until all is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from skippipe_sched.problem.plan import Operation

IN_FLIGHT_CHANGE = {"F": 1, "L": 0, "B": -1}


class Turns:
    """The operations of one node in one iteration, each started once its turn has come."""

    def __init__(self, order: Sequence[Operation], memory: float, *, ready_first: bool):
        """Begin with nothing in flight; `memory` microbatches may be, and in `order` never more."""
        self.left = list(order)
        self.memory = memory
        self.ready_first = ready_first
        self.in_flight = 0
        self.arrived: set[Operation] = set()

    def arrive(self, operation: Operation) -> None:
        """Note that the input of an operation is there."""
        self.arrived.add(operation)

    def take(self) -> Operation | None:
        """Choose the operation to start now, on a free node; None if the node has to wait."""
        in_flight = most_in_flight = self.in_flight
        for position, operation in enumerate(self.left):
            # A forward that goes ahead is in flight beside all that it passes.
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
