"""The hosts of a training run as processes, of which a test may lose some."""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skippipe_jax.storage.checkpoint import latest_step
from skippipe_jax.storage.run_dir import MEMBERSHIP
from tests.harness.ports import free_port
from tests.harness.processes import Processes
from tests.harness.training_runs import SMALL_CASE, settings, steps_done, virtual_devices

TRAIN = ("-m", "skippipe_jax.train")
PATIENCE_S = 180.0
# Two replicas of each of two stages.
CASE = SMALL_CASE | {"nodes": 4, "locations": ["here"], "links": [], "stages": [2, 2]}
# A step takes a quarter of a second where a host is lost, of plans with the case of such runs.
PACED = settings(
    network__mode="emulate", network__emulate_compute="true", plan__case__forward_s=0.02
)


class TrainingHosts:
    """The hosts of a training run, each of which may be lost and started again.

    Attributes:
        processes: all that were started.
        process_of: which of them is a host.
    """

    def __init__(
        self,
        processes: Processes,
        config: Path,
        run_dir: Path,
        more: Sequence[str] = (),
        *,
        program: Sequence[str | Path] = TRAIN,
        hosts: int = 4,
        devices: int = 1,
    ):
        self.processes, self.run_dir = processes, run_dir
        self.devices = virtual_devices(devices)
        place = ["--coordinator", f"127.0.0.1:{free_port()}", "--hosts", str(hosts)]
        self.command = [*program, "--config", config, *settings(run_dir=run_dir), *more, *place]
        self.process_of: dict[int, int] = {}
        for host in range(hosts):
            self.start(host)

    def start(self, host: int, *more: str) -> None:
        self._start(host, *self.command, "--host-id", str(host), *more)

    def join(self, host: int, at: int, folder: Path, **changes: Any) -> None:
        """Start a machine that joins as a host, by the address of another."""
        command = ("-m", "skippipe_jax", "join", self.address(at), "--run-dir", folder)
        self._start(host, *command, *settings(**changes))

    def address(self, host: int) -> str:
        """Where a host listens for others."""
        members = self.generations()[-1]["members"]
        return next(own["address"] for own in members if own["host"] == host)

    def _start(self, host: int, *command: str | Path) -> None:
        self.process_of[host] = len(self.processes.processes)
        self.processes.start(*command, **self.devices)

    def pid(self, host: int) -> int:
        return self.processes.processes[self.process_of[host]].pid

    def signal(self, host: int, blow: signal.Signals) -> None:
        self.processes.processes[self.process_of[host]].send_signal(blow)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.processes.wait_until(condition, PATIENCE_S, all_live=False)

    def wait_until_step(self, step: int) -> None:
        self.wait_until(lambda: steps_done(self.run_dir) >= step)

    def wait_for_steps(self, more: int) -> None:
        self.wait_until_step(steps_done(self.run_dir) + more)

    def wait_until_saved(self, step: int) -> None:
        """And a step longer: hosts hear that a checkpoint is whole after its folder is there."""
        self.wait_until(lambda: (latest_step(self.run_dir) or 0) >= step)
        self.wait_for_steps(1)

    def wait_until_members(self, *members: int) -> None:
        self.wait_until(lambda: self.members()[-1:] == [[*members]])

    def generations(self) -> list[dict[str, Any]]:
        path = self.run_dir / MEMBERSHIP
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def changes(self) -> list[dict[str, Any]]:
        """The generations but those in which the same hosts connected again, which is warned of."""
        changes: list[dict[str, Any]] = []
        for line in self.generations():
            if changes and hosts_of(line) == hosts_of(changes[-1]):
                warnings.warn(f"transfers failed: {self.processes.outputs()}", stacklevel=2)
            else:
                changes.append(line)
        return changes

    def members(self) -> list[list[int]]:
        return [hosts_of(line) for line in self.generations()]

    def output(self, host: int) -> str:
        return self.processes.output(self.process_of[host])

    def exit_code(self, host: int) -> int:
        return self.processes.exit_code(self.process_of[host], PATIENCE_S)

    def ends_with(self, code: int, *hosts: int) -> None:
        """Wait for the end of these hosts, which all have this exit code, and no traceback."""
        codes = [self.exit_code(host) for host in hosts]
        assert codes == [code] * len(hosts), self.processes.outputs()
        for host in hosts:
            assert "Traceback" not in self.output(host), self.output(host)

    def ends_well(self, *hosts: int) -> None:
        self.ends_with(0, *hosts)


def hosts_of(generation: dict[str, Any]) -> list[int]:
    return sorted(own["host"] for own in generation["members"])
