"""The processes of a run that `churn` strikes: started, watched, started again, and ended."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.churn.config import STAGES
from experiments.benchmarks.churn.records import last_line
from experiments.benchmarks.harness import launching
from experiments.benchmarks.harness.launching import Loopback
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from skippipe_jax.local.hosts import free_port
from skippipe_jax.storage.run_dir import MEMBERSHIP

LOOK_S = 0.02
PORT = 61440
JOIN, RESUME = "join", "resume"
ASKED_TO_STOP = 128 + signal.SIGTERM
MOST_APART = 2
# Notes of several processes are read one after another, and so nearly in order of time.
DISORDER_S = 10.0


class Ended(Exception):
    """The run cannot go on: nothing counts any more, or no host is left."""


class Hosts:
    """The processes of a run, and what they leave.

    Attributes:
        failures: what went wrong that must not.
        notes: all that they have noted so far, see `records`.
        apart: the hosts that have joined and do not reach the folder of the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        count: int,
        patience_s: float,
        network: ShapedNetwork | None,
    ):
        """Start them; all that they write goes below `folder`."""
        self.folder, self.config, self.count = folder, config, count
        self.network = network
        self.failures: list[str] = []
        self.notes: list[dict[str, Any]] = []
        self.apart: set[int] = set()
        self._patience_s = patience_s
        self._unread: dict[Path, tuple[int, subprocess.Popen[bytes]]] = {}
        self._read: dict[Path, int] = {}
        self._outputs = 0
        self._place = network or Loopback()
        port = free_port() if network is None else PORT
        self._coordinator = f"{self._place.address(0)}:{port}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for host in range(count):
            self._start(host, *self._trains(host))

    def start_again(self, host: int, by_join: bool = False) -> str:
        """Start a host that has ended, by `join` if it can; by which it comes back.

        It comes by `--resume` where another is away too, whose place it might take, and where too
        few would be left that reach the folder of the run.
        """
        self.apart.discard(host)
        others = [own for other, own in self._processes.items() if other != host]
        away = any(process.poll() is not None for process in others)
        if not by_join or away or len(self.apart) >= MOST_APART:
            self._start(host, *self._trains(host), "--resume")
            return RESUME
        self.apart.add(host)
        living = {process.pid for process in others}
        members = self.generation()["members"]
        addresses = [member["address"] for member in members if member["pid"] in living]
        own = self.folder / f"joined{self._outputs + 1:03}-host{host}"
        insecure = [] if self.network is None else ["--set", "cluster.insecure=true"]
        self._start(host, JOIN, *addresses, "--run-dir", str(own), *insecure)
        return JOIN

    def signal(self, host: int, number: signal.Signals) -> None:
        """Send a signal to a host."""
        self._processes[host].send_signal(number)

    def process(self, host: int) -> int:
        """The number of a host's process."""
        return self._processes[host].pid

    def wait_for_end(self, host: int) -> int:
        """The exit code of a host, once it has ended."""
        try:
            return self._processes[host].wait(self._patience_s)
        except subprocess.TimeoutExpired as error:
            self._show_stacks()
            raise Ended(f"host {host} did not exit") from error

    def wait(self, what: str, condition: Callable[[], bool], lost: Sequence[int] = ()) -> None:
        """Wait until something is the case, and no longer than patience allows.

        Raises:
            Ended: if that is not long enough, or no host is left.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            self.look()
            if condition():
                return
            self._require_lives(lost)
            if time.monotonic() > deadline:
                self._show_stacks()
                raise Ended(f"hung: timed out after {self._patience_s:g} s waiting until {what}")
            time.sleep(LOOK_S)

    def rest(self, until_s: float) -> None:
        """Let the run go on until a moment.

        Raises:
            Ended: if no host is left.
        """
        while time.time() < until_s:
            self.look()
            self._require_lives(())
            time.sleep(min(0.2, max(0.0, until_s - time.time())))

    def look(self) -> None:
        """Read what has been noted since the last look."""
        for path, (host, process) in [*self._unread.items()]:
            has_ended = process.poll() is not None
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    whole, _, _ = file.read().rpartition(b"\n")
                if whole:
                    self._read[path] = self._read.get(path, 0) + len(whole) + 1
                    self.notes += [json.loads(line) | {"by": host} for line in whole.splitlines()]
            if has_ended:
                del self._unread[path]

    def noted(self, what: str, after_s: float) -> Iterator[dict[str, Any]]:
        """All notes of something that came after a moment, the last first."""
        for note in reversed(self.notes):
            if note["at"] < after_s - DISORDER_S:
                return
            if note["what"] == what and note["at"] > after_s:
                yield note

    def generation(self) -> dict[str, Any]:
        """The last line of membership.jsonl."""
        last = last_line(self.folder / "run" / MEMBERSHIP)
        return last or {"generation": 0, "members": []}

    def are_all_in(self, after_s: float) -> bool:
        """Whether all processes are members, and have made a step together after a moment."""
        last = self.generation()
        pids = {member["host"]: member["pid"] for member in last["members"]}
        if pids != {host: process.pid for host, process in self._processes.items()}:
            return False
        counted = self.noted("counted", after_s)
        by = {note["by"] for note in counted if note["generation"] == last["generation"]}
        return len(by) == self.count

    def has_counted(self, after_s: float, generation: int) -> bool:
        """Whether a step has counted after a moment in a later generation."""
        return any(note["generation"] > generation for note in self.noted("counted", after_s))

    def can_spare(self, lost: Collection[int]) -> bool:
        """Whether the run can go on without some hosts that it loses at once.

        It can where others serve all stages, or enough are left to read all of a checkpoint.
        """
        left = {member["host"] for member in self.generation()["members"]} - {*lost}
        stages = self._stages()
        served = set().union(*(stages.get(host, set()) for host in left))
        return len(served) == len(STAGES) or len(left - self.apart) >= len(STAGES)

    def serves_with(self, host: int) -> list[int]:
        """The other hosts that have served a stage which a host served last."""
        stages = self._stages()
        own = stages.get(host, set())
        return [other for other in sorted(stages) if other != host and stages[other] & own]

    def end(self) -> None:
        """Tell all hosts to leave, at which the run stops, and wait until all have."""
        for host in range(self.count):
            self.signal(host, signal.SIGTERM)
        for host in range(self.count):
            code = self.wait_for_end(host)
            if code != ASKED_TO_STOP:
                self.failures.append(
                    f"host {host} exited with code {code} when the run was stopped"
                )

    def kill(self) -> None:
        """End all that still run."""
        launching.kill(self._processes.values())

    def tracebacks(self) -> list[str]:
        """Outputs that have one."""
        return [
            f"{path.name} has a traceback"
            for path in sorted(self.folder.glob("output*"))
            if "Traceback" in path.read_text(errors="replace")
        ]

    def _stages(self) -> dict[int, set[int]]:
        """The stages that each host has served last."""
        stages: dict[int, set[int]] = {}
        for note in self.noted("counted", 0.0):
            stages.setdefault(note["by"], {*note["stages"]})
            if len(stages) == self.count:
                break
        return stages

    def _trains(self, host: int) -> list[str]:
        words = ["train", "--config", str(self.config), "--coordinator", self._coordinator]
        return [*words, "--hosts", str(self.count), "--host-id", str(host)]

    def _start(self, host: int, *words: str) -> None:
        module = ["-m", "experiments.benchmarks.churn.host", str(self.folder), str(host)]
        self._outputs += 1
        output = self.folder / f"output{self._outputs:03}-host{host}"
        process = launching.started([*module, *words], output, self._place.command(host))
        self._processes[host] = process
        self._unread[self.folder / f"notes{host}-{process.pid}.jsonl"] = host, process

    def _require_lives(self, lost: Sequence[int]) -> None:
        """Note which hosts have ended by themselves, and start them again."""
        ended = {host: process.poll() for host, process in self._processes.items()}
        if all(code is not None for code in ended.values()):
            raise Ended(f"all hosts have exited; codes by host: {sorted(ended.items())}")
        for host, code in ended.items():
            if code is not None and not self.generation()["generation"]:
                raise Ended(f"host {host} exited with code {code} before the first step")
            if code is not None and host not in lost:
                self.failures.append(f"host {host} exited unexpectedly with code {code}")
                print(f"WRONG: {self.failures[-1]}", flush=True)
                self.start_again(host)

    def _show_stacks(self) -> None:
        """Have all hosts write into their outputs what their threads are at."""
        for process in self._processes.values():
            process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
