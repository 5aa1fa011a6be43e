"""The processes of a service that `churn` strikes: its front, and the hosts of its stages."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.harness import launching
from skippipe_jax.local.hosts import free_port

LOOK_S = 0.02
_SERVING = re.compile(r"^serving .* at http://(.*):(\d+)/v1$", re.MULTILINE)
_HOST = re.compile(
    r"^host \d+ \(.*--host-id (\d+)\)(?: serves stages \[(.*)\]|(, which held .*, failed: ))",
    re.MULTILINE,
)


class StagedService:
    """A front, which has the data stage, and hosts with another stage each, as processes.

    Attributes:
        address: where clients reach it, once it serves.
    """

    def __init__(self, folder: Path, run: Path, hosts: int, silent_s: float, patience_s: float):
        """Prepare a service of so many hosts, with the front, that keeps its output in a folder.

        A host counts as lost after `silent_s` without a word; what takes longer than `patience_s`
        has failed.
        """
        self._folder, self._run, self._hosts = folder, run, hosts
        self._silent_s, self._patience_s = silent_s, patience_s
        self._coordinator = f"127.0.0.1:{free_port()}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self.address = ("", 0)

    @property
    def front(self) -> int:
        """The process id of the front."""
        return self._processes[0].pid

    def start(self) -> None:
        """Start all hosts, and wait until the service takes requests.

        Raises:
            RuntimeError: if it does not.
        """
        for host in range(self._hosts):
            self.start_host(host)
        asyncio.run(self.until(lambda: self._served() is not None, "the service has not started"))
        found = self._served()
        assert found is not None
        self.address = found

    def start_host(self, host: int) -> None:
        """Start a host; every other one has no weights, and gets them from the front."""
        words = ["-m", "skippipe_jax", "serve", "--coordinator", self._coordinator]
        words += ["--host-id", str(host), "--max-stages", "1"]
        if host == 0:
            words += ["--hosts", str(self._hosts), "--port", "0"]
            words += ["--set", f"cluster.heartbeat_timeout_s={self._silent_s}"]
            words += ["--set", f"cluster.connect_timeout_s={self._patience_s}"]
        if host % 2 == 0:
            words += ["--run", str(self._run)]
        self._starts += 1
        output = self._folder / f"host{host}-{self._starts}.txt"
        if host == 0:
            self._told = output
        self._processes[host] = launching.started(words, output)

    def holding(self) -> dict[int, tuple[int, ...]]:
        """Return the stages of each host that serves some, as the front has said."""
        held: dict[int, tuple[int, ...]] = {}
        for number, stages, is_lost in _HOST.findall(self._output()):
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
                raise RuntimeError(f"{otherwise} ({why}):\n{self._output()[-2000:]}")
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
            raise RuntimeError(f"hosts exited with codes {codes}:\n{self._output()[-2000:]}")

    def close(self) -> None:
        """End what is left at once."""
        launching.kill(self._processes.values())

    def _output(self) -> str:
        return self._told.read_text(encoding="utf-8", errors="replace")

    def _served(self) -> tuple[str, int] | None:
        found = _SERVING.search(self._output())
        return None if found is None else (found[1], int(found[2]))
