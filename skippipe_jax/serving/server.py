"""The process of a service: its port, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from skippipe_sched.errors import InputError
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skippipe_jax import log
from skippipe_jax.connections.addresses import join_address, listen_without_delay
from skippipe_jax.serving.app import App
from skippipe_jax.serving.engine import Engine, Engines
from skippipe_jax.serving.metrics import Metrics
from skippipe_jax.serving.service import Served

IDLE_S = 15.0
"""How long a connection may send nothing, or no whole head of a request."""
MOST_HEAD_BYTES = 1 << 16
"""Of a request; a connection on which a longer one comes is closed."""
MOST_FILES = 1 << 16
"""As many connections may be open, where the system allows it."""


@dataclass(frozen=True)
class Conduct:
    """How a service treats its clients.

    Attributes:
        most_waiting: how many sequences may wait for a slot.
        drain_s: how long answers may go on after SIGTERM, in seconds.
        keys: the API keys; with none, whoever reaches the port is served.
    """

    most_waiting: int = 256
    drain_s: float = 30.0
    keys: tuple[str, ...] = ()


def listen(host: str, port: int, keys: tuple[str, ...]) -> socket.socket:
    """Take a port; clients that come before the model is there wait.

    Raises:
        InputError: if it cannot be had, or others than this machine would reach it without a key.
    """
    if not keys and not _is_loopback(host):
        problem = "is reached from other machines, and whoever reaches it is served"
        raise InputError("--host", host, problem, "Give --api-key-file, or leave it out")
    if not 0 <= port < 1 << 16:
        raise InputError("--port", port, "is no port", "Write one such as 8000")
    try:
        return listen_without_delay(host, port, backlog=1024)
    except OSError as error:
        problem = f"{join_address(host, port)} cannot be listened on ({error})"
        raise InputError("--port", port, problem, "Choose a free port of this machine") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """Answers requests by engines until SIGTERM or Ctrl-C, then finishes those under way."""

    def __init__(
        self,
        served: Served,
        engines: Sequence[Engine],
        conduct: Conduct,
        hosts: Callable[[], list[dict[str, Any]]] = list,
    ):
        """Prepare to serve a model by engines; `hosts` describes those that hold its stages."""
        metrics = Metrics(served.name)
        self.engines = Engines(engines, conduct.most_waiting, metrics, self._end)
        app = App(served, self.engines, metrics, int(time.time()), conduct.keys, hosts)
        self._app = app.starlette()
        config = uvicorn.Config(
            self._until_end,
            interface="asgi3",
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=max(int(conduct.drain_s), 1),
        )
        super().__init__(config)

    def answer(self, listening: socket.socket) -> None:
        """Serve the clients of a socket until the end.

        Raises:
            BaseException: that by which an engine has failed.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve(sockets=[listening]))
        if self.engines.error is not None:
            raise self.engines.error

    async def _until_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
            log.warning(
                f"an answer was not finished within {self.config.timeout_graceful_shutdown} s"
            )

    def _end(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C begin the end, which is then no failure; a second ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._signalled)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _: object) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        log.info(f"{signal.Signals(number).name}: answers that have begun are finished")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop, where it is there: a token takes three quarters of asyncio's time by it."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Protocol(HttpToolsProtocol):
    """A connection, which is closed when nothing comes by it, from its beginning on."""

    _head_bytes = 0
    _reads_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        # The head of a request has to come as a whole by then, however slowly.
        waiting = self.timeout_keep_alive_task
        deadline_s = None if waiting is None else waiting.when()
        self._head_bytes += 0 if self._reads_body else len(data)
        super().data_received(data)
        # The parser keeps as much of a head as comes.
        if not self._reads_body and self._head_bytes > MOST_HEAD_BYTES:
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            self._expect(deadline_s)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._reads_body, self._head_bytes = True, 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_body = False

    def _expect(self, deadline_s: float | None = None) -> None:
        if self.timeout_keep_alive_task is None:
            when_s = self.loop.time() + IDLE_S if deadline_s is None else deadline_s
            self.timeout_keep_alive_task = self.loop.call_at(
                when_s, self.timeout_keep_alive_handler
            )
