"""Python with the program imported already: what a test would start is forked from it.

To start Python and to import JAX takes seconds of a processor, and tests do so hundreds of times. A
child of the fork server gets arguments, environment, folder and streams, and a session of its own.
It goes on as `python ARGUMENTS` would: its module is `__main__`, and the interpreter ends as ever.

Two things differ. What JAX reads of the environment when it is imported has been read, so that such
variables must be the server's. And a module that lacks an import finds it made; so every kind of
program is started for real somewhere, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("skippipe_sched", "skippipe_jax")
# Not imported by a module of the packages before it is needed.
LIBRARIES = ("jax.experimental.transfer",)
# Read when JAX is imported, which the server has done.
READ_ONCE = "JAX_"
LENGTH = struct.Struct("!I")
START_S = 120.0


# Where tests are.


class Forked:
    """A process of the fork server, with what tests use of a `subprocess.Popen`.

    It is killed when this object goes away.
    """

    def __init__(self, connection: socket.socket, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended the process; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns what `poll` does.

        Raises:
            subprocess.TimeoutExpired: if it does not come in so many seconds.
        """
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self.returncode = int(_line(self._connection))
                self._connection.close()
        return self.returncode


class ForkServer:
    """The server of this process; it ends with it, whichever way that comes."""

    def __init__(self) -> None:
        self.address = os.path.join(tempfile.mkdtemp(prefix="fork_server_"), "socket")
        # Its standard input closes with this process.
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", self.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not os.path.exists(self.address):
            assert self._server.poll() is None, "the fork server has ended"
            assert time.monotonic() < deadline, "the fork server does not come up"
            time.sleep(0.01)

    def close(self) -> None:
        """End the server, and with it all that it has forked."""
        self._server.communicate()

    def put_python(self, folder: Path) -> None:
        """Put a program `python` into `folder` whose commands of this project are forked."""
        program = folder / "python"
        program.write_text(
            f"#!{sys.executable} -IS\n"
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.fork_server import stand_in\n"
            f"stand_in({self.address!r}, {sys.executable!r})\n"
        )
        program.chmod(0o755)


@functools.cache
def fork_server() -> ForkServer:
    """The one server of this process, which is started when it is first asked for."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def fork(
    address: str,
    arguments: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    folder: str,
    streams: Sequence[int] = (0, 1, 2),
) -> Forked:
    """Have the server at `address` fork `python ARGUMENTS`, with these three streams.

    Raises:
        RuntimeError: if it refuses, and why.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = [list(map(str, arguments)), dict(environment), folder]
    body = json.dumps(request).encode()
    socket.send_fds(connection, [LENGTH.pack(len(body))], list(streams))
    connection.sendall(body)
    answer = _line(connection)
    if not answer.isdigit():
        raise RuntimeError(answer)
    return Forked(connection, int(answer))


def stand_in(address: str, python: str) -> None:
    """Be the Python that `ForkServer.put_python` has put into a folder; does not return."""
    arguments = sys.argv[1:]
    own = arguments[:1] == ["-m"] and arguments[1].split(".")[0] in PACKAGES
    if not own:
        os.execv(python, [python, *arguments])
    process = fork(address, arguments, environment=os.environ, folder=os.getcwd())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _line(connection: socket.socket) -> str:
    """The next line that the server writes."""
    text = b""
    while not text.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the fork server has ended")
        text += byte
    return text.decode().rstrip("\n")


# Where the program is imported.


class Request(NamedTuple):
    """What a child is to be; `streams` are its standard input, output and error."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


def main() -> None:
    """Serve; in each child, run what it was forked for."""
    import_all()
    request = serve(sys.argv[1])
    if request is not None:
        take_over(request)
        run(request.arguments)


def import_all() -> None:
    """Import the program, and let no child look through what belongs to it for garbage."""
    for name in (*modules_of(PACKAGES), *LIBRARIES):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def modules_of(packages: Sequence[str]) -> Iterator[str]:
    """All modules of packages but those that are programs."""
    for package in packages:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            if not module.name.endswith(".__main__"):
                yield module.name


def serve(address: str) -> Request | None:
    """Fork a child for every request; returns in the child what it is to be.

    In the server itself it returns None, once the standard input has closed.
    """
    once = {key: value for key, value in os.environ.items() if key.startswith(READ_ONCE)}
    waking, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    events = selectors.PollSelector()
    for source in (0, waking, listener):
        events.register(source, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in events.select():
            if key.fileobj == 0:
                os.unlink(address)
                os.rmdir(os.path.dirname(address))
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return None
            if key.fileobj == waking:
                os.read(waking, 1024)
                for pid, code in _ended_children(running):
                    connection = running.pop(pid)
                    events.unregister(connection)
                    with contextlib.suppress(BrokenPipeError), connection:
                        connection.sendall(b"%d\n" % code)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request = _received(connection)
                refused = _refusal(request, once)
                if refused is not None:
                    connection.sendall(f"{refused}\n".encode())
                    connection.close()
                elif pid := os.fork():
                    running[pid] = connection
                    events.register(connection, selectors.EVENT_READ, pid)
                    connection.sendall(b"%d\n" % pid)
                else:
                    signal.set_wakeup_fd(-1)
                    for each in (listener, connection, *running.values()):
                        each.close()
                    for pipe in (waking, wakes):
                        os.close(pipe)
                    return request
                for stream in request.streams:
                    os.close(stream)
            elif key.data in running:
                # Nobody waits for it any more.
                os.kill(key.data, signal.SIGKILL)


def _ended_children(running: Mapping[int, object]) -> list[tuple[int, int]]:
    """Those children that have ended, and their exit codes."""
    waited = [os.waitpid(pid, os.WNOHANG) for pid in running]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in waited if pid]


def _received(connection: socket.socket) -> Request:
    header, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    (length,) = LENGTH.unpack(header)
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    arguments, environment, folder = json.loads(body)
    return Request(arguments, environment, folder, streams)


def _refusal(request: Request, once: Mapping[str, str]) -> str | None:
    found = {k: v for k, v in request.environment.items() if k.startswith(READ_ONCE)}
    differing = sorted(key for key, _ in found.items() ^ once.items())
    if differing:
        return f"{', '.join(differing)}: read when JAX is imported, so start a process for real"
    return None


def take_over(request: Request) -> None:
    """Be the process that was asked for, in all but its program."""
    os.setsid()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    for name in os.environ.keys() - request.environment.keys():
        del os.environ[name]
    os.environ.update(request.environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(arguments: list[str]) -> None:
    """Run `-m MODULE ...`, `-c COMMAND ...` or `FILE ...` as the interpreter does."""
    kind, *others = arguments
    if kind == "-m":
        name, *words = others
        sys.path[0] = os.getcwd()
        sys.argv = [name, *words]
        # It becomes another module: as such it was not imported yet.
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
