"""Start all hosts of a run as processes of this machine.

python -m skippipe_jax.launch --config FILE --hosts N
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from skippipe_sched import fields

from skippipe_jax.arguments import add_config_arguments, run_module

POLL_S = 0.1

# Not from the ports that Linux gives to outgoing connections: a host that knocks before host 0
# listens could be given the very port that it knocks at, and would be connected with itself.
PORTS = range(61440, 65536)


def main() -> int:
    """Parse the command line, run all hosts; returns 0, or the code of the first that failed."""
    return run_module("skippipe_jax.launch", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Start N processes of python -m skippipe_jax.train on this machine, one for each host of a "
        "run, and show what they print. When one fails, all are stopped."
    )
    add_config_arguments(parser)
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="how many hosts")
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
    from skippipe_jax.cluster.addresses import chosen_address, join_address
    from skippipe_jax.config import load_config

    hosts = fields.integer(arguments.hosts, "--hosts", 1)
    fields.number(arguments.grace, "--grace", 0.0)
    # What is wrong here is said once; every host would say it.
    config = load_config(arguments.config, arguments.set)
    address = chosen_address(config.cluster.bind_address) or "127.0.0.1"
    coordinator = join_address(address, free_port(address))
    command = [sys.executable, "-m", "skippipe_jax.train", "--config", str(arguments.config)]
    command += [word for override in arguments.set for word in ("--set", override)]
    command += ["--resume"] * arguments.resume
    command += ["--coordinator", coordinator, "--hosts", str(hosts)]
    processes: list[subprocess.Popen[str]] = []

    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    for host in range(hosts):
        process = subprocess.Popen(
            [*command, "--host-id", str(host)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Signals come from here, once each, whether from the terminal or from a scheduler.
            start_new_session=True,
        )
        processes.append(process)
    readers = [
        threading.Thread(target=_show, args=(host, process.stdout), daemon=True)
        for host, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    code = _wait(processes, arguments.grace)
    for reader in readers:
        reader.join()
    return code


def _wait(processes: list[subprocess.Popen[str]], grace_s: float) -> int:
    """Wait for all; once one has failed, the others are killed after `grace_s` seconds.

    Returns 0, or the code of the first that failed: 128 and the number of a signal that ended it.
    """
    failed_at: float | None = None
    first_code = 0
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed and failed_at is None:
            failed_at, first_code = time.monotonic(), failed[0]
        if None not in codes:
            return first_code if first_code >= 0 else 128 - first_code
        if failed_at is not None and time.monotonic() - failed_at > grace_s:
            for process in processes:
                process.kill()
        time.sleep(POLL_S)


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
