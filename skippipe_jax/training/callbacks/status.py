"""Keeps what a host tells of its training, to those who observe the run, as it is."""

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
"""Of so many iterations the median time is told."""


class StatusUpdates(Callback):
    """Makes the status of a session, which `show` takes after every step."""

    _status: TrainingStatus

    def __init__(self, show: Callable[[TrainingStatus], None]):
        """Begin a session."""
        self._show = show
        self._recent_s: deque[float] = deque(maxlen=RECENT)

    def on_train_begin(self, run: RunView) -> None:
        """Tell who trains, over which links."""
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
        """Tell how far the run is."""
        if not metrics.compilations:
            self._recent_s.append(metrics.seconds_per_iteration)
        each_s = statistics.median(self._recent_s) if self._recent_s else None
        steps = self._status.progress.steps
        left_s = None if each_s is None else (steps - metrics.step) * each_s
        progress = Progress(metrics.step, steps, metrics.loss, each_s, left_s)
        self._status = replace(self._status, progress=progress)
        self._show(self._status)


def links_of(topology: Topology, hosts: Sequence[int]) -> tuple[LinkStatus, ...]:
    """List the links between hosts, by their numbers in the run, that the case says.

    A host is where its first node is. Those come first by which an activation takes longest.
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
