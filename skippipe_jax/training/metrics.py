"""The metrics of a run: the outcome of each iteration, read when it has ended, and checked."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from skippipe_sched.problem.plan import Plan, microbatch_chain
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.cluster.ending import RunFailed
from skippipe_jax.config import AveragingConfig, Config
from skippipe_jax.models.flops import iteration_flops
from skippipe_jax.models.footprint import bytes_passed, hop_bytes
from skippipe_jax.optim.adamw import learning_rate_schedule, updates_made
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
from skippipe_jax.training.progress import Compilations


@dataclass(frozen=True)
class Finished:
    """An iteration that has ended: its totals, this host's peaks in flight, and when it ended.

    `busy_s` is how long each node computed, where that was watched.
    """

    step: int
    totals: np.ndarray
    peaks: dict[int, int]
    compilations: Compilations
    busy_s: np.ndarray | None
    at_s: float


@dataclass(frozen=True)
class Expected:
    """Of an iteration, by its plan: how long it takes, and bytes from one node to another."""

    seconds: float
    sent: dict[tuple[int, int], int]

    @classmethod
    def of(cls, plan: Plan, config: Config, step: int) -> Expected:
        """Of the iteration that leads to a step, or one like it."""
        if config.averaging.is_outer and config.averaging.is_exact(step):
            exact = replace(config, averaging=AveragingConfig())
            timeline = timeline_of(plan, config.averaging, step)
            return cls(timeline.iteration_s, bytes_per_link(plan, exact))
        return cls(plan.predicted.iteration_s, bytes_per_link(plan, config))


class Metrics:
    """Reads the outcome of each iteration, checks it, and makes its line of metrics.jsonl.

    Attributes:
        asked_to_stop: whether a host was, by the last iteration that was read.
        skipped_updates: how many there have been.
    """

    def __init__(self, config: Config, schedule: Schedule, runtime: Runtime, step: int):
        """Begin after `step`."""
        self.config = config
        self.schedule = schedule
        self.asked_to_stop = False
        self.generation = None if runtime.team is None else runtime.team.generation.number
        self.hosts = len(runtime.topology.hosts)
        # By the name of an iteration's plan, and whether it averages gradients.
        averaging, last = config.averaging, config.train.steps
        self.expected = {
            (name, averaging.is_exact(step)): Expected.of(plan, config, step)
            for name, plan in schedule.plans.items()
            for step in (1, last)
        }
        topology = runtime.topology
        self.own_devices = list(
            dict.fromkeys(
                device for node in topology.nodes for device in topology.spread(node).devices
            )
        )
        data = config.data
        self.flops = {
            name: iteration_flops(config.model, plan, data.microbatch_size, data.sequence_length)
            for name, plan in schedule.plans.items()
        }
        used = {device for of_node in topology.devices for device in of_node}
        self.peak_flops_per_second = peak_flops_per_second(device.kind for device in used)
        self.learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)
        self.learning_rate(step)  # Compiled now, not while training.
        optimizer_state = next(iter(runtime.states.values())).optimizer_state
        # Replicas that are apart each count their own.
        made = step if averaging.is_outer else updates_made(optimizer_state)
        self.skipped_updates = step - made
        self.validations: dict[int, tuple[float | None, float]] = {}
        self.watcher = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self.watched: deque[tuple[int, Future[Finished]]] = deque()
        self.wait_for = runtime.wait_for
        self.last_s: float | None = None

    def begin(self) -> None:
        """An iteration begins, and the first one counts from now."""
        if self.last_s is None:
            self.last_s = time.perf_counter()

    def watch(self, step: int, outcome: Outcome, compilations: Compilations) -> None:
        """Wait in the background for the end of the iteration that leads to `step`."""

        def wait() -> Finished:
            sums = outcome.sums()
            totals = np.asarray(sums.totals)
            # NumPy indexes: on a device an index would be a program to compile.
            peaks = {node: int(np.asarray(gauge)[1]) for node, gauge in outcome.gauges.items()}
            busy_s = None if sums.busy_s is None else np.asarray(sums.busy_s)
            at_s = time.perf_counter() if outcome.ended_s is None else outcome.ended_s
            return Finished(step, totals, peaks, compilations, busy_s, at_s)

        self.watched.append((step, self.watcher.submit(wait)))

    def validated(self, step: int, loss: float | None) -> None:
        """Note the held-out loss after `step`, if this host knows it, before that is reported."""
        self.validations[step] = loss, time.perf_counter()

    def lines(self, leave: int = 0) -> Iterator[dict[str, Any]]:
        """The lines of the watched iterations in order, but for the last `leave` of them.

        Raises:
            RuntimeError: if a node held more microbatches than its memory.
            RunFailed: if the loss or its gradient is no finite number any more.
        """
        while len(self.watched) > leave:
            step, watched = self.watched[0]
            # If this raises, the step may still come to count, and is told of then.
            finished = self.wait_for(watched, step)
            self._check_memory(finished)
            line = self._line(finished)
            # Not before it is found good: else nothing would keep a later call from saving it.
            self.watched.popleft()
            self.asked_to_stop = bool(finished.totals[STOP] > 0)
            yield line

    def _check_memory(self, finished: Finished) -> None:
        plan = self.schedule.plan(finished.step - 1)
        for node, peak in finished.peaks.items():
            if peak > plan.case.nodes[node].memory:
                raise RuntimeError(
                    f"node {node} had {peak} microbatches in flight; its memory holds "
                    f"{plan.case.nodes[node].memory}. This is a defect of the program"
                )

    def _line(self, finished: Finished) -> dict[str, Any]:
        """The metrics of an iteration, and what follows from them for the next."""
        step, totals, optimizer = finished.step, finished.totals, self.config.optimizer
        name = self.schedule.name(step - 1)
        is_exact = self.config.averaging.is_exact(step)
        expected = self.expected[name, is_exact]
        assert self.last_s is not None, "an iteration has begun"
        seconds = finished.at_s - self.last_s
        # Validation is no part of the next iteration.
        held_out, self.last_s = self.validations.pop(step, (None, finished.at_s))
        batch_tokens = self.config.data.microbatch_size * self.config.data.sequence_length
        # Without a target token there is no loss, and NaN stands for it.
        tokens = totals[TOKENS] or np.float32(np.nan)
        loss, norm = float(totals[LOSS] / tokens), float(np.sqrt(totals[SQUARED_NORM]))
        if is_exact:
            norm *= float(batch_tokens / tokens)
        learning_rate = self.learning_rate(step - 1 - self.skipped_updates)
        if is_exact and skips_update(optimizer, totals, batch_tokens):
            self.skipped_updates += 1
        elif totals[TOKENS] and (is_exact or optimizer.skip_above_norm is None):
            self._require_finite(step, loss, norm)
        return {
            "step": step,
            "loss": finite(loss),
            "z_loss": finite(totals[Z_LOSS] / tokens) if optimizer.z_loss else None,
            "validation_loss": finite(held_out),
            "tokens": int(totals[TOKENS]),
            "tokens_per_second": float(totals[TOKENS]) / seconds,
            "flops_utilisation": self._flops_utilisation(self.flops[name], seconds),
            "seconds_per_iteration": seconds,
            "plan": name,
            "predicted_seconds": expected.seconds,
            "network": self.config.network.mode,
            "generation": self.generation,
            "hosts": self.hosts,
            "bytes_sent": sum(expected.sent.values()),
            "bytes_per_link": {f"{a}-{b}": size for (a, b), size in expected.sent.items()},
            "idle_share": _idle_share(finished.busy_s, seconds),
            "gradient_norm": finite(norm),
            "skipped_updates": self.skipped_updates,
            "learning_rate": float(np.asarray(learning_rate)),
            "compilations": finished.compilations.count,
            "compile_seconds": finished.compilations.seconds,
            "peak_in_flight": finished.peaks,
            "peak_memory_bytes": self._peak_memory_bytes(),
            "peak_process_bytes": peak_process_bytes(),
        }

    def _require_finite(self, step: int, loss: float, norm: float) -> None:
        """Refuse to go on after a loss, or a gradient, that is no finite number."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RunFailed(  # All hosts have the same totals.
                "optimizer.learning_rate",
                self.config.optimizer.learning_rate,
                f"the loss of step {step} is {loss}, and the norm of its gradient {norm}",
                "Resume from the last checkpoint with a lower rate or clip_norm, or let "
                "optimizer.skip_above_norm leave such updates out",
            )

    def close(self) -> None:
        """Watch no more; an iteration that other hosts have left is not waited for."""
        self.watcher.shutdown(wait=False)

    def _flops_utilisation(self, flops: float, seconds: float) -> float | None:
        """The share of what the devices could do that the model needed, if their peak is known."""
        if self.peak_flops_per_second is None:
            return None
        return flops / seconds / self.peak_flops_per_second

    def _peak_memory_bytes(self) -> dict[int, int | None]:
        """The most memory in use so far on each device of this host, by its number."""
        return {device.id: peak_memory_bytes(device) for device in self.own_devices}


def finite(value: float | None) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if value is not None and math.isfinite(value) else None


def _idle_share(busy_s: np.ndarray | None, seconds: float) -> list[float] | None:
    """The share of an iteration of so many seconds in which each node did not compute."""
    if busy_s is None:
        return None
    return [round(max(0.0, 1.0 - busy / seconds), 4) for busy in busy_s.tolist()]


def bytes_per_link(plan: Plan, config: Config) -> dict[tuple[int, int], int]:
    """Bytes that go from one node to another in an iteration: activations, gradients, averaging.

    Nodes count as if each had its own device. A stage with n replicas averages round the planner's
    ring, each node sending 2(n-1)/n of the gradients to the next; or n - 1 messages about each
    fragment, of which the mean of a cycle counts.
    """
    size = hop_bytes(config)
    sent: Counter[tuple[int, int]] = Counter()
    for microbatch, path in enumerate(plan.microbatches):
        for before, after in itertools.pairwise(microbatch_chain(microbatch, path)):
            if before.node != after.node:
                is_gradient = after.kind == "B"
                sent[before.node, after.node] += size.gradient if is_gradient else size.activation
    layers = config.model.layers_of_stages(len(plan.stages))
    for stage in range(len(plan.stages)):
        ring = best_ring(plan.case, stage, plan.stages[stage])
        passed = int(bytes_passed(config, layers[stage], len(ring), is_data_stage=stage == 0))
        for position, node in enumerate(ring):
            if passed:
                sent[ring[position - 1], node] += passed
    return dict(sent)
