"""The held-out loss of the full model while it trains, and the checkpoint where it was lowest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config, DataConfig
from skippipe_jax.data.batches import Batch, held_out_batches
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import saved_steps
from skippipe_jax.storage.writer import CheckpointWriter


class Validation:
    """Computes the held-out loss; all hosts make one, and use it at the same steps."""

    def __init__(self, config: Config, data: DataConfig, runtime: Runtime, host: Membership):
        """Read the held-out text where a data node is served, and lay out the ways over the nodes.

        Raises:
            InputError: if there is too little text.
        """
        self.host = host
        self.deadline_s = config.network.deadline_s
        topology = runtime.topology
        self.data_hosts = sorted({topology.host_of[node] for node in topology.plan.stages[0]})
        batches: list[Batch] = []
        if host.index in self.data_hosts:
            size = data.microbatch_size
            limit = -(-config.validation.sequences // size)
            batches = list(held_out_batches(data, size, limit))
        # How many there are depends on the text, which other hosts need not have.
        first = self.data_hosts[0]
        if host.index == first:
            host.put("validation/microbatches", str(len(batches)))
        timeout_s = config.cluster.connect_timeout_s
        count = int(host.get("validation/microbatches", timeout_s, source=first))
        self.held_out = runtime.held_out(count)
        self.batches = {number: batches[number] for number in self.held_out.microbatches}

    def loss(self, step: int) -> float | None:
        """Mean held-out loss [nats per token] after `step`, on host 0; None on the others.

        All hosts call this together, between two iterations.

        Raises:
            DeadlinePassed: if nothing came from another host for `network.deadline_s`.
        """
        losses = self.held_out.sums(step, self.batches)
        sums = sum(losses.values(), np.zeros(2))
        if self.host.index in self.data_hosts:
            self.host.put(f"validation/{step}/{self.host.index}", json.dumps(sums.tolist()))
        if self.host.index != 0:
            return None
        told = [
            json.loads(self.host.get(f"validation/{step}/{host}", self.deadline_s, source=host))
            for host in self.data_hosts
        ]
        nats, tokens = np.sum(told, axis=0)
        return float(nats / tokens)


class BestCheckpoint:
    """Of the checkpoints of a run, the one with the lowest held-out loss, which is not removed.

    Its step and loss are in best.json. Only a step that is validated and saved can be the best.
    """

    def __init__(self, writer: CheckpointWriter, folder: Path | None):
        """Find the best of those that are there; `folder` is the run folder on host 0, or None."""
        self.writer = writer
        self.folder = folder
        self.loss = math.inf
        if folder is not None:
            # A run that goes on from an earlier step takes later ones anew.
            (folder / run_folder.BEST).unlink(missing_ok=True)
            saved = saved_steps(folder)
            for line in run_folder.read_metrics(folder):
                if line["step"] in saved:
                    self.consider(line["step"], line.get("validation_loss"))

    def consider(self, step: int, loss: float | None) -> None:
        """Hold on to the checkpoint of `step` if its loss, where one is known, is the lowest."""
        if self.folder is not None and loss is not None and loss < self.loss:
            self.loss = loss
            self.writer.protect(step)
            run_folder.write_best(self.folder, step, loss)
