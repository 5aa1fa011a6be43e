"""Control thread of a host: an event loop for the connections to the other hosts.

It connects to them, watches them, and ends the process when one is lost: the main thread may be
blocked indefinitely in a collective whose peer is gone.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from skippipe_jax import log
from skippipe_jax.cluster.ending import (
    CODES_OF_PEERS,
    LINGER_S,
    LOST_HOST_EXIT_CODE,
    REASON_CHARACTERS,
    ExitReason,
    exit_at_once,
    exit_on_error,
    log_and_exit,
)
from skippipe_jax.cluster.mailboxes import Mailboxes
from skippipe_jax.cluster.place import Place
from skippipe_jax.cluster.status import status_of
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections import clock
from skippipe_jax.connections.failure_detector import BEATS
from skippipe_jax.connections.hello import NUMBER_BITS, Hello
from skippipe_jax.connections.join_server import JoinServer
from skippipe_jax.connections.links import MESSAGE_CHARACTERS
from skippipe_jax.connections.mesh import ConnectionSetup, Mesh
from skippipe_jax.connections.status import RunStatus, TrainingStatus
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.consensus.control import Control, Store
from skippipe_jax.consensus.generations import Decision, State
from skippipe_jax.errors import PeerTimeout

T = TypeVar("T")

ANSWERS_S = 10.0
"""Seconds that the event loop may take for a call from another thread, beyond its own waiting."""


class ControlLoop:
    """Connections of one host to the others, and its reactions to their messages.

    Attributes:
        name: name of this host in messages.
        process: random number that identifies this process.
        is_outside: whether the run continues without this host, which it has lost.
        control: this host's part in the consensus of an elastic run; None otherwise.
        training: training status for observers; None before training.
        last_words, join_server: see `Membership`.
    """

    def __init__(self, config: ClusterConfig, index: int, count: int, board: Mailboxes):
        """Prepare without connecting; values from other hosts go to `board`."""
        self.name = f"host {index} (pid {os.getpid()} on {socket.gethostname()})"
        self.process = secrets.randbits(NUMBER_BITS)
        self.is_outside = False
        self.last_words: Callable[[], str] = str
        self.training: TrainingStatus | None = None
        self.join_server = JoinServer(self._status)
        self._config, self._index, self._count, self._board = config, index, count, board
        # The rest exists only with several hosts, and belongs to the event loop's thread.
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._meeting: ConnectionSetup | None = None
        self._verdict: asyncio.Future[ExitReason]
        self._is_failing = self._was_stopped = False
        self._last_beat_s = math.inf
        self.control: Control | None = None

    # Any thread may call these.

    @property
    def address(self) -> str:
        """IP address at which the others reach this host, and on which it listens."""
        return "127.0.0.1" if self._meeting is None else self._meeting.address

    @property
    def control_address(self) -> str:
        """Address at which this host listens for the others."""
        return self._mesh.directory.hello.address

    def address_of(self, host: int) -> str | None:
        """Return the address at which a host listens for the others; None if unknown."""
        return self._mesh.directory.addresses.get(host)

    @property
    def missed(self) -> frozenset[int]:
        """Hosts that are gone or silent, or whose processes are waiting to join."""
        waiting = () if self.control is None else self.control.waiting
        return self._mesh.missed.union(waiting)

    def broadcast(self, *message: Any) -> None:
        """Send a message to all other hosts."""
        self._loop.call_soon_threadsafe(self._mesh.broadcast, *message)

    def send(self, host: int, *message: Any) -> None:
        """Send a message to another host, as `Mesh.send` does."""
        self._loop.call_soon_threadsafe(self._mesh.send, host, *message)

    def begin_control(self, state: State, follow: Callable[[Decision], None], store: Store) -> None:
        """Start the consensus: from now on the run is elastic."""
        self._done(self._begin_control(state, follow, store))

    def part(self, patience_s: float) -> None:
        """Send a farewell; end the thread when the others have left too, or after `patience_s`."""
        self._done(self._mesh.part(patience_s), patience_s)
        self._loop.call_soon_threadsafe(self._verdict.cancel)
        self._thread.join(ANSWERS_S)

    def tell_failure(self, what: str, code: int) -> None:
        """Send the others the reason why this host ends, and the exit code for them."""
        with suppress(PeerTimeout):
            self._done(self._tell_failure(f"{self.name} {what}", code))

    def end(self, reason: str) -> NoReturn:
        """End the process for a reason found by this host."""
        ending = self._end(ExitReason(f"{self.name}: {reason}"))
        if self._count == 1:
            asyncio.run(ending)
        with suppress(PeerTimeout):
            self._done(ending)
        exit_at_once(LOST_HOST_EXIT_CODE)

    def _done(self, coroutine: Coroutine[Any, Any, T], patience_s: float = 0.0) -> T:
        """Run a coroutine on the event loop and return its result.

        Raises:
            PeerTimeout: if there is no result within `patience_s` + `ANSWERS_S`, as the loop hangs
                or has ended.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(patience_s + ANSWERS_S)
        except FutureTimeout as late:
            if future.done():
                raise
            future.cancel()
            problem = f"has not answered for {patience_s + ANSWERS_S:g} s"
            raise PeerTimeout(f"the control thread of this host {problem}") from late

    def enter(self, place: Place, sockets: str | None, last_addresses: Sequence[str] = ()) -> None:
        """Connect to the other hosts and watch them from now on; return when all are connected.

        With `last_addresses`, connect to the hosts that still listen there, if any.
        """
        log.configure()
        entered: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._attend(place, sockets, last_addresses, entered)),
            name="skippipe-cluster",
            daemon=True,
        )
        self._thread.start()
        entered.result()

    async def _attend(
        self, place: Place, sockets: str | None, last_addresses: Sequence[str], begun: Future[None]
    ) -> None:
        """Run the event loop: connect to the others, then watch them until the end."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._end_by_fault)
        self._verdict = self._loop.create_future()
        new_mesh = partial(self._new_mesh, place, sockets)
        self._meeting = ConnectionSetup(self._config, place.coordinator, place.keys, new_mesh)
        try:
            if last_addresses:
                self.is_outside = await self._meeting.with_remaining(last_addresses)
                if not self.is_outside:
                    self._mesh.close()
                    return begun.set_result(None)
            else:
                await self._meeting.with_all(sockets and f"{sockets}/relay")
        except Exception as error:
            self._mesh.close()
            return begun.set_exception(error)
        begun.set_result(None)
        try:
            watches = [self._verdict, asyncio.create_task(self._beat())]
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if not self._verdict.cancelled():
                await self._end(self._verdict.result())
        except Exception as error:
            # Without the watch this host would hang when the next host is lost.
            exit_on_error(error, self.name, self.last_words)
        finally:
            self._mesh.close()  # New connections would go unanswered while the loop ends.

    @property
    def _mesh(self) -> Mesh:
        assert self._meeting is not None, "has others"
        return self._meeting.mesh

    def _new_mesh(self, place: Place, sockets: str | None) -> Mesh:
        return Mesh(
            Hello(
                self._index, place.count, self.process, self.name, "", place.run, spare=place.spare
            ),
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
            connect_timeout_s=self._config.connect_timeout_s,
            received=self._received,
            lost=self._report_lost,
            found=self._report_found,
            goes_on_without=self._goes_on_without,
            join_server=self.join_server,
            service=f"{sockets}/service" if sockets and place.index == 0 else None,
            keys=place.keys,
        )

    def _status(self) -> RunStatus:
        mesh, control = self._mesh, self.control
        state = None if control is None else control.state
        return status_of(mesh.directory, mesh.connected, mesh.left, state, self.training)

    def _received(self, source: int, message: list[Any]) -> bool:
        """Handle a message of another host; return whether it is valid."""
        match message:
            case ["put", str(key), str(value)] if len(key) + len(value) <= MESSAGE_CHARACTERS:
                self._board.post(source, key, value)
            case ["clock", float(sent)] if math.isfinite(sent):
                self._mesh.send(source, "clock", sent, time.time())
            case ["clock", float(sent), float(theirs)] if math.isfinite(sent + theirs):
                self._board.post(source, clock.key(source), clock.answered(sent, theirs))
            case ["verdict", int(culprit), str(text), int(code)] if code in CODES_OF_PEERS:
                return self._receive_verdict(source, culprit, text[:REASON_CHARACTERS], code)
            case ["control", list(given)]:
                return self.control is None or self.control.received(source, given)
            case _:
                return False
        return True

    def _receive_verdict(self, source: int, culprit: int, text: str, code: int) -> bool:
        is_lost, control = code == LOST_HOST_EXIT_CODE, self.control
        is_a_host = 0 <= culprit < self._mesh.directory.hello.places
        if control is not None and (is_lost or control.goes_on_without(source)):
            # The end of its process will be detected.
            log.info(f"{text.removesuffix('.')}; remaining hosts continue")
        elif is_a_host:
            self._judge(culprit, text, code)
        return is_a_host

    def _report_lost(self, host: int, how: str) -> None:
        if self.control is not None:
            self.control.is_missed(host)
        elif not self._mesh.directory.outlives:
            # A suspended host may find the others gone before it reads their verdict.
            culprit = self._index if self._was_stopped or self._was_suspended() else host
            self._judge(culprit, f"{self._mesh.directory.names[culprit]} failed: {how}")

    def _report_found(self, host: int) -> None:
        if self.control is not None:
            self.control.is_there(host)

    def _goes_on_without(self, host: int) -> bool:
        return self.control is not None and self.control.goes_on_without(host)

    def _judge(self, culprit: int, text: str, code: int = LOST_HOST_EXIT_CODE) -> None:
        """End because of a host with this verdict and broadcast it, unless one exists already."""
        if self._verdict.done() or self._is_failing:
            return
        self._mesh.broadcast("verdict", culprit, text, code)
        if culprit == self._index:
            why = "suspended or disconnected for over cluster.heartbeat_timeout_s"
            text = f"{text}; this host was declared failed: {why}"
        self._verdict.set_result(ExitReason(text, code))

    async def _beat(self) -> None:
        """Send heartbeats, and detect hosts that were silent for too long."""
        timeout_s = self._config.heartbeat_timeout_s
        while True:
            self._last_beat_s = self._loop.time()
            await asyncio.sleep(timeout_s / BEATS)
            self._was_stopped |= self._was_suspended()
            if self._board.generation > 0:
                self._mesh.directory.is_outside = False  # It is in a generation (again).
            self._mesh.beat()

    def _was_suspended(self) -> bool:
        return self._loop.time() - self._last_beat_s > self._config.heartbeat_timeout_s

    async def _tell_failure(self, reason: str, code: int) -> None:
        self._is_failing = True
        self._mesh.broadcast("verdict", self._index, reason, code)
        await self._mesh.drained(LINGER_S)

    async def _begin_control(
        self, state: State, follow: Callable[[Decision], None], store: Store
    ) -> None:
        self._mesh.directory.outlives = True
        self.control = Control(state, self._mesh.send, follow, store, DaemonThreads())
        for host in self._mesh.missed:
            self.control.is_missed(host)

    async def _end(self, verdict: ExitReason) -> NoReturn:
        mesh = self._mesh if self._count > 1 else None
        await log_and_exit(verdict, self.name, self.last_words, mesh and mesh.drained)

    def _end_by_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the process upon an unexpected error, after which no host would be watched."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            return log.info(f"{context['message']}: {error!r}")
        exit_on_error(error, self.name, self.last_words)
