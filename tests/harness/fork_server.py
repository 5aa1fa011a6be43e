"""Python with the program imported already: what a test would start is forked from it.

To start Python and to import JAX takes seconds of a processor, and tests do so hundreds of times. A
child of the fork server gets arguments, environment, folder and streams, a session of its own, and
a network namespace if one is named. It goes on as `python ARGUMENTS` would: its module is
`__main__`, and the interpreter ends as ever.

Two things differ. What JAX reads of the environment when it is imported has been read, so that such
variables must be the server's. And a module that lacks an import finds it made; so every kind of
program is started for real somewhere, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import shutil
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

ROOT = Path(__file__).parents[2]
PACKAGES = ("skippipe_sched", "skippipe_jax")
# Whose programs are forked.
OWN = (*PACKAGES, "experiments")
# Not imported by a module of the packages before it is needed.
LIBRARIES = ("jax.experimental.transfer",)
# From Linux's sched.h and mount.h: what `setns`, `unshare` and `mount` are asked for.
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
# Read when JAX is imported, which the server has done; but of one of them JAX can be told later.
READ_ONCE = "JAX_"
TOLD_LATER = "JAX_DISABLE_MOST_OPTIMIZATIONS"
NAMESPACES = Path("/run/netns")
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
            with contextlib.suppress(ProcessLookupError):  # It ended a moment ago.
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


class Refused(Exception):
    """A process cannot be forked, but has to be started for real."""


class ForkServer:
    """The server of this process; it ends with it, whichever way that comes.

    `programs` is a folder with a `python` that forks commands of this project, and `skippipe`.
    """

    def __init__(self) -> None:
        self.programs = Path(tempfile.mkdtemp(prefix="fork_server_"))
        self.address = str(self.programs / "socket")
        for name, first in (("python", []), ("skippipe", ["-m", "skippipe_jax"])):
            self._put_program(name, first)
        # Its standard input closes with this process.
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.fork_server", self.address],
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

    def _put_program(self, name: str, first: list[str]) -> None:
        program = self.programs / name
        program.write_text(
            f"#!{sys.executable} -IS\n"
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:1] = {first!r}\n"
            f"from tests.harness.fork_server import stand_in\n"
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
    namespace: str | None = None,
) -> Forked:
    """Have the server at `address` fork `python ARGUMENTS`, with these three streams.

    With a `namespace` it runs as `ip netns exec NAMESPACE` would have it run.

    Raises:
        Refused: the environment has other variables that JAX reads when it is imported.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = [list(map(str, arguments)), dict(environment), folder, namespace]
    body = json.dumps(request).encode()
    socket.send_fds(connection, [LENGTH.pack(len(body))], list(streams))
    connection.sendall(body)
    answer = _line(connection)
    if not answer.isdigit():
        raise Refused(answer)
    return Forked(connection, int(answer))


def stand_in(address: str, python: str) -> None:
    """Be the Python that a `ForkServer` has among its programs; does not return."""
    arguments = sys.argv[1:]
    own = arguments[:1] == ["-m"] and arguments[1].split(".")[0] in OWN
    process = None
    if own:
        with contextlib.suppress(Refused):
            process = fork(
                address,
                arguments,
                environment=os.environ,
                folder=os.getcwd(),
                namespace=own_namespace(),
            )
    if process is None:
        os.execv(python, [python, *arguments])

    def forward(number: int, _: object) -> None:
        # Nothing is asked of the connection, on which this process waits.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    code = process.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def own_namespace() -> str | None:
    """The name of this process's network namespace; None if it has none, as the machine's own."""
    own = os.stat("/proc/self/ns/net")
    for name in NAMESPACES.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            if os.path.samestat(own, name.stat()):
                return name.name
    return None


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
    namespace: str | None
    streams: list[int]


def main() -> None:
    """Serve; in each child, run what it was forked for."""
    import_all()
    address = sys.argv[1]
    request = serve(address)
    if request is not None:
        # So that the processes which it starts are forked, too.
        sys.executable = os.path.join(os.path.dirname(address), "python")
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
    # The file appears under its name when it can be connected to.
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    events = selectors.PollSelector()
    for source in (0, waking, listener):
        events.register(source, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in events.select():
            if key.fileobj == 0:
                shutil.rmtree(os.path.dirname(address))
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
    arguments, environment, folder, namespace = json.loads(body)
    return Request(arguments, environment, folder, namespace, streams)


def _refusal(request: Request, once: Mapping[str, str]) -> str | None:
    found = {k: v for k, v in request.environment.items() if k.startswith(READ_ONCE)}
    differing = sorted({key for key, _ in found.items() ^ once.items()} - {TOLD_LATER})
    if differing:
        return f"{', '.join(differing)}: read when JAX is imported, so start a process for real"
    return None


def take_over(request: Request) -> None:
    """Be the process that was asked for, in all but its program."""
    import jax

    os.setsid()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    if request.namespace is not None:
        enter(request.namespace)
    os.chdir(request.folder)
    for name in os.environ.keys() - request.environment.keys():
        del os.environ[name]
    os.environ.update(request.environment)
    jax.config.update(TOLD_LATER.lower(), os.environ.get(TOLD_LATER, "0") == "1")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def enter(namespace: str) -> None:
    """Go into a network namespace, and see its file of hosts, if it has one, as the system's."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), function, namespace)

    with open(NAMESPACES / namespace, "rb") as entry:
        call("setns", entry.fileno(), CLONE_NEWNET)
    hosts = f"/etc/netns/{namespace}/hosts"
    if os.path.exists(hosts):
        call("unshare", CLONE_NEWNS)
        call("mount", b"", b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None)
        call("mount", hosts.encode(), b"/etc/hosts", None, ctypes.c_ulong(MS_BIND), None)


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
