"""Programs that a test starts as processes of their own, and that end when the test does.

They are forked from a process that has imported the project, or started for real where a test says
so: see `tests.harness.fork_server`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.harness.fork_server import Forked, fork, fork_server
from tests.harness.ports import free_port


class Processes:
    """Programs in the order in which they were started; what each prints goes into a file.

    They are forked, or started `really`.
    """

    def __init__(self, folder: Path, really: bool = False):
        self.folder = folder
        self.really = really
        self.processes: list[subprocess.Popen[bytes] | Forked] = []

    def start(
        self,
        *command: str | Path,
        folder: str | Path | None = None,
        namespace: str | None = None,
        **environment: str,
    ) -> None:
        """Have Python run these arguments, in a session of its own, here or in a `folder`.

        With a network `namespace` the process is in that, and is always forked.
        """
        variables = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
        with (
            open(self.folder / f"output{len(self.processes)}", "wb") as output,
            open(os.devnull, "rb") as nothing,
        ):
            if self.really and namespace is None:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    cwd=folder,
                    stdin=nothing,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    start_new_session=True,
                )
            else:
                process = fork(
                    fork_server().address,
                    command,
                    environment=variables,
                    folder=str(folder or os.getcwd()),
                    streams=[nothing.fileno(), output.fileno(), output.fileno()],
                    namespace=namespace,
                )
            self.processes.append(process)

    def start_hosts(
        self,
        hosts: int,
        *command: str | Path,
        last: Sequence[str] = (),
        coordinator: str | None = None,
        namespaces: Sequence[str] | None = None,
        **environment: str,
    ) -> None:
        """Start a program once for each host; the last gets arguments of its own."""
        address = coordinator or f"127.0.0.1:{free_port()}"
        common = (*command, "--coordinator", address, "--hosts", str(hosts))
        for host in range(hosts):
            own = ("--host-id", str(host), *(last if host == hosts - 1 else ()))
            namespace = None if namespaces is None else namespaces[host]
            self.start(*common, *own, namespace=namespace, **environment)

    def output(self, index: int) -> str:
        return (self.folder / f"output{index}").read_text(errors="replace")

    def outputs(self) -> str:
        return "\n".join(
            f"== {index} ==\n{self.output(index)}" for index in range(len(self.processes))
        )

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float, *, all_live: bool = True
    ) -> None:
        """Wait until something is so; until then no process may end, if `all_live`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if all_live:
                assert all(process.poll() is None for process in self.processes), self.outputs()
            if time.monotonic() > deadline:
                self.abort()
                pytest.fail(self.outputs())
            time.sleep(0.02)

    def exit_code(self, index: int, timeout_s: float) -> int:
        try:
            return self.processes[index].wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.abort()
            pytest.fail(f"process {index} did not end in {timeout_s:g} s:\n{self.outputs()}")

    def exit_codes(self, timeout_s: float) -> list[int]:
        """The exit codes of all, once they have ended, which may take `timeout_s` together."""
        deadline = time.monotonic() + timeout_s
        return [
            self.exit_code(index, max(0.0, deadline - time.monotonic()))
            for index in range(len(self.processes))
        ]

    def name(self, host: int) -> str:
        """What others call a host, if it was started as the process with its number."""
        return name_of_host(host, self.processes[host].pid)

    def abort(self) -> None:
        """End all that still run, each of which writes the stacks of its threads."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGABRT)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)

    def kill(self) -> None:
        """End all that still run, and what they have started."""
        for process in self.processes:
            if process.poll() is None:
                # It may end at any moment, as may what it has started.
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            child.kill()
            process.kill()
            process.wait()


@contextlib.contextmanager
def started_processes(folder: Path, really: bool = False) -> Iterator[Processes]:
    """Processes that end with a block; `folder` is made for their output."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = Processes(folder, really)
    try:
        yield processes
    finally:
        processes.kill()


def name_of_host(host: int, process: int) -> str:
    return f"host {host} (pid {process} on {socket.gethostname()})"
