"""The held-out loss of the full model while it trains, and the checkpoint where it was lowest.

Held-out microbatches go forward through every stage in order, over the nodes that hold the stages:
no host needs more of the model than it has, only activations travel, and all replicas take part.
That is about a third of the work of training on as many microbatches. Hosts without a data node go
on with training as soon as they have passed on their last activation.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from skippipe_jax.cluster.agreement import DeadlinePassed
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config, DataConfig
from skippipe_jax.data.batches import Batch, held_out_batches
from skippipe_jax.models.document_mask import marked_tokens
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.executor import Executor
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.layout import saved_steps
from skippipe_jax.storage.writer import CheckpointWriter

# So many inputs of a host are asked for ahead, so that slow links carry one while it computes.
INPUTS_ASKED_AHEAD = 8
SECONDS_BETWEEN_LOOKS = 0.001


@dataclass(frozen=True)
class Visit:
    """A held-out microbatch on a node: the first embeds it, the last computes its loss.

    Its input comes by `arrives` and its output leaves by `leaves`; these end at None.
    """

    microbatch: int
    node: int
    arrives: Hop | None
    leaves: Hop | None


class Validation:
    """Computes the held-out loss; all hosts make one, and use it at the same steps."""

    def __init__(self, config: Config, data: DataConfig, executor: Executor, host: Membership):
        """Read the held-out text where a data node is served, and lay out the visits.

        Raises:
            InputError: if there is too little text.
        """
        self.executor = executor
        self.host = host
        data_nodes = executor.plan.stages[0]
        self.data_hosts = sorted({executor.host_of[node] for node in data_nodes})
        self.batches: list[Batch] = []
        if host.index in self.data_hosts:
            size = data.microbatch_size
            limit = -(-config.validation.sequences // size)
            self.batches = list(held_out_batches(data, size, limit))
        # How many there are depends on the text, which other hosts need not have.
        first = self.data_hosts[0]
        if host.index == first:
            host.put("validation/microbatches", str(len(self.batches)))
        timeout_s = config.cluster.connect_timeout_s
        count = int(host.get("validation/microbatches", timeout_s, source=first))
        self.visits = [v for v in self._all_visits(count) if self._host_of(v.node) == host.index]

    def _all_visits(self, count: int) -> Iterator[Visit]:
        """In an order in which no visit needs a later one, and all stages soon have work."""
        stages = self.executor.plan.stages
        for turn in range(count + len(stages)):
            first = max(0, turn - len(stages))
            for microbatch in range(first, min(turn + 1, count)):
                yield self._way(microbatch)[turn - microbatch]

    def _way(self, microbatch: int) -> list[Visit]:
        """All visits of one microbatch: a replica of each stage in order, and back."""
        path = [nodes[microbatch % len(nodes)] for nodes in self.executor.plan.stages]
        path.append(path[0])
        first = self.executor.first_totals_hop + 2 * len(self.executor.first_nodes)
        first += microbatch * len(path)
        hops = [Hop(first + n, *ends) for n, ends in enumerate(itertools.pairwise(path))]
        return [
            Visit(microbatch, node, arrives, leaves)
            for node, arrives, leaves in zip(path, [None, *hops], [*hops, None], strict=True)
        ]

    def loss(self, step: int) -> float | None:
        """Mean held-out loss [nats per token] after `step`, on host 0; None on the others.

        All hosts call this together, between two iterations.

        Raises:
            DeadlinePassed: if nothing came from another host for `network.deadline_s`.
        """
        sums = sum((np.asarray(own, np.float64) for own in self._forward(step)), np.zeros(2))
        if self.host.index in self.data_hosts:
            self.host.put(f"validation/{step}/{self.host.index}", json.dumps(sums.tolist()))
        if self.host.index != 0:
            return None
        deadline_s = self.executor.network.deadline_s
        told = [
            json.loads(self.host.get(f"validation/{step}/{host}", deadline_s, source=host))
            for host in self.data_hosts
        ]
        nats, tokens = np.sum(told, axis=0)
        return float(nats / tokens)

    def _forward(self, step: int) -> list[jax.Array]:
        """Make the visits of this host; what they give: sums of losses, and target tokens."""
        from_afar = deque(visit for visit in self.visits if self._comes_from_afar(visit))
        asked: dict[Visit, jax.Array] = {}
        sums = []
        for visit in self.visits:
            while from_afar and len(asked) < INPUTS_ASKED_AHEAD:
                ahead = from_afar.popleft()
                asked[ahead] = self._receive(ahead, step)
            if visit in asked:
                value = asked.pop(visit)
                self._wait_for(value, visit)
            else:
                value = self._receive(visit, step)
            result = self._compute(visit, value)
            if visit.leaves is None:
                sums.append(result)
            else:
                link = self.executor.links[self._host_of(visit.leaves.target)]
                link.send(visit.leaves, step, result)
        return sums

    def _receive(self, visit: Visit, step: int) -> jax.Array:
        """The input of a visit, which may be on its way."""
        if visit.arrives is None:
            return self.executor.put(marked_tokens(self.batches[visit.microbatch]), visit.node)
        link = self.executor.links[self._host_of(visit.arrives.source)]
        return link.receive(visit.arrives, step, self.executor.activation)

    def _compute(self, visit: Visit, value: jax.Array) -> jax.Array:
        executor = self.executor
        state = executor.states[executor.replica_of[visit.node]]
        if visit.leaves is not None:
            return state.functions.predict(state.parameters, value)
        targets = executor.put(self.batches[visit.microbatch]["targets"], visit.node)
        return state.functions.held_out(state.parameters, value, targets)

    def _wait_for(self, value: jax.Array, visit: Visit) -> None:
        """Come back when an input is there: a host that waits has nothing else to do."""
        start = time.monotonic()
        while not value.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            if time.monotonic() > start + self.executor.network.deadline_s:
                assert visit.arrives is not None
                source = visit.arrives.source
                raise DeadlinePassed(
                    f"this host has waited for held-out microbatch {visit.microbatch} from node "
                    f"{source} on host {self._host_of(source)} in vain; network.deadline_s is "
                    f"{self.executor.network.deadline_s:g}"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _comes_from_afar(self, visit: Visit) -> bool:
        return visit.arrives is not None and self._host_of(visit.arrives.source) != self.host.index

    def _host_of(self, node: int) -> int:
        return self.executor.host_of[node]


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
