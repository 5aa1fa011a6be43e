"""Validation: held-out microbatches pass forward through every stage in order.

The nodes use the stages that they hold, only activations are sent, and all replicas take part. This
is about a third of the work of training on as many microbatches. Hosts without a data node continue
with training as soon as they have sent their last activation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import compile_held_out
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.iteration import Iteration
from skippipe_jax.runtime.operations import HeldOutOperations
from skippipe_jax.runtime.transport import expect_hops


class HeldOut:
    """Repeated evaluation of `count` held-out microbatches; equal on all hosts.

    Attributes:
        microbatches: the microbatches with a local data node, which has their batches and losses.
    """

    def __init__(self, exchange: Exchange, operations: HeldOutOperations, count: int):
        """Compile the paths of `count` microbatches."""
        topology = exchange.topology
        programs = compile_held_out(topology.plan.stages, topology.host_of, count)
        self.program = programs[topology.host]
        expect_hops(exchange.links, topology.host_of, self.program.hops)
        self.exchange = exchange
        self.operations = operations
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
        validation = Iteration(
            exchange=self.exchange, operations=self.operations, program=self.program, iteration=step
        )
        validation.name = f"validation after step {step}"
        validation.execute(batches)
        losses, self.operations.losses = self.operations.losses, {}
        return {m: np.asarray(loss, np.float64) for m, loss in sorted(losses.items())}
