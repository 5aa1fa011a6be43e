"""The processes of a service: its front, and the hosts of its stages."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from experiments.benchmarks.harness import launching
from experiments.benchmarks.harness.launching import ENVIRONMENT, Loopback, Network
from skippipe_jax.local.hosts import free_port

LOOK_S = 0.02
_SERVING = re.compile(r"^serving .* at http://.*/v1$", re.MULTILINE)
_HOST = re.compile(
    r"^host \d+ \(.*--host-id (\d+)\)(?: serves stages \[(.*)\]|(, which held .*, failed: ))",
    re.MULTILINE,
)


class Service:
    """A front, which has the data stage, and hosts with another stage each, as processes.

    Attributes:
        port: where the front takes requests, on its own host.
    """

    def __init__(
        self,
        folder: Path,
        run: Path,
        hosts: int,
        *front: str,
        network: Network | None = None,
        patience_s: float = 300.0,
    ):
        """Prepare a service of so many hosts, with the front, that keeps its output in a folder.

        `front` are further arguments of the front; what takes longer than `patience_s` has failed.
        """
        self.port, self._run, self._patience_s = free_port(), run, patience_s
        self._network = network or Loopback()
        self._coordinator = f"{self._network.address(0)}:{free_port()}"
        self._front = ["--hosts", str(hosts), "--port", str(self.port), *front]
        self._front += ["--set", f"cluster.connect_timeout_s={patience_s}"]
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._output = folder / f"service{self.port}"
        self._output.mkdir()
        self._files, self._starts = ExitStack(), 0

    @property
    def front(self) -> int:
        """The process id of the front."""
        return self._processes[0].pid

    def start_host(self, host: int, *, has_weights: bool = True) -> None:
        """Start a host; one without weights gets them from the front."""
        module = ["skippipe_jax", "serve"] if host else ["experiments.benchmarks.serving.front"]
        words = [*module, "--coordinator", self._coordinator, "--host-id", str(host)]
        words += ["--max-stages", "1"] + ([] if host else self._front)
        words += ["--run", str(self._run)] if has_weights else []
        output = self._output / (f"host{host}-{self._starts}.txt" if host else "front.txt")
        self._starts += 1
        pipe = subprocess.DEVNULL if host else subprocess.PIPE
        self._processes[host] = subprocess.Popen(
            [*self._network.command(host), sys.executable, "-m", *words],
            stdin=pipe,
            stdout=pipe,
            stderr=self._files.enter_context(output.open("wb")),
            text=True,
            env=os.environ | ENVIRONMENT,
        )

    def is_serving(self) -> bool:
        """Tell whether the front takes requests."""
        return _SERVING.search(self._told()) is not None

    def status(self) -> list[dict[str, Any]]:
        """Return what the front says of all hosts, itself first.

        Raises:
            RuntimeError: if it has ended.
        """
        front = self._processes[0]
        assert front.stdin is not None
        assert front.stdout is not None
        with suppress(BrokenPipeError):  # Then it says nothing, either.
            print("status", file=front.stdin, flush=True)
        if not (said := front.stdout.readline()):
            raise RuntimeError(f"the front exited with code {front.wait()}; see {self._output}")
        return json.loads(said)

    def holding(self) -> dict[int, tuple[int, ...]]:
        """Return the stages of each host that serves some, as the front has said."""
        held: dict[int, tuple[int, ...]] = {}
        for number, stages, is_lost in _HOST.findall(self._told()):
            if is_lost:
                held.pop(int(number), None)
            else:
                held[int(number)] = tuple(map(int, stages.split(",")))
        return held

    def kill(self, host: int) -> float:
        """End a host at once; return when, by `time.monotonic`."""
        self._processes[host].send_signal(signal.SIGKILL)
        at_s = time.monotonic()
        self._processes.pop(host).wait()
        return at_s

    async def until(self, holds: Callable[[], bool], otherwise: str) -> float:
        """Wait until something holds; return when it did, by `time.monotonic`.

        Raises:
            RuntimeError: if it does not in time, or a host has ended by itself.
        """
        until_s = time.monotonic() + self._patience_s
        while not holds():
            ended = {host: own.returncode for host, own in self._processes.items() if own.poll()}
            if ended or time.monotonic() > until_s:
                why = f"hosts exited unexpectedly: {ended}" if ended else "timeout"
                raise RuntimeError(f"{otherwise} ({why}):\n{self._told()[-2000:]}")
            await asyncio.sleep(LOOK_S)
        return time.monotonic()

    def end(self) -> None:
        """Tell the front to end, and wait until all hosts have.

        Raises:
            RuntimeError: if one ends otherwise than it should.
        """
        self._processes[0].send_signal(signal.SIGTERM)
        codes = {host: own.wait(self._patience_s) for host, own in self._processes.items()}
        if any(codes.values()):
            raise RuntimeError(f"hosts exited with codes {codes}:\n{self._told()[-2000:]}")

    def close(self) -> None:
        """End what is left at once."""
        launching.kill(self._processes.values())
        self._files.close()

    def _told(self) -> str:
        return (self._output / "front.txt").read_text(encoding="utf-8", errors="replace")
