"""Launcher of a run's hosts as processes of this machine, with restarts of lost hosts."""

from __future__ import annotations

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
        self._hosts = [LocalHost(index, words) for index in indices]
        most = max_restarts
        self._tries = None if most is None else {index: RestartPolicy(most) for index in indices}
        self._grace_s, self._outlives_hosts = grace_s, outlives_hosts
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
        try:
            while any(host.code is None for host in self._hosts):
                self._forward_signals()
                for host in self._hosts:
                    self._update(host)
                self._kill_after_grace()
                time.sleep(POLL_S)
        finally:  # If this process fails, no other would stop the running hosts.
            until_s = time.monotonic() + self._grace_s
            for host in self._hosts:
                host.send_signal(signal.SIGTERM)
            for host in self._hosts:
                host.end(until_s)
        for host in self._hosts:
            host.show_the_rest()
        codes = [host.code for host in self._hosts]
        if 0 in codes and self._can_continue():
            return 0
        return shell_exit_code(self._first_code)

    def _forward_signals(self) -> None:
        while self._pending_signals:
            self._forwarded = number = self._pending_signals.pop(0)
            for host in self._hosts:
                host.send_signal(number)

    def _update(self, host: LocalHost) -> None:
        """Start a host that is due, or handle the end of its process."""
        if host.code is not None:
            return
        if host.starts_at_s is not None:
            if self._is_ending:
                self._ends(host, host.last_code if self._forwarded is None else -self._forwarded)
            elif time.monotonic() >= host.starts_at_s:
                host.start()
            return
        code = host.poll()
        if code is None:
            return
        pause_s = self._pause_s(host, code)
        if pause_s is None:
            self._ends(host, code)
        else:
            host.starts_at_s = time.monotonic() + pause_s

    def _pause_s(self, host: LocalHost, code: int) -> float | None:
        """Return and print the seconds until a host is restarted; None if it is not."""
        if self._tries is None or code == 0 or self._is_ending:
            return None
        misses_others = any(other.code for other in self._hosts)
        pause_s = self._tries[host.index].pause_s(code, host.lived_s, misses_others=misses_others)
        what = "not restarted"
        if pause_s is not None:
            at = time.strftime("%H:%M:%S", time.localtime(time.time() + pause_s))
            what = f"restart in {pause_s:g} s, at {at}"
        print(f"host {host.index} {_describe_exit(code)}; {what}", flush=True)
        return pause_s

    def _ends(self, host: LocalHost, code: int) -> None:
        host.code = code
        self._first_code = self._first_code or code

    @property
    def _is_ending(self) -> bool:
        """True if hosts are no longer restarted."""
        is_trained = any(host.code == 0 for host in self._hosts)
        return is_trained or self._forwarded is not None or self._failed_at_s is not None

    def _can_continue(self) -> bool:
        """Return whether the others can continue without the hosts that have ended for good."""
        failed = (host.code for host in self._hosts if host.code is not None and host.code > 0)
        have_left = all(code == HAS_LEFT for code in failed)
        return (have_left or self._tries is not None) and self._outlives_hosts()

    def _kill_after_grace(self) -> None:
        """Kill hosts that still run `grace_s` after one has failed, or after a forwarded signal."""
        now_s = time.monotonic()
        has_failed = self._failed_at_s is None and any(host.code for host in self._hosts)
        if has_failed and (self._forwarded or not self._can_continue()):
            self._failed_at_s = now_s
        if self._failed_at_s is not None and now_s - self._failed_at_s > self._grace_s:
            for host in self._hosts:
                host.send_signal(signal.SIGKILL)


class LocalHost:
    """One host of the run: a process of this machine, replaced by a new one upon a restart.

    Attributes:
        index: host id.
        code: exit code of its final end, as `poll` returns it; None before.
        last_code: exit code of its last process.
        starts_at_s: start time of the next process by `time.monotonic`; None while one runs.
    """

    def __init__(self, index: int, words: Callable[[int], Sequence[str]]):
        """Create a host that is due to start; `words` is as in `LocalHosts`."""
        self.index = index
        self.code: int | None = None
        self.last_code = 0
        self.starts_at_s: float | None = time.monotonic()
        self._words = words
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._started_at_s = 0.0

    def start(self) -> None:
        """Start a process, and print its output from now on."""
        self._process = subprocess.Popen(
            self._words(self.index),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Each signal is forwarded once, whether it came from the terminal or from a scheduler.
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=_print_output, args=(self.index, self._process.stdout), daemon=True
        )
        self._reader.start()
        self._started_at_s, self.starts_at_s = time.monotonic(), None

    @property
    def lived_s(self) -> float:
        """Seconds since the last process was started."""
        return time.monotonic() - self._started_at_s

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the ending signal; None while it runs."""
        assert self._process is not None, "is started"
        code = self._process.poll()
        self.last_code = code or 0
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to its process, if one runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, until_s: float) -> None:
        """Wait for its process, if any, until `until_s` by `time.monotonic`, then kill it."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def show_the_rest(self) -> None:
        """Wait until all output of the last process is printed."""
        if self._reader is not None:
            self._reader.join()


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
