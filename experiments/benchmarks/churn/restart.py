"""A run that is restarted from its last checkpoint whenever a host is lost, beside `churn`."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.churn import records
from experiments.benchmarks.churn.config import PER_STEP
from experiments.benchmarks.churn.faults import (
    OF_THE_NETWORK,
    RESET,
    SEVER,
    SIGNALS,
    STORAGE,
    Fault,
    links_between,
)
from experiments.benchmarks.churn.strike import STOP_S
from experiments.benchmarks.harness import launching
from experiments.benchmarks.harness.launching import Loopback, set_words
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from skippipe_jax.storage.run_dir import METRICS

LOOK_S = 0.1
PORTS = range(40000, 60000)
PATIENCE_S = 120.0
"""A run that has made no step for so long is restarted, whatever is wrong with it."""


class Restarted:
    """The same run, whose hosts have one JAX: the first loss ends all, and all start again at once.

    This stands for the scheduler. Hosts are struck from outside, wherever in a step they are. A
    fault while they start strikes them as well; the second blow of a fault, while a host joins,
    they are spared.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        count: int,
        heartbeat_timeout_s: float,
        network: ShapedNetwork | None,
        calm_s: float,
    ):
        """Start nothing yet; all goes below `folder`."""
        self._folder, self._config, self._count = folder / "restart", config, count
        self._heartbeat_timeout_s, self._calm_s = heartbeat_timeout_s, calm_s
        self._network = network
        self._starts = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_given_up = threading.Event()
        self._begun_s = 0.0
        self._seen: tuple[float, int] = 0.0, 0
        self._downs: list[float] = []
        self._down_since: float | None = None
        self._lost_steps = 0

    def happen(
        self, faults: Sequence[Fault], moments: Sequence[float], length_s: float
    ) -> dict[str, Any]:
        """Train, strike and restart; what the run got done, see `records.goodput`."""
        self._folder.mkdir(parents=True)
        self._start()
        while self._step() < 3 and not self._is_given_up.is_set():
            self._rest(time.time() + 1.0)
        self._rest(time.time() + self._calm_s / 4)
        calm = self._now()
        self._rest(calm[0] + self._calm_s)
        first = self._now()
        for fault, at_s in zip(faults, moments, strict=True):
            self._rest(first[0] + at_s)
            if self._is_given_up.is_set():
                break
            self._strike(fault)
            so_far = records.goodput(calm, first, self._now(), PER_STEP)
            (self._folder / "progress.json").write_text(json.dumps(so_far))
        self._rest(first[0] + length_s)
        last = self._now()
        self.kill()
        found = records.goodput(calm, first, last, PER_STEP)
        return found | {
            "starts": self._starts,
            "median_down_s": round(sorted(self._downs)[len(self._downs) // 2], 1)
            if self._downs
            else None,
            "steps_made_again": self._lost_steps,
        }

    def give_up(self) -> None:
        """Have `happen` return soon."""
        self._is_given_up.set()

    def kill(self) -> None:
        """End all hosts."""
        launching.kill(self._processes)

    def _start(self) -> None:
        self._starts += 1
        place = self._network or Loopback()
        coordinator = f"{place.address(0)}:{PORTS[self._starts]}"
        words = ["-m", "skippipe_jax.train", "--config", str(self._config)]
        words += ["--coordinator", coordinator, "--hosts", str(self._count)]
        words += set_words(
            f"run_dir={self._folder / 'run'}",
            "cluster.runtime=distributed",
            "cluster.connect_timeout_s=60",
            "network.averaging=ring",
        )
        if (self._folder / "run" / METRICS).exists():
            words.append("--resume")
        self._processes = []
        for host in range(self._count):
            output = self._folder / f"output{self._starts:03}-host{host}"
            own = [*words, "--host-id", str(host)]
            self._processes.append(launching.started(own, output, place.command(host)))
        self._begun_s = time.time()

    def _rest(self, until_s: float) -> None:
        """Wait until a moment, and start all again when one has ended."""
        while True:
            self._look()
            if time.time() >= until_s or self._is_given_up.is_set():
                return
            time.sleep(min(LOOK_S, max(0.0, until_s - time.time())))

    def _look(self) -> None:
        now_s, step = time.time(), self._step()
        if step != self._seen[1]:
            if step < self._seen[1]:
                self._lost_steps += self._seen[1] - step
            elif self._down_since is not None:
                self._downs.append(now_s - self._down_since)
                self._down_since = None
            self._seen = now_s, step
        is_stuck = now_s - max(self._seen[0], self._begun_s) > PATIENCE_S
        if is_stuck or any(process.poll() is not None for process in self._processes):
            if self._down_since is None:
                self._down_since = now_s
            self.kill()
            self._start()

    def _strike(self, fault: Fault) -> None:
        if fault.kind in (RESET, SEVER, STORAGE, "silent"):
            return  # What happens inside a host, or to a connection, is no loss here.
        struck = fault.struck(0, range(self._count))
        first = self._processes[struck[0]]
        if fault.kind in OF_THE_NETWORK:
            if self._network is not None:
                links = links_between(struck, fault.kind, self._count)
                self._network.set_paths(links, up=False)
                starts, until_s = self._starts, time.time() + 4 * self._heartbeat_timeout_s
                while self._starts == starts and time.time() < until_s:
                    self._rest(time.time() + LOOK_S)
                self._network.set_paths(links, up=True)
            return
        first.send_signal(signal.Signals[SIGNALS[fault.kind]])
        if fault.kind == "stop":
            self._rest(time.time() + STOP_S)
            first.send_signal(signal.SIGCONT)

    def _step(self) -> int:
        """The last step that metrics.jsonl has."""
        last = records.last_line(self._folder / "run" / METRICS)
        return 0 if last is None else int(last["step"])

    def _now(self) -> tuple[float, int]:
        return time.time(), self._step()
