"""Status of a host's training, for observers of the run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from skippipe_jax.connections.status import MOST_LINKS, LinkStatus, Progress, TrainingStatus
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView

RECENT = 10
"""Number of iterations in the median of their time."""


class StatusUpdates(Callback):
    """Updates of the status of a session, passed to `show` at its start and after every step."""

    _status: TrainingStatus

    def __init__(self, show: Callable[[TrainingStatus], None]):
        """Start a session."""
        self._show = show
        self._recent_s: deque[float] = deque(maxlen=RECENT)

    def on_train_begin(self, run: RunView) -> None:
        """Show the hosts that train, their stages and their links."""
        topology, hosts = run.runtime.topology, run.group.hosts
        nodes = topology.plan.case.nodes
        self._status = TrainingStatus(
            run.group.generation.number,
            Progress(run.step, run.config.train.steps),
            [
                sorted({hosts[topology.host_of[node]] for node in own})
                for own in topology.plan.stages
            ],
            {
                host: nodes[node].location
                for host, node in zip(hosts, topology.first_nodes, strict=True)
            },
            links_of(topology, hosts),
            run.config.plan.measure,
        )
        self._show(self._status)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Show the progress of the run."""
        if not metrics.compilations:
            self._recent_s.append(metrics.seconds_per_iteration)
        each_s = statistics.median(self._recent_s) if self._recent_s else None
        steps = self._status.progress.steps
        left_s = None if each_s is None else (steps - metrics.step) * each_s
        progress = Progress(metrics.step, steps, metrics.loss, each_s, left_s)
        self._status = replace(self._status, progress=progress)
        self._show(self._status)


def links_of(topology: Topology, hosts: Sequence[int]) -> tuple[LinkStatus, ...]:
    """List the links between hosts that the link table of the case has, by host number.

    The location of a host is that of its first node. The links with the slowest activation
    transfer come first.
    """
    case, first = topology.plan.case, [*topology.first_nodes]
    latency_s, bandwidth = case.link_matrices
    slowest = np.argsort(-case.forward_hop_s[np.ix_(first, first)], axis=None)
    links: list[LinkStatus] = []
    for pair in slowest.tolist():
        source, target = divmod(pair, len(first))
        nodes = first[source], first[target]
        where = [case.nodes[node].location for node in nodes]
        table = case.link_table.links
        if source == target or not ({(*where,), (*where[::-1],)} & table.keys()):
            continue
        link = float(latency_s[nodes]), float(bandwidth[nodes])
        links.append(LinkStatus(hosts[source], hosts[target], *link))
        if len(links) == MOST_LINKS:
            break
    return tuple(links)
