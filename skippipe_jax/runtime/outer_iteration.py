"""Iteration of `outer` mode, in which no host waits for all others.

A replica takes a local step once its node has run all its operations of the plan. It then sends the
fragment that is due, and applies the messages sent `delay` iterations before. The host continues
with the next iteration when all of its nodes have done so. The transfer of messages and totals
overlaps with later iterations (see `background_sync`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from skippipe_jax.runtime.background_sync import BackgroundSync
from skippipe_jax.runtime.iteration import TrainingIteration
from skippipe_jax.runtime.outer_steps import OuterSteps
from skippipe_jax.runtime.stage_functions import Totals
from skippipe_jax.runtime.totals import Outcome, add_up, split_sums


@dataclass(kw_only=True, eq=False)
class OuterIteration(TrainingIteration):
    """Iteration of `outer` mode on the nodes of this host, each with a separate replica.

    `steps` makes local and outer steps, and `behind` sends.
    """

    steps: OuterSteps
    behind: BackgroundSync

    def __post_init__(self) -> None:
        """Begin without inputs."""
        super().__post_init__()
        self.step = self.iteration + 1
        self.norms: list[Totals] = []
        self.not_stepped = set(self.replicas.states)
        # The step that must be committed before the due messages are applied.
        self.awaited_step: int | None = None

    def _node_done(self, node: int) -> None:
        """Take the local step of a replica whose node is done, and send the due fragment."""
        self.norms.append(self.steps.step(node, self.operations.targets[node]))
        own = self.steps.send(node, self.step)
        if own is not None:
            self.behind.send(node, self.step, own, self.emulation)
        self.not_stepped.remove(node)
        if self.not_stepped:
            return
        parts = [*self.operations.totals.values(), *self.norms]
        local = add_up(self.topology, parts, self.stop, self._busy_s())
        self.summed = self.behind.end(self.step, local)
        due = self.steps.due(self.step)
        if not due:
            return self._end_iteration()
        self.awaited_step = max(own.committed_with for own in due)
        self.behind.when_committed(self.awaited_step, lambda _: self._apply())

    def _apply(self) -> None:
        """Apply the due messages, which are committed."""
        self.awaited_step = None
        self.steps.apply(self.step)
        self._end_iteration()

    def _end_iteration(self) -> None:
        self.averagings = self.behind.take_averagings()
        ended_s = self.loop.last_event_s
        summed, nodes = self.summed, len(self.topology.devices)
        self.outcome = Outcome(
            lambda: split_sums(jax.device_put(summed.result()), nodes),
            self._gauges(),
            ended_s=ended_s,
        )

    def _waits(self) -> Iterator[tuple[str, float]]:
        yield from super()._waits()
        if self.awaited_step is not None:
            yield from self.behind.waits(self.awaited_step)
