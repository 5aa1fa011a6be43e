"""Launcher of a run's hosts as processes of this machine, with restarts of lost hosts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from skippipe_jax.campaign.restart_policy import HAS_LEFT, RestartPolicy, shell_exit_code

if TYPE_CHECKING:
    from skippipe_jax.config.cluster import ClusterConfig

POLL_S = 0.1

# Outside of Linux's range for outgoing connections: a host that connects before host 0 listens
# could otherwise get its target port as its own, and would connect to itself.
PORTS = range(61440, 65536)


def living_addresses(folder: Path) -> list[str]:
    """Return the addresses of hosts of a run's last generation that are alive on this machine.

    Raises:
        InputError: if the folder cannot be read.
    """
    from skippipe_jax.storage.run_dir import RunDir

    last = RunDir(folder).last_generation()
    members = [] if last is None else last.members
    return [member.address for member in members if member.pid and _lives(member.pid)]


def joining(living: Sequence[str], folder: Path, cluster: ClusterConfig) -> list[str]:
    """Return the command line of a host that joins others on this machine, with its own folder."""
    command = [sys.executable, "-m", "skippipe_jax", "join", *living, "--run-dir", str(folder)]
    # Settings that it needs before it receives the configuration of the run.
    for name in ("bind_address", "secret", "insecure", "insecure_transfers"):
        if value := getattr(cluster, name):
            command += ["--set", f"cluster.{name}={value}"]
    return command


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):  # The id may be another user's by now.
        return False
    return True


class LocalHosts:
    """All hosts of a run, each one process of this machine at a time."""

    def __init__(
        self,
        indices: Sequence[int],
        words: Callable[[int], Sequence[str]],
        grace_s: float,
        outlives_hosts: Callable[[], bool],
        max_restarts: int | None,
    ):
        """Prepare the hosts without starting them.

        Args:
            indices: host ids.
            words: returns the command line of a host, at each start.
            grace_s: seconds within which the others must stop after one has failed.
            outlives_hosts: returns whether the run would continue without a host that fails now.
            max_restarts: most restarts of a host after its own errors; None restarts no host.
        """
        self._words, self._max_restarts = words, max_restarts
        self._grace_s, self._outlives_hosts = grace_s, outlives_hosts
        # Exit code of the final end of each host, minus the number of an ending signal.
        self._codes: dict[int, int | None] = dict.fromkeys(indices)
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._pending_signals: list[int] = []
        self._forwarded: int | None = None
        self._failed_at_s: float | None = None
        self._first_code = 0

    def told(self, number: int) -> None:
        """Forward a signal to all hosts soon; safe in a signal handler."""
        # Not at once: a host may be about to start.
        self._pending_signals.append(number)

    def run(self) -> int:
        """Start all hosts and wait until all have ended for good.

        Returns 0 if training has finished, even without some hosts, else the exit code of the first
        host that failed: 128 plus the signal number if a signal ended it.
        """
        asyncio.run(self._run())
        for reader in self._readers.values():
            reader.join()
        if 0 in self._codes.values() and self._can_continue():
            return 0
        return shell_exit_code(self._first_code)

    async def _run(self) -> None:
        pending = {asyncio.create_task(self._keep(host)) for host in self._codes}
        try:
            while pending:
                self._forward_signals()
                self._kill_after_grace()
                done, pending = await asyncio.wait(
                    pending, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for host in done:
                    host.result()
        finally:  # If this process fails, no other would stop the running hosts.
            until_s = time.monotonic() + self._grace_s
            self._send_signal(signal.SIGTERM)
            for process in self._processes.values():
                try:
                    process.wait(max(0.0, until_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    async def _keep(self, host: int) -> None:
        """Start a host, and restart it until its end is final."""
        most, code, pause_s = self._max_restarts, 0, 0.0
        policy = None if most is None else RestartPolicy(most)
        while pause_s is not None:
            starts_at_s = time.monotonic() + pause_s
            while not self._is_ending and time.monotonic() < starts_at_s:
                await asyncio.sleep(POLL_S)
            if self._is_ending:
                code = code if self._forwarded is None else -self._forwarded
                break
            started_s, process = time.monotonic(), self._start(host)
            while (ended := process.poll()) is None:
                await asyncio.sleep(POLL_S)
            code = ended
            pause_s = self._pause_s(host, code, time.monotonic() - started_s, policy)
        self._codes[host] = code
        self._first_code = self._first_code or code

    def _start(self, host: int) -> subprocess.Popen[str]:
        """Start a process of a host, and print its output from now on."""
        process = self._processes[host] = subprocess.Popen(
            self._words(host),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Each signal is forwarded once, whether it came from the terminal or from a scheduler.
            start_new_session=True,
        )
        self._readers[host] = threading.Thread(
            target=_print_output, args=(host, process.stdout), daemon=True
        )
        self._readers[host].start()
        return process

    def _send_signal(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)

    def _forward_signals(self) -> None:
        while self._pending_signals:
            self._forwarded = self._pending_signals.pop(0)
            self._send_signal(self._forwarded)

    def _pause_s(
        self, host: int, code: int, lived_s: float, policy: RestartPolicy | None
    ) -> float | None:
        """Return and print the seconds until a host is restarted; None if it is not."""
        if policy is None or code == 0 or self._is_ending:
            return None
        pause_s = policy.pause_s(code, lived_s, misses_others=any(self._codes.values()))
        what = "not restarted"
        if pause_s is not None:
            at = time.strftime("%H:%M:%S", time.localtime(time.time() + pause_s))
            what = f"restart in {pause_s:g} s, at {at}"
        print(f"host {host} {_describe_exit(code)}; {what}", flush=True)
        return pause_s

    @property
    def _is_ending(self) -> bool:
        """True if hosts are no longer restarted."""
        is_trained = 0 in self._codes.values()
        return is_trained or self._forwarded is not None or self._failed_at_s is not None

    def _can_continue(self) -> bool:
        """Return whether the others can continue without the hosts that have ended for good."""
        failed = (code for code in self._codes.values() if code is not None and code > 0)
        have_left = all(code == HAS_LEFT for code in failed)
        return (have_left or self._max_restarts is not None) and self._outlives_hosts()

    def _kill_after_grace(self) -> None:
        """Kill hosts that still run `grace_s` after one has failed, or after a forwarded signal."""
        now_s = time.monotonic()
        has_failed = self._failed_at_s is None and any(self._codes.values())
        if has_failed and (self._forwarded or not self._can_continue()):
            self._failed_at_s = now_s
        if self._failed_at_s is not None and now_s - self._failed_at_s > self._grace_s:
            self._send_signal(signal.SIGKILL)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _print_output(host: int, output: IO[str]) -> None:
    for line in output:
        print(f"[host {host}] {line}", end="", flush=True)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of this machine on which no process listens at this address."""
    while True:
        port = random.choice(PORTS)
        try:
            socket.create_connection((address, port)).close()
        except OSError:
            return port
