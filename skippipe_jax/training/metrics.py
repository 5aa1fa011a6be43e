"""Metrics of each iteration, read in the background and checked once the iteration has ended.

`CompilationCounter` counts the programs that XLA compiles meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax.monitoring
import numpy as np
from skippipe_sched.problem.plan import Plan

from skippipe_jax import log
from skippipe_jax.cluster.ending import RunFailed
from skippipe_jax.config import Config
from skippipe_jax.models.flops import iteration_flops
from skippipe_jax.models.footprint import bytes_per_link
from skippipe_jax.optim.update_rule import learning_rate_schedule, updates_made
from skippipe_jax.profiling.devices import (
    peak_flops_per_second,
    peak_memory_bytes,
    peak_process_bytes,
)
from skippipe_jax.program.schedule import Schedule, timeline_of
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import (
    LOSS,
    SQUARED_NORM,
    STOP,
    TOKENS,
    Z_LOSS,
    skips_update,
)
from skippipe_jax.runtime.totals import Outcome
from skippipe_jax.storage.records import StepMetrics, finite


@dataclass(frozen=True)
class Compilations:
    """Number of programs that XLA compiled or loaded from its cache, and the seconds it took."""

    count: int = 0
    seconds: float = 0.0


class CompilationCounter:
    """Counter of the programs that XLA compiles, or loads from its cache, in this process.

    During long compilations it reports progress with `log_line`.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, log_line: Callable[[str], None] = log.info):
        """Start at zero; counting begins on entering the context."""
        self.compilations = Compilations()
        self.log_line = log_line
        self.logged_s = time.perf_counter()

    def take(self) -> Compilations:
        """Return the compilations since the last call."""
        taken, self.compilations = self.compilations, Compilations()
        return taken

    def __enter__(self) -> CompilationCounter:
        """Start counting."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == self.EVENT:
            before = self.compilations
            now = Compilations(before.count + 1, before.seconds + duration_secs)
            self.compilations = now
            if time.perf_counter() - self.logged_s > log.SECONDS_BETWEEN_LINES:
                self.logged_s = time.perf_counter()
                programs = f"{now.count} program{'s' * (now.count > 1)}"
                self.log_line(f"compiling: {programs} so far, {now.seconds:.0f} s")


@dataclass(frozen=True)
class StepOutcome:
    """Completed iteration: its totals, this host's peaks in flight, and when it ended.

    `busy_s` is the seconds that each node computed; None if that was not measured.
    """

    step: int
    totals: np.ndarray
    peaks: dict[int, int]
    compilations: Compilations
    busy_s: np.ndarray | None
    at_s: float


class MetricsCollector:
    """Collector of the metrics of iterations: reads and checks the outcome of each.

    Attributes:
        asked_to_stop: whether a host had been asked to stop, as of the last iteration read.
        skipped_updates: number of updates skipped so far.
    """

    def __init__(self, config: Config, schedule: Schedule, runtime: Runtime, step: int):
        """Start after `step`."""
        self.config = config
        self.schedule = schedule
        self.asked_to_stop = False
        self.generation = runtime.group.generation.number or None
        self.hosts = len(runtime.topology.hosts)
        # Keyed by the name of an iteration's plan, and whether it averages gradients.
        averaging, last = config.averaging, config.train.steps
        self.expected = {
            (name, averaging.is_exact(step)): _seconds_and_bytes(plan, config, step)
            for name, plan in schedule.plans.items()
            for step in (1, last)
        }
        topology = runtime.topology
        shardings = map(topology.sharding, topology.nodes)
        self.own_devices = list(
            dict.fromkeys(d for sharding in shardings for d in sharding.devices)
        )
        data = config.data
        self.flops = {
            name: iteration_flops(config.model, plan, data.microbatch_size, data.sequence_length)
            for name, plan in schedule.plans.items()
        }
        used = {device for of_node in topology.devices for device in of_node}
        self.peak_flops_per_second = peak_flops_per_second(device.kind for device in used)
        self.learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)
        self.learning_rate(step)  # Compile it before training.
        optimizer_state = next(iter(runtime.states.values())).optimizer_state
        # In outer mode each replica has its own count.
        updates = step if averaging.is_outer else updates_made(optimizer_state)
        self.skipped_updates = step - updates
        self.watcher = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self.watched: deque[tuple[int, Future[StepOutcome]]] = deque()
        self.wait_for = runtime.wait_for
        self.last_s: float | None = None

    def begin(self) -> None:
        """Start the clock of the first iteration."""
        if self.last_s is None:
            self.last_s = time.perf_counter()

    def watch(self, step: int, outcome: Outcome, compilations: Compilations) -> None:
        """Read in the background the outcome of the iteration that leads to `step`."""

        def wait() -> StepOutcome:
            sums = outcome.sums()
            totals = np.asarray(sums.totals)
            # Index in NumPy: indexing on a device would compile a program.
            peaks = {node: int(np.asarray(gauge)[1]) for node, gauge in outcome.gauges.items()}
            busy_s = None if sums.busy_s is None else np.asarray(sums.busy_s)
            at_s = time.perf_counter() if outcome.ended_s is None else outcome.ended_s
            return StepOutcome(step, totals, peaks, compilations, busy_s, at_s)

        self.watched.append((step, self.watcher.submit(wait)))

    def restart_clock(self) -> None:
        """Restart the clock, so that the next iteration excludes the work since the last one."""
        self.last_s = time.perf_counter()

    def completed(self, leave: int = 0) -> Iterator[StepMetrics]:
        """Yield the metrics of the watched iterations in order, except the last `leave`.

        Raises:
            RuntimeError: if a node held more microbatches than its memory allows.
            RunFailed: if the loss or its gradient norm is not finite.
        """
        while len(self.watched) > leave:
            step, watched = self.watched[0]
            # If this raises, the step may still be committed, and is reported then.
            finished = self.wait_for(watched, step)
            self._check_memory(finished)
            metrics = self._metrics_of(finished)
            # Only after the checks: otherwise a later call could save a step that failed them.
            self.watched.popleft()
            self.asked_to_stop = bool(finished.totals[STOP] > 0)
            yield metrics

    def _check_memory(self, finished: StepOutcome) -> None:
        plan = self.schedule.plan(finished.step - 1)
        for node, peak in finished.peaks.items():
            if peak > plan.case.nodes[node].memory:
                raise RuntimeError(
                    f"node {node} had {peak} microbatches in flight; its memory holds "
                    f"{plan.case.nodes[node].memory}. This is a bug of SkipPipe-JAX"
                )

    def _metrics_of(self, finished: StepOutcome) -> StepMetrics:
        """Return the metrics of an iteration, and update the clock and the skipped updates."""
        step, totals, optimizer = finished.step, finished.totals, self.config.optimizer
        name = self.schedule.name(step - 1)
        is_exact = self.config.averaging.is_exact(step)
        predicted_s, bytes_sent = self.expected[name, is_exact]
        assert self.last_s is not None, "an iteration has begun"
        seconds = finished.at_s - self.last_s
        self.last_s = finished.at_s
        batch_tokens = self.config.data.microbatch_size * self.config.data.sequence_length
        # Without a target token the loss is NaN.
        tokens = totals[TOKENS] or np.float32(np.nan)
        loss, norm = float(totals[LOSS] / tokens), float(np.sqrt(totals[SQUARED_NORM]))
        if is_exact:
            norm *= float(batch_tokens / tokens)
        learning_rate = self.learning_rate(step - 1 - self.skipped_updates)
        peak = self.peak_flops_per_second
        if is_exact and skips_update(optimizer, totals, batch_tokens):
            self.skipped_updates += 1
        elif totals[TOKENS] and (is_exact or optimizer.skip_above_norm is None):
            self._require_finite(step, loss, norm)
        return StepMetrics(
            step=step,
            loss=finite(loss),
            z_loss=finite(totals[Z_LOSS] / tokens) if optimizer.z_loss else None,
            tokens=int(totals[TOKENS]),
            tokens_per_second=float(totals[TOKENS]) / seconds,
            flops_utilisation=None if peak is None else self.flops[name] / seconds / peak,
            seconds_per_iteration=seconds,
            plan=name,
            predicted_seconds=predicted_s,
            network=self.config.network.mode,
            generation=self.generation,
            hosts=self.hosts,
            bytes_sent=bytes_sent,
            idle_share=_idle_share(finished.busy_s, seconds),
            gradient_norm=finite(norm),
            skipped_updates=self.skipped_updates,
            learning_rate=float(np.asarray(learning_rate)),
            compilations=finished.compilations.count,
            compile_seconds=finished.compilations.seconds,
            peak_in_flight={str(node): peak for node, peak in finished.peaks.items()},
            peak_memory_bytes={
                str(device.id): peak_memory_bytes(device) for device in self.own_devices
            },
            peak_process_bytes=peak_process_bytes(),
        )

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        """Raise RunFailed if the loss or the gradient norm is not finite."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunFailed(  # All hosts have the same totals.
                "optimizer.learning_rate",
                self.config.optimizer.learning_rate,
                f"step {step}: loss is {loss}, gradient norm {norm}",
                "Resume from the last checkpoint with a lower learning_rate or clip_norm, or set "
                "optimizer.skip_above_norm to skip these updates",
            )

    def close(self) -> None:
        """Stop watching, without waiting for an iteration that other hosts have abandoned."""
        self.watcher.shutdown(wait=False)


def _seconds_and_bytes(plan: Plan, config: Config, step: int) -> tuple[float, int]:
    """Return the planned seconds of the iteration that leads to a step, and the bytes sent."""
    seconds = plan.predicted.iteration_s
    if config.averaging.is_outer and config.averaging.is_exact(step):
        seconds = timeline_of(plan, config.averaging, step).iteration_s
    return seconds, sum(bytes_per_link(config, plan, step).values())


def _idle_share(busy_s: np.ndarray | None, seconds: float) -> list[float] | None:
    """Return the fraction of an iteration's `seconds` in which each node did not compute."""
    if busy_s is None:
        return None
    return [round(max(0.0, 1.0 - busy / seconds), 4) for busy in busy_s.tolist()]
