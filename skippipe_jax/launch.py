"""Start all hosts of a run as processes of this machine, and again those that are lost.

python -m skippipe_jax.launch --config FILE --hosts N
"""

from __future__ import annotations

import argparse
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

from skippipe_sched import fields
from skippipe_sched.errors import (
    INPUT_ERROR_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TRY_AGAIN_EXIT_CODE,
)

from skippipe_jax.arguments import add_config_arguments, run_module

if TYPE_CHECKING:
    from skippipe_jax.config import Config
    from skippipe_jax.config.cluster import ClusterConfig

POLL_S = 0.1

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""So long a host is waited with that is to be started again: each time twice as long."""

SETTLED_S = 60.0
"""Once a host has lived for so long, its next pause is as short as the first."""

MOST_FAULTS = 5
"""So often a host is started again that has ended by a fault of its own."""

FORGIVEN_S = 3600.0
"""Once a host has lived for so long, its faults before count no more."""

HAS_LEFT = 128 + signal.SIGTERM
"""So a host ends that was told to leave: the others go on without it, or have ended as it has."""

FOR_GOOD = (0, INPUT_ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, HAS_LEFT)
"""After these it is not: it was trained to the end, would end so again, or was told to stop."""

RESUME, JOIN = "resume", "join"
"""How a host comes back: by its number, or from the addresses of those that live."""

# Not from the ports that Linux gives to outgoing connections: a host that knocks before host 0
# listens could be given the very port that it knocks at, and would be connected with itself.
PORTS = range(61440, 65536)

EPILOG = (
    "With --respawn a host that is lost is started again, by itself, and with --resume once the "
    "run has begun: when a signal has ended it or it ends with 75, as often as that happens; "
    f"{MOST_FAULTS} times after a fault of its own (1, others), and as often again once it has "
    f"lived for {FORGIVEN_S / 60:g} min. That is {FIRST_PAUSE_S:g} s later, "
    "and twice as much later each time that it ends within a minute of its start, "
    f"{LONGEST_PAUSE_S:g} s at most. It is not after 0, 2, 130 and 143, nor once this command was "
    "told to stop or the run is trained. When a host stays away, 75 counts as a fault of others. "
    "With --respawn=join it comes back as one that does not reach the folder of the run: it joins "
    "those that live, as skippipe join does, from a folder of its own beside run_dir."
)


def main() -> int:
    """Parse the command line, run all hosts; returns 0, or the code of the first that failed."""
    return run_module("skippipe_jax.launch", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Start N processes of python -m skippipe_jax.train on this machine, one for each host of a "
        "run, and show what they print. When one fails, all are stopped; but once they train, each "
        "with a JAX of its own, the others go on without one that a signal has ended."
    )
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="how many hosts")
    parser.add_argument(
        "--respawn",
        nargs="?",
        const=RESUME,
        choices=(RESUME, JOIN),
        help="start a host again that is lost, as told below (default: resume)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long hosts may take to stop before they are killed (default: %(default)s)",
    )
    parser.set_defaults(command=launch)


def launch(arguments: argparse.Namespace) -> int:
    """Run all hosts until they end.

    Raises:
        InputError: for arguments and a configuration that no host could use.
    """
    from skippipe_jax.config import load_config
    from skippipe_jax.connections.addresses import chosen_address, join_address
    from skippipe_jax.connections.keys import Keys

    hosts = fields.integer(arguments.hosts, "--hosts", 1)
    fields.number(arguments.grace, "--grace", 0.0)
    # What is wrong here is said once; every host would say it.
    config = load_config(arguments.config, arguments.set)
    from skippipe_jax.storage.run_folder import MEMBERSHIP, is_run

    address = chosen_address(config.cluster.bind_address) or "127.0.0.1"
    Keys.of(config.cluster).require_allowed(address)
    coordinator = join_address(address, free_port(address))
    command = [sys.executable, "-m", "skippipe_jax.train", "--config", str(arguments.config)]
    command += [word for override in arguments.set for word in ("--set", override)]
    place = ["--coordinator", coordinator, "--hosts", str(hosts), "--host-id"]
    folder, begun_s = Path(config.run_dir), time.time()
    # A run that is there already goes on only where that is asked for: else the hosts refuse it.
    is_new = not is_run(folder)
    if is_new:
        _require_nodes(config, hosts)

    def words(host: int) -> list[str]:
        living = living_addresses(folder) if arguments.respawn == JOIN and outlives_hosts() else []
        if living:
            return joining(living, Path(f"{folder}-joined-{host}"), config.cluster)
        resumes = arguments.resume or (is_new and is_run(folder))
        return [*command, *["--resume"] * resumes, *place, str(host)]

    def outlives_hosts() -> bool:
        path = folder / MEMBERSHIP
        return path.exists() and path.stat().st_mtime >= begun_s

    respawns = arguments.respawn is not None
    launched = LocalHosts(hosts, words, arguments.grace, outlives_hosts, respawns)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: launched.told(number))
    return launched.run()


def _require_nodes(config: Config, hosts: int) -> None:
    """Refuse hosts that a new run has no nodes for, as far as its configuration says how many.

    Each host would find out by itself, once all have started.

    Raises:
        InputError: if there are such, or for a plan or a case that cannot be read.
    """
    from skippipe_sched.problem.case import node_count
    from skippipe_sched.problem.plan import load_plan

    from skippipe_jax.program.compiler import hosts_of_nodes

    given = config.plan.case
    if isinstance(given, str):
        given = fields.load_yaml(Path(given), "case")
    if config.plan.file is not None:
        nodes = len(load_plan(Path(config.plan.file)).case.nodes)
    elif isinstance(given, dict) and "nodes" in given:
        nodes = node_count(given["nodes"])
    else:  # Each host that measures is a node, unless it is told otherwise.
        nodes = len(config.cluster.host_of_node or range(hosts))
    hosts_of_nodes(nodes, hosts, config.cluster.host_of_node)


def living_addresses(folder: Path) -> list[str]:
    """Where the hosts of the last generation of a run listen, those that are processes here still.

    Raises:
        InputError: if what the run tells of its generations is damaged.
    """
    from skippipe_jax.storage.run_folder import read_generations

    generations = read_generations(folder)
    members = generations[-1]["members"] if generations else []
    return [member["address"] for member in members if _lives(member["pid"])]


def joining(living: Sequence[str], folder: Path, cluster: ClusterConfig) -> list[str]:
    """The command line of a host that joins others on this machine, by a folder of its own."""
    command = [sys.executable, "-m", "skippipe_jax.join", *living, "--run-dir", str(folder)]
    # What it needs before it is told the configuration of the run.
    for name in ("bind_address", "secret", "insecure", "insecure_transfers"):
        if value := getattr(cluster, name):
            command += ["--set", f"cluster.{name}={value}"]
    return command


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):  # Or its number is another user's by now.
        return False
    return True


class LocalHosts:
    """All hosts of a run, each a process of this machine at a time."""

    def __init__(
        self,
        count: int,
        words: Callable[[int], Sequence[str]],
        grace_s: float,
        outlives_hosts: Callable[[], bool],
        respawns: bool,
    ):
        """Start nothing yet.

        Args:
            count: how many hosts there are.
            words: the command line of a host, asked for each time that it is started.
            grace_s: seconds that the others may take to stop once one has failed.
            outlives_hosts: whether the run has come so far that hosts go on without others.
            respawns: whether hosts that are lost are started again.
        """
        self._hosts = [LocalHost(index, words) for index in range(count)]
        self._tries = [Tries() for _ in range(count)] if respawns else None
        self._grace_s, self._outlives_hosts = grace_s, outlives_hosts
        self._to_pass_on: list[int] = []
        self._told: int | None = None
        self._failed_at_s: float | None = None
        self._first_code = 0

    def told(self, number: int) -> None:
        """Pass a signal on to all hosts, soon; a signal handler may call this."""
        # Not at once: a host may be about to start.
        self._to_pass_on.append(number)

    def run(self) -> int:
        """Start all, and return when all have ended for good.

        Returns 0 if the run was trained to its end, also without some that were lost, or else the
        code of the first that failed: 128 and the number of a signal that ended it.
        """
        try:
            while any(host.code is None for host in self._hosts):
                self._pass_signals_on()
                for host in self._hosts:
                    self._look_after(host)
                self._kill_the_late()
                time.sleep(POLL_S)
        finally:  # Some still run only if this process has failed: nobody else would end them.
            until_s = time.monotonic() + self._grace_s
            for host in self._hosts:
                host.send_signal(signal.SIGTERM)
            for host in self._hosts:
                host.end(until_s)
        for host in self._hosts:
            host.show_the_rest()
        codes = [host.code for host in self._hosts]
        if 0 in codes and self._can_go_on():
            return 0
        return _as_of_a_shell(self._first_code)

    def _pass_signals_on(self) -> None:
        while self._to_pass_on:
            self._told = number = self._to_pass_on.pop(0)
            for host in self._hosts:
                host.send_signal(number)

    def _look_after(self, host: LocalHost) -> None:
        """Start a host whose time has come, or find out that it has ended."""
        if host.code is not None:
            return
        if host.starts_at_s is not None:
            if self._is_ending:
                self._ends(host, host.last_code if self._told is None else -self._told)
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
        """When a host that has ended is started again, which is said; None if it is not."""
        if self._tries is None or code == 0 or self._is_ending:
            return None
        misses_others = any(other.code for other in self._hosts)
        pause_s = self._tries[host.index].pause_s(code, host.lived_s, misses_others=misses_others)
        what = "it is not started again"
        if pause_s is not None:
            at = time.strftime("%H:%M:%S", time.localtime(time.time() + pause_s))
            what = f"it is started again in {pause_s:g} s, at {at}"
        print(f"host {host.index} {_in_words(code)}: {what}", flush=True)
        return pause_s

    def _ends(self, host: LocalHost, code: int) -> None:
        host.code = code
        self._first_code = self._first_code or code

    @property
    def _is_ending(self) -> bool:
        """Whether there is nothing that a host could be started again for."""
        is_trained = any(host.code == 0 for host in self._hosts)
        return is_trained or self._told is not None or self._failed_at_s is not None

    def _can_go_on(self) -> bool:
        """Whether the others can go on without those that have ended for good."""
        failed = (host.code for host in self._hosts if host.code is not None and host.code > 0)
        have_left = all(code == HAS_LEFT for code in failed)
        return (have_left or self._tries is not None) and self._outlives_hosts()

    def _kill_the_late(self) -> None:
        """Once one has failed, or has stopped as it was told, the others have so long to stop."""
        now_s = time.monotonic()
        has_failed = any(host.code for host in self._hosts)
        if has_failed and self._failed_at_s is None and (self._told or not self._can_go_on()):
            self._failed_at_s = now_s
        if self._failed_at_s is not None and now_s - self._failed_at_s > self._grace_s:
            for host in self._hosts:
                host.send_signal(signal.SIGKILL)


class LocalHost:
    """One host of the run: a process of this machine, and another once that has ended.

    Attributes:
        index: which host it is.
        code: that by which it has ended for good, as `poll` has it; None before.
        last_code: that of its last process.
        starts_at_s: when the next process starts, by `time.monotonic`; None while one runs.
    """

    def __init__(self, index: int, words: Callable[[int], Sequence[str]]):
        """Its time to start has come; `words` is as `LocalHosts` takes it."""
        self.index = index
        self.code: int | None = None
        self.last_code = 0
        self.starts_at_s: float | None = time.monotonic()
        self._words = words
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._started_at_s = 0.0

    def start(self) -> None:
        """Start a process, whose output is shown from now on."""
        self._process = subprocess.Popen(
            self._words(self.index),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Signals come from here, once each, whether from the terminal or from a scheduler.
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=_show, args=(self.index, self._process.stdout), daemon=True
        )
        self._reader.start()
        self._started_at_s, self.starts_at_s = time.monotonic(), None

    @property
    def lived_s(self) -> float:
        """Seconds since the last process was started."""
        return time.monotonic() - self._started_at_s

    def poll(self) -> int | None:
        """The exit code of the process, or minus the signal that ended it; None while it runs."""
        assert self._process is not None, "is started"
        code = self._process.poll()
        self.last_code = code or 0
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to its process, if one runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, until_s: float) -> None:
        """Wait for its process, if one runs, and kill it once it is so late by `time.monotonic`."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def show_the_rest(self) -> None:
        """Wait until all is shown that its last process has printed."""
        if self._reader is not None:
            self._reader.join()


class Tries:
    """Says of one host whether it is started again once it has ended, and how soon."""

    def __init__(self) -> None:
        """It has not been started again yet."""
        self._last_s = 0.0
        self._faults = 0

    def pause_s(self, code: int, lived_s: float, *, misses_others: bool) -> float | None:
        """How many seconds later it is started again; None if it is not.

        Args:
            code: by which it has ended, or minus the signal that has ended it.
            lived_s: how long it has lived.
            misses_others: whether another stays away for good: without it the rest may be too few.
        """
        if _as_of_a_shell(code) in FOR_GOOD:
            return None
        if lived_s >= FORGIVEN_S:
            self._faults = 0
        if code > 0 and (misses_others or code != TRY_AGAIN_EXIT_CODE):
            self._faults += 1
            if self._faults > MOST_FAULTS:
                return None
        grown_s = 0.0 if lived_s >= SETTLED_S else min(2 * self._last_s, LONGEST_PAUSE_S)
        self._last_s = max(FIRST_PAUSE_S, grown_s)
        return self._last_s


def _as_of_a_shell(code: int) -> int:
    """An exit code, of a process that a signal has ended as a shell has it."""
    return code if code >= 0 else 128 - code


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"


def _show(host: int, output: IO[str]) -> None:
    for line in output:
        print(f"[host {host}] {line}", end="", flush=True)


def free_port(address: str = "127.0.0.1") -> int:
    """A port on which nobody listens at this address of this machine."""
    while True:
        port = random.choice(PORTS)
        try:
            socket.create_connection((address, port)).close()
        except OSError:
            return port


if __name__ == "__main__":
    sys.exit(main())
