"""Progress of a run: a progress bar on a terminal, else occasional lines."""

from __future__ import annotations

import math
import time

from tqdm import tqdm

from skippipe_jax import log
from skippipe_jax.config import Config
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView

# Seconds between lines without a terminal.
SECONDS_BETWEEN_LINES = 10.0
# Seconds between lines of hosts that do not lead.
SECONDS_BETWEEN_STATUS = 60.0


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
            is_last or time.perf_counter() - self.last_line_s > SECONDS_BETWEEN_LINES
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
