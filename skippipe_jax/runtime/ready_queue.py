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
from typing import Any

from skippipe_sched.problem.plan import Operation

IN_FLIGHT_CHANGE = {"F": 1, "L": 0, "B": -1}


class ReadyQueue:
    """Ready queue of the operations of one node in one iteration.

    Attributes:
        left: operations that have not been started, in the order of the plan.
        inputs: inputs that have arrived, and when, of operations that have not been started.
        idle_since_s: when the node became idle; None while it computes.
        busy_s: seconds that the node has computed.
    """

    def __init__(
        self,
        order: Sequence[Operation],
        memory: float,
        *,
        ready_first: bool,
        idle_since_s: float = 0.0,
    ):
        """Begin with nothing in flight; `order` has at most `memory` microbatches in flight."""
        self.left = list(order)
        self.memory = memory
        self.ready_first = ready_first
        self.in_flight = 0
        self.inputs: dict[Operation, tuple[float, Any]] = {}
        self.idle_since_s: float | None = idle_since_s
        self.busy_s = 0.0

    @property
    def is_done(self) -> bool:
        """True once all operations of the node have ended."""
        return not self.left and self.idle_since_s is not None

    def arrive(self, operation: Operation, at_s: float = 0.0, value: Any = None) -> None:
        """Store the input of an operation, which arrived at `at_s`."""
        self.inputs[operation] = at_s, value

    def take(self) -> Operation | None:
        """Return the operation to start now on a free node, or None if the node has to wait."""
        in_flight = most_in_flight = self.in_flight
        for position, operation in enumerate(self.left):
            # A forward that overtakes is in flight in addition to all that it passes.
            fits = operation.kind != "F" or most_in_flight < self.memory
            if fits and operation in self.inputs:
                del self.left[position]
                self.in_flight += IN_FLIGHT_CHANGE[operation.kind]
                return operation
            if not self.ready_first:
                return None
            in_flight += IN_FLIGHT_CHANGE[operation.kind]
            most_in_flight = max(most_in_flight, in_flight)
        return None
