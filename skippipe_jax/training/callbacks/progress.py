"""Progress of a run: a bar on a terminal, else occasional lines; and its status for observers."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from skippipe_jax import log
from skippipe_jax.config import Config
from skippipe_jax.connections.status import MOST_LINKS, LinkStatus, Progress, TrainingStatus
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView

# Seconds between lines of hosts that do not lead.
SECONDS_BETWEEN_STATUS = 60.0
# Number of iterations in the median of their time.
RECENT = 10


class ProgressBar(Callback):
    """Progress bar of a run, with lines for skipped updates and validation losses."""

    def __init__(self, config: Config, hosts: int, step: int, skipped_updates: int):
        """Start after `step`, before which `skipped_updates` updates were skipped.

        `hosts` is the number of hosts with which the run was started.
        """
        self.config, self.hosts = config, hosts
        self.skipped_updates = skipped_updates
        self.last_line_s = -math.inf
        # None disables the bar if stderr is not a terminal.
        self.bar = tqdm(total=config.train.steps, initial=step, unit="iteration", disable=None)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Advance by one iteration."""
        if metrics.skipped_updates > self.skipped_updates:
            self.skipped_updates = metrics.skipped_updates
            why = "no target tokens"
            if metrics.tokens:
                limit = f"optimizer.skip_above_norm = {self.config.optimizer.skip_above_norm:g}"
                norm = metrics.gradient_norm
                compared = f"{norm} > {limit}" if norm else f"not finite ({limit})"
                why = f"gradient norm {compared}"
            self._log_line(
                f"step {metrics.step}: update skipped, {why} ({self.skipped_updates} so far)"
            )
        self._show(metrics)

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Show a validation loss."""
        if loss is not None:
            self._log_line(f"step {step}: validation loss {loss:.4f}")

    def close(self) -> None:
        """Close the bar."""
        self.bar.close()

    def _log_line(self, text: str) -> None:
        """Print a line above the bar."""
        log.info(text)
        self.bar.refresh()

    def _show(self, metrics: StepMetrics) -> None:
        emulated = " on an emulated network" if metrics.network == "emulate" else ""
        speed = f"{metrics.tokens_per_second:,.0f} tokens/s{emulated}"
        if (metrics.generation or 1) > 1:
            hosts = metrics.hosts or self.hosts
            total = max(self.hosts, hosts)
            speed += f", {hosts} of {total} hosts, generation {metrics.generation}"
        loss = "not finite" if metrics.loss is None else f"{metrics.loss:.3f}"
        self.bar.set_postfix_str(f"loss {loss}, {speed}", refresh=False)
        self.bar.update()
        is_last = metrics.step == self.config.train.steps
        if self.bar.disable and (
            is_last or time.perf_counter() - self.last_line_s > log.SECONDS_BETWEEN_LINES
        ):
            self.last_line_s = time.perf_counter()
            remaining_s = (self.config.train.steps - metrics.step) * metrics.seconds_per_iteration
            # An iteration that compiled programs does not predict the remaining time.
            remaining = "programs compiled" if metrics.compilations else f"{remaining_s:.0f} s left"
            log.info(
                f"step {metrics.step}/{self.config.train.steps}  loss {loss}  {speed}  {remaining}"
            )


class HostStatus(Callback):
    """Log lines of a host that does not lead: its stages, and the progress once a minute."""

    def __init__(self, steps: int):
        """Start a session of a run of `steps` steps."""
        self._steps, self._last_line_s = steps, time.perf_counter()

    def on_train_begin(self, run: RunView) -> None:
        """Log the number and stages of this host, and the cause of the change of hosts."""
        group, topology = run.group, run.runtime.topology
        own, leader = group.hosts[group.index], group.hosts[0]
        stages = sorted({topology.stage_of[node] for node in topology.nodes})
        served = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        cause = f"{group.generation.cause}; " if group.generation.cause else ""
        trains = f"{group.count} host{'s train' if group.count > 1 else ' trains'}"
        log.info(f"{cause}host {own} serves {served}; {trains}, host {leader} leads")

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Log the progress once a minute."""
        now_s = time.perf_counter()
        if now_s - self._last_line_s < SECONDS_BETWEEN_STATUS:
            return
        self._last_line_s = now_s
        own, seconds = run.group.hosts[run.group.index], metrics.seconds_per_iteration
        loss = "not finite" if metrics.loss is None else f"{metrics.loss:.3f}"
        progress = f"step {metrics.step}/{self._steps}  loss {loss}  {seconds:.3g} s an iteration"
        log.info(f"host {own}: {progress}")


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
