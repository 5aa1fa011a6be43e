"""HTTP server process of a service: port, signals and shutdown."""

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
from typing import Any

import uvicorn
from skippipe_sched.errors import InputError, error_class
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from skippipe_jax import log
from skippipe_jax.connections.addresses import join_address, listen_without_delay
from skippipe_jax.inference.decoding import Generator
from skippipe_jax.serving.app import App
from skippipe_jax.serving.engine import Engines
from skippipe_jax.serving.metrics import Metrics
from skippipe_jax.serving.service import Served

IDLE_S = 15.0
"""Seconds within which a connection must send the complete head of a request."""
MOST_FILES = 1 << 16
"""Most open files, hence connections, where the system allows it."""


def listen(host: str, port: int, keys: tuple[str, ...]) -> socket.socket:
    """Listen on a port; clients that connect before the model is loaded wait.

    Raises:
        InputError: if the port is not available, or other machines could reach it without a key.
        TemporaryError: if another program uses the port.
    """
    if not keys and not _is_loopback(host):
        problem = "is reachable from other machines, and no API key is required"
        raise InputError("--host", host, problem, "Add --api-key-file, or leave out --host")
    if not 0 <= port < 1 << 16:
        raise InputError("--port", port, "must be 0 to 65535", "Write a port such as 8000")
    try:
        return listen_without_delay(host, port, backlog=1024)
    except OSError as error:
        problem = f"listening on {join_address(host, port)} failed ({error})"
        remedy = "Choose a free port of this machine"
        raise error_class(error)("--port", port, problem, remedy) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """HTTP server that answers requests until SIGTERM or Ctrl-C, then finishes the begun ones."""

    def __init__(
        self,
        served: Served,
        engines: Sequence[Generator],
        *,
        most_waiting: int,
        drain_s: float,
        keys: tuple[str, ...] = (),
        hosts: Callable[[], list[dict[str, Any]]] = list,
    ):
        """Prepare to serve a model by engines.

        Args:
            served: what requests must know of the model.
            engines: what decodes their sequences.
            most_waiting: most sequences that may wait for a slot.
            drain_s: seconds within which answers must finish after SIGTERM.
            keys: the API keys; without any, every client that reaches the port is served.
            hosts: returns descriptions of the stage hosts.
        """
        metrics = Metrics(served.name)
        self.engines = Engines(engines, most_waiting, metrics, self._end)
        app = App(served, self.engines, metrics, int(time.time()), keys, hosts)
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
            timeout_graceful_shutdown=max(int(drain_s), 1),
        )
        super().__init__(config)

    def answer(self, listening: socket.socket) -> None:
        """Serve the clients of a socket until shutdown.

        Raises:
            BaseException: the error with which an engine has failed.
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
        """Shut down gracefully on SIGTERM or Ctrl-C, and at once on a second signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        log.info(f"{signal.Signals(number).name}: finishing the answers in progress")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop if installed: a token takes three quarters of asyncio's time with it."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Protocol(H11Protocol):
    """Connection with a time limit for each head of a request, the first one included."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        # The complete head must arrive by the deadline, so received bytes do not extend it.
        waiting = self.timeout_keep_alive_task
        deadline_s = None if waiting is None else waiting.when()
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect(deadline_s)

    def _expect(self, deadline_s: float | None = None) -> None:
        if self.timeout_keep_alive_task is None:
            when_s = self.loop.time() + IDLE_S if deadline_s is None else deadline_s
            self.timeout_keep_alive_task = self.loop.call_at(
                when_s, self.timeout_keep_alive_handler
            )
