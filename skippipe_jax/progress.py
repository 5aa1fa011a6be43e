"""What a run shows and writes while it trains: metrics, a progress bar, and what it checks."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.monitoring
import jax.numpy as jnp
import numpy as np
from skippipe_sched.averaging import best_ring
from skippipe_sched.errors import InputError
from skippipe_sched.plan import Plan, microbatch_chain
from tqdm import tqdm

from skippipe_jax import run_folder
from skippipe_jax.config import Config
from skippipe_jax.executor import Outcome
from skippipe_jax.model import parameter_count, stage_shapes
from skippipe_jax.optimizer import learning_rate_schedule
from skippipe_jax.recipe import Schedule
from skippipe_jax.stages import LOSS, SQUARED_NORM, STOP, TOKENS, activation

# Where there is no terminal to draw a bar on, a line is written this often.
SECONDS_BETWEEN_LINES = 10.0


class CompilationCounter:
    """Counts the programs that XLA compiles, or loads from its cache, in this process."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        """Start at zero; counting begins on entering."""
        self.count = 0

    def take(self) -> int:
        """How many there were since the last call."""
        count, self.count = self.count, 0
        return count

    def __enter__(self) -> CompilationCounter:
        """Begin to count."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == self.EVENT


@dataclass(frozen=True)
class Finished:
    """An iteration that has ended: its totals, this host's peaks in flight, and when it ended.

    `busy_s` is how long each node computed, where that was watched.
    """

    step: int
    totals: np.ndarray
    peaks: dict[int, int]
    compilations: int
    busy_s: np.ndarray | None
    at_s: float


class Progress:
    """Reads the outcome of each iteration, checks it, and shows and writes it on host 0."""

    def __init__(self, config: Config, schedule: Schedule, step: int, folder: Path | None):
        """Begin after `step`; `folder` is the run folder on host 0 and None on the others."""
        self.config = config
        self.schedule = schedule
        self.folder = folder
        self.sent = {name: bytes_per_link(plan, config) for name, plan in schedule.plans.items()}
        self.learning_rate = learning_rate_schedule(config.optimizer, config.train.steps)
        self.learning_rate(step)  # Compiled now, not while training.
        self.watcher = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self.watched: deque[Future[Finished]] = deque()
        self.last_s = time.perf_counter()
        self.last_line_s = -math.inf
        self.bar = tqdm(
            total=config.train.steps,
            initial=step,
            unit="iteration",
            # None: no bar where stderr is no terminal.
            disable=None if folder else True,
        )

    def watch(self, step: int, outcome: Outcome, compilations: int) -> None:
        """Wait in the background for the end of the iteration that leads to `step`."""

        def wait() -> Finished:
            totals = np.asarray(outcome.totals)
            # NumPy indexes: on a device an index would be a program to compile.
            peaks = {node: int(np.asarray(gauge)[1]) for node, gauge in outcome.gauges.items()}
            busy_s = None if outcome.busy_s is None else np.asarray(outcome.busy_s)
            return Finished(step, totals, peaks, compilations, busy_s, time.perf_counter())

        self.watched.append(self.watcher.submit(wait))

    def report(self, leave: int = 0) -> bool:
        """Report the watched iterations in order, but for the last `leave` of them.

        Returns whether a host was asked to stop, by the last iteration reported.

        Raises:
            RuntimeError: if a node held more microbatches than its memory.
            InputError: if the loss or its gradient is no finite number any more.
        """
        stop = False
        while len(self.watched) > leave:
            stop = self._report_one(self.watched.popleft().result())
        return stop

    def _report_one(self, finished: Finished) -> bool:
        step, totals, peaks = finished.step, finished.totals, finished.peaks
        name, plan = self.schedule.name(step - 1), self.schedule.plan(step - 1)
        for node, peak in peaks.items():
            if peak > plan.case.nodes[node].memory:
                raise RuntimeError(
                    f"node {node} had {peak} microbatches in flight; its memory holds "
                    f"{plan.case.nodes[node].memory}. This is a defect of the program"
                )
        seconds, self.last_s = finished.at_s - self.last_s, finished.at_s
        loss = float(totals[LOSS] / totals[TOKENS])
        batch_tokens = self.config.data.microbatch_size * self.config.data.sequence_length
        norm = float(np.sqrt(totals[SQUARED_NORM]) * batch_tokens / totals[TOKENS])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise InputError(
                "optimizer.learning_rate",
                self.config.optimizer.learning_rate,
                f"the loss of step {step} is {loss}, and the norm of its gradient {norm}",
                "Resume from the last checkpoint with a lower rate, or a lower clip_norm",
            )
        if self.folder is not None:
            sent = self.sent[name]
            line = {
                "step": step,
                "loss": loss,
                "tokens": int(totals[TOKENS]),
                "tokens_per_second": float(totals[TOKENS]) / seconds,
                "seconds_per_iteration": seconds,
                "plan": name,
                "predicted_seconds": plan.predicted.iteration_s,
                "network": self.config.network.mode,
                "bytes_sent": sum(sent.values()),
                "bytes_per_link": {f"{a}-{b}": size for (a, b), size in sent.items()},
                "idle_share": _idle_share(finished.busy_s, seconds),
                "gradient_norm": norm,
                "learning_rate": float(np.asarray(self.learning_rate(step - 1))),
                "compilations": finished.compilations,
                "peak_in_flight": peaks,
            }
            run_folder.append_metrics(self.folder, line)
            self._show(line)
        return bool(totals[STOP] > 0)

    def close(self) -> None:
        """Leave the bar as it stands; an iteration that other hosts have left is not waited for."""
        self.watcher.shutdown(wait=False)
        self.bar.close()

    def _show(self, line: dict[str, Any]) -> None:
        emulated = " on an emulated network" if line["network"] == "emulate" else ""
        speed = f"{line['tokens_per_second']:,.0f} tokens/s{emulated}"
        self.bar.set_postfix_str(f"loss {line['loss']:.3f}, {speed}", refresh=False)
        self.bar.update()
        is_last = line["step"] == self.config.train.steps
        if self.bar.disable and (
            is_last or time.perf_counter() - self.last_line_s > SECONDS_BETWEEN_LINES
        ):
            self.last_line_s = time.perf_counter()
            left_s = (self.config.train.steps - line["step"]) * line["seconds_per_iteration"]
            print(
                f"step {line['step']}/{self.config.train.steps}  loss {line['loss']:.3f}  {speed}  "
                f"{left_s:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _idle_share(busy_s: np.ndarray | None, seconds: float) -> list[float] | None:
    """The share of an iteration of so many seconds in which each node did not compute."""
    if busy_s is None:
        return None
    return [round(max(0.0, 1.0 - busy / seconds), 4) for busy in busy_s.tolist()]


def bytes_per_link(plan: Plan, config: Config) -> dict[tuple[int, int], int]:
    """Bytes that go from one node to another in an iteration: activations, gradients, averaging.

    Nodes count as if each had its own device. A stage with n replicas averages round the planner's
    ring, each node sending 2(n-1)/n of the gradients to the next.
    """
    network = config.network
    travelling = jnp.dtype(network.activation_dtype or config.model.compute_dtype)
    hop_bytes = activation(config.model, config.data).size * travelling.itemsize
    sent: Counter[tuple[int, int]] = Counter()
    for microbatch, path in enumerate(plan.microbatches):
        for before, after in itertools.pairwise(microbatch_chain(microbatch, path)):
            if before.node != after.node:
                sent[before.node, after.node] += hop_bytes
    element = jnp.dtype(network.averaging_dtype or jnp.float32).itemsize
    for stage, shapes in enumerate(stage_shapes(config.model, len(plan.stages))):
        ring = best_ring(plan.case, stage, plan.stages[stage])
        passed = 2 * (len(ring) - 1) * parameter_count(shapes) * element // len(ring)
        for position, node in enumerate(ring):
            if passed:
                sent[ring[position - 1], node] += passed
    return dict(sent)
