"""Validation loss of the full model during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from skippipe_jax.cluster.agreement import hear, tell
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config, DataConfig
from skippipe_jax.data.batches import Batch, held_out_batches
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage.checkpointer import best_step


def read_held_out(config: Config, data: DataConfig) -> tuple[Batch, ...]:
    """Read the held-out text of a run; return () if it does not validate.

    Raises:
        InputError: if there is too little text.
    """
    if not config.validation.every:
        return ()
    size = data.microbatch_size
    microbatches = -(-config.validation.sequences // size)
    return tuple(held_out_batches(data, size, microbatches * size))


def is_out_of_patience(losses: Mapping[int, float], patience: int) -> bool:
    """Return whether `patience` validations have followed the best; `losses` is keyed by step."""
    best = best_step(losses)
    return best is not None and sum(step > best for step in losses) >= patience


class Validator:
    """Evaluator of the validation loss; every host makes one, and all use it at the same steps."""

    def __init__(
        self, config: Config, batches: Sequence[Batch], count: int, runtime: Runtime, host: Group
    ):
        """Store `count` microbatches to validate on; hosts with a data node hold `batches`."""
        self.host = host
        self.deadline_s = config.network.deadline_s
        topology = runtime.topology
        self.data_hosts = sorted({topology.host_of[node] for node in topology.plan.stages[0]})
        self.held_out = runtime.held_out(count)
        self.batches = {number: batches[number] for number in self.held_out.microbatches}

    def evaluate(self, step: int) -> float | None:
        """Compute the mean validation loss [nats per token] after `step`; None except on host 0.

        All hosts call this together, between two iterations.

        Raises:
            PeerTimeout: if nothing arrived from another host for `network.deadline_s`.
        """
        losses = self.held_out.sums(step, self.batches)
        sums = sum(losses.values(), np.zeros(2))
        name = f"validation/{step}"
        if self.host.index in self.data_hosts:
            tell(self.host, name, sums.tolist)
        if self.host.index != 0:
            return None
        sums_by_host = hear(self.host, name, self.data_hosts, self.deadline_s)
        nats, tokens = np.sum([*sums_by_host.values()], axis=0)
        return float(nats / tokens)
