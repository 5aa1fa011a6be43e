"""Emulation of a network, and of slower nodes, by delays from the plan's case.

The delays are those of the timing model (see `skippipe_sched.timing.simulate`). An iteration on one
machine takes about as long as the plan predicts, if the machine computes faster than the emulated
nodes.
"""

from __future__ import annotations

from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain
from skippipe_sched.timing.hops import Queues
from skippipe_sched.timing.jitter import draw_time_factors
from skippipe_sched.timing.replay import Work
from skippipe_sched.timing.steady import ring_beside_hops_s

from skippipe_jax.config import NetworkConfig


class Emulation:
    """Emulated times of operations, hops and averaging, in seconds on the caller's clock."""

    def __init__(self, plan: Plan, network: NetworkConfig, seed: int):
        """Begin at iteration 0; `seed` is that of the jitter."""
        self.plan = plan
        self.network = network
        self.seed = seed
        self.queues = Queues(plan.case)
        self.work = Work(plan.case, plan.stages, plan.microbatches, plan.order)
        self.position = {
            operation: position
            for microbatch, path in enumerate(plan.microbatches)
            for position, operation in enumerate(microbatch_chain(microbatch, path))
        }
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """Draw the jitter of an iteration."""
        size = len(self.plan.microbatches), len(self.plan.stages)
        self.stretch = draw_time_factors(*size, self.network.jitter, self.seed, iteration)

    def operation_start_s(self, ready_s: float, start_s: float) -> float:
        """Return the start of an operation that was ready at `ready_s` and started at `start_s`.

        With emulated compute it is `ready_s`, so that delays of this machine do not accumulate.
        """
        return ready_s if self.network.emulate_compute else start_s

    def operation_end_s(self, operation: Operation, start_s: float, end_s: float) -> float:
        """Return the emulated end of an operation that ran from `start_s` to `end_s`."""
        if not self.network.emulate_compute:
            return end_s
        node = operation.node
        planned_s = self.plan.case.duration(operation.kind, node, self.plan.stage_of[node])
        factor = self.stretch.operations.item(operation.microbatch, self.position[operation])
        return max(end_s, start_s + planned_s * factor)

    def hop_end_s(self, source: int, following: Operation, ready_s: float) -> float:
        """Return when the input of the operation `following`, ready at `source`, arrives there."""
        factor = self.stretch.hops.item(following.microbatch, self.position[following])
        _, end_s = self.queues.send(following.kind, source, following.node, ready_s, factor)
        return end_s

    def averaging_end_s(self, stage: int, end_s: float) -> float:
        """Return the end of the averaging of a stage whose replicas had all joined by `end_s`."""
        case, nodes = self.plan.case, self.plan.stages[stage]
        if case.leaves_location(nodes) and not case.averaging.is_outer:
            end_s = max(self.queues.all_left_s(node, end_s) for node in nodes)
        planned_s = ring_beside_hops_s(self.work, stage)
        return end_s + planned_s * self.stretch.averagings.item(stage)
