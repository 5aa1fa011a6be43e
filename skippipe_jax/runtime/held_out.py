"""Validation: held-out microbatches pass forward through every stage in order.

The nodes use the stages that they hold, only activations are sent, and all replicas take part. This
is about a third of the work of training on as many microbatches. Hosts without a data node continue
with training as soon as they have sent their last activation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import compile_held_out
from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.runtime.dispatch import in_program_order
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.flow import Flow
from skippipe_jax.runtime.iteration import timeout_text
from skippipe_jax.runtime.operations import HeldOutOperations


class HeldOut:
    """Repeated evaluation of `count` held-out microbatches; equal on all hosts.

    Attributes:
        microbatches: the microbatches with a local data node, which has their batches and losses.
    """

    def __init__(
        self, exchange: Exchange, operations: HeldOutOperations, count: int, *, waits: bool
    ):
        """Compile the paths of `count` microbatches; `waits` if inputs may arrive late."""
        topology = exchange.topology
        numbers = HopNumbers(topology.first_free_hop)
        programs = compile_held_out(topology.plan.stages, topology.host_of, count, numbers)
        for link in exchange.links.values():
            link.expect(range(topology.first_free_hop, numbers.free))
        self.program = programs[topology.host]
        self.exchange = exchange
        self.operations = operations
        self.waits = waits
        data_nodes = topology.plan.stages[0]
        self.microbatches = [
            microbatch
            for microbatch in range(count)
            if topology.is_local_node(data_nodes[microbatch % len(data_nodes)])
        ]

    def sums(self, step: int, batches: Mapping[int, Batch]) -> dict[int, Float[np.ndarray, " 2"]]:
        """Return token losses [nats] and target tokens of each local microbatch after `step`.

        All hosts call this together, between two iterations.

        Raises:
            PeerTimeout: if nothing arrived from another host for `network.deadline_s`.
        """
        if self.waits:
            self._as_it_happens(step, batches)
        else:
            for _ in in_program_order(self.program, self.operations, batches):
                raise AssertionError("validation has no averaging")
        losses, self.operations.losses = self.operations.losses, {}
        return {m: np.asarray(loss, np.float64) for m, loss in sorted(losses.items())}

    def _as_it_happens(self, step: int, batches: Mapping[int, Batch]) -> None:
        loop = self.exchange.loop
        loop.begin()
        flow = Flow(
            self.exchange,
            self.operations,
            self.program,
            step,
            # The order of the operations bounds the microbatches in flight.
            lambda _: math.inf,
            ready_first=False,
        )
        flow.begin(batches)

        def describe_waits() -> str | None:
            if not flow.is_idle:
                return None
            return timeout_text(f"validation after step {step}", flow.waits(), loop.deadline_s)

        while not flow.is_done:
            flow.start_ready()
            if not flow.is_done:
                loop.run_one(describe_waits)
