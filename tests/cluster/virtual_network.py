"""Processes on one event loop, whose clock, network and storage are simulated.

The loop carries out the production code of the control plane. Its time goes on to the next timer
at once, its connections are pipes that a seed delays, cuts and breaks as TCP would, and all that a
process does can stop for a while or for good. One seed gives one course of events.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import heapq
import random
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any

from skippipe_sched.errors import TemporaryError

OWN: contextvars.ContextVar[Process] = contextvars.ContextVar("own")
"""The process whose code runs; none for that of the simulation itself."""

NO_PROCESS = contextvars.Context()

SLOWEST_S, TYPICAL_S = 0.5, 0.05
BUFFER_BYTES = 1 << 18
"""Bytes that the kernels of both ends hold of what a process has written."""


class Process:
    """A process of a host: what it does waits while it is stopped, and is dropped once it ended."""

    def __init__(self, loop: VirtualLoop, host: int):
        """Begin to live."""
        self.host, self.is_stopped, self.has_ended = host, False, False
        self._loop, self._waiting = loop, deque[asyncio.Handle]()
        self.context = contextvars.copy_context()
        self.context.run(OWN.set, self)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a part of the process; an error of it fails the simulation."""
        task = self._loop.create_task(coroutine, context=self.context.copy())
        self._loop.parts.append(task)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function as a part of the process, soon."""
        if not self._loop.is_closed():
            self._loop.call_soon(function, *args, context=self.context.copy())

    def wait(self, handle: asyncio.Handle) -> None:
        """Do something later that came up while the process is stopped."""
        self._waiting.append(handle)

    def stop(self) -> None:
        """Do nothing until `go_on`."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Do all that has come up, in its order, soon."""
        self.is_stopped = False
        self._loop.call_soon(self._catch_up, context=contextvars.Context())

    def _catch_up(self) -> None:
        while self._waiting and not self.is_stopped:
            handle = self._waiting.popleft()
            if not handle.cancelled():
                handle._run()

    def end(self) -> None:
        """End at once; its connections end as the kernel ends them."""
        if not self.has_ended:
            self.has_ended = True
            self._waiting.clear()
            self._loop.network.end(self)


class _Handle(asyncio.Handle):
    """Something to do: later if its process is stopped by then, and never if that has ended."""

    __slots__ = ("_own",)

    def __init__(
        self,
        loop: VirtualLoop,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ):
        """Note what is to be done, without the checks of the base class."""
        self._loop, self._callback, self._args = loop, callback, args
        self._context = contextvars.copy_context() if context is None else context
        self._own = self._context.get(OWN)
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def _run(self) -> None:
        own = self._own
        if own is not None and (own.has_ended or own.is_stopped) and not self._loop.is_finishing:
            return None if own.has_ended else own.wait(self)
        super()._run()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock and connections are simulated.

    Attributes:
        network: its connections.
        parts: the tasks of processes, in whose errors the simulation ends.
    """

    def __init__(self, seed: int):
        """Begin at 0 seconds."""
        super().__init__()
        self._now_s = 0.0
        self._soon, self._timers = deque[_Handle](), list[tuple[float, int, _Handle]]()
        self._count = 0
        self.network = Network(self, random.Random(seed))
        self.parts: list[asyncio.Task[Any]] = []
        self.errors: list[BaseException] = []
        self.is_finishing = False
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        """Return the simulated seconds."""
        return self._now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """Call back, unless the process is stopped or has ended by then."""
        handle = _Handle(self, callback, args, context)
        self._soon.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """As `call_soon`: there are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        """As `call_soon`, later."""
        handle = _Handle(self, callback, args, context)
        self._count += 1  # Timers of one time come in their order.
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _run_once(self) -> None:
        """Do what is due, as the base class does it, but wait for nothing else."""
        soon, timers = self._soon, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not soon:
            assert timers, "nothing will ever happen again"
            self._now_s = max(self._now_s, timers[0][0])
        # By the clock no timer comes early: what was sent for then would not be there yet.
        while timers and timers[0][0] <= self._now_s:
            soon.append(heapq.heappop(timers)[2])
        for _ in range(len(soon)):
            handle = soon.popleft()
            if not handle.cancelled():
                handle._run()

    def finish(self) -> None:
        """End all that is left, and close."""
        self.is_finishing = True
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run_until_complete(asyncio.sleep(1.0))
        for task in asyncio.all_tasks(self):  # What would go on with them was dropped.
            task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
            task.get_coro().close()
        self.close()

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        """Addresses are given as numbers."""
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, factory: Any, host: str, port: int, **_: Any
    ) -> Any:
        """Connect the process whose code runs."""
        return await self.network.connect(OWN.get(), factory, (host, port))

    async def create_server(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, factory: Any, host: Any = None, port: Any = None, **given: Any
    ) -> Any:
        """Listen, on behalf of the process whose code runs."""
        return self.network.listen(OWN.get(), factory, given["sock"].getsockname())

    def _note_error(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # Those of processes that have ended are destroyed while they wait.
        if error is not None and not isinstance(error, OSError) and not self.is_finishing:
            self.errors.append(error)


class FakeSocket:
    """What production code asks of a socket: where it is, and when silence ends it."""

    def __init__(self, address: tuple[str, int]):
        """Be at an address."""
        self.address, self.patience_s = address, float("inf")

    def getsockname(self) -> tuple[str, int]:
        """Return the address."""
        return self.address

    def setsockopt(self, _: int, option: int, value: int) -> None:
        """Set an option, of which one counts here."""
        if option == socket.TCP_USER_TIMEOUT:
            self.patience_s = value / 1000


class Listening:
    """A process that listens at an address."""

    def __init__(self, network: Network, process: Process, factory: Any, address: tuple[str, int]):
        """Listen."""
        self.process, self.factory = process, factory
        self._network, self._address = network, address

    def close(self) -> None:
        """Listen no more."""
        if self._network.listening.get(self._address) is self:
            del self._network.listening[self._address]


class End(asyncio.Transport):
    """One end of a connection.

    What is written lies in `_sent` until the other kernel has it, in order, and in `_unheard` until
    this one knows that. What has come while reading was paused lies in `_came`.
    """

    other: End

    def __init__(self, network: Network, process: Process, address: Any, peer: Any):
        """Be open."""
        self._socket = FakeSocket(address)
        names = {"socket": self._socket, "sockname": address, "peername": peer}
        super().__init__(names)
        self.process, self._network, self._protocol = process, network, None
        self._sent, self._came = deque[tuple[float, bytes | None]](), deque[bytes | None]()
        self._unheard, self._looks_at_s = deque[float](), float("inf")
        self._is_closing = self._is_paused = self.is_over = False

    # What asyncio's streams ask for.

    def set_protocol(self, protocol: Any) -> None:
        """Set who is told what comes."""
        self._protocol = protocol

    def get_protocol(self) -> Any:
        """Return who is told what comes."""
        return self._protocol

    def is_closing(self) -> bool:
        """Tell whether it is being closed, or is."""
        return self._is_closing

    def set_write_buffer_limits(self, *_: Any, **__: Any) -> None:
        """Set none: nobody waits to write."""

    def get_write_buffer_size(self) -> int:
        """Return the bytes that no kernel has taken yet."""
        size = sum(len(said or b"") for _, said in self._sent)
        size += sum(len(said or b"") for said in self.other._came)
        return max(0, size - BUFFER_BYTES)

    def pause_reading(self) -> None:
        """Give nothing to the protocol."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Give the protocol what has come."""
        self._is_paused = False
        self.process.call(self._give)

    def write(self, data: Any) -> None:
        """Send."""
        if not self._is_closing:
            self._send(bytes(data))

    def close(self) -> None:
        """Send what was written, and then that this is all."""
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self.process.call(self._lost, None)

    def abort(self) -> None:
        """End the connection, with what was not sent."""
        self.break_by(None)

    # What the network does.

    def break_by(self, error: OSError | None) -> None:
        """End it, at this end at once, and at the other as soon as that hears of it."""
        self._is_closing = True
        self._sent.clear()
        self.process.call(self._lost, error)
        if not self.is_over:
            self.is_over = True
            self._network.reset(self)

    def reset(self) -> None:
        """Be told by the other end that there is no connection."""
        if not self.is_over:
            self.is_over = self._is_closing = True
            self.process.call(self._lost, ConnectionResetError(errno.ECONNRESET, "reset"))

    def _send(self, said: bytes | None) -> None:
        now_s = self._network.now_s
        delay_s = self._network.delay_s(self.process, self.other.process)
        ready_s = max(now_s + delay_s, self._sent[-1][0] if self._sent else 0.0)
        self._sent.append((ready_s, said))
        self._unheard.append(now_s)
        self._network.at(ready_s, self.pump)
        self._look_later()

    def pump(self) -> None:
        """Bring over what is due, where the network lets it pass."""
        network, other = self._network, self.other
        if not network.passes(self.process, other.process):
            return
        while self._sent and self._sent[0][0] <= network.now_s:
            _, said = self._sent.popleft()
            if other.process.has_ended or other.is_over:
                if network.passes(other.process, self.process):
                    self.reset()
                return
            other._came.append(said)
            other.process.call(other._give)
        if network.passes(other.process, self.process):
            while len(self._unheard) > len(self._sent):
                self._unheard.popleft()

    def _look_later(self) -> None:
        """Look after what this end has waited for longest, when its patience ends."""
        if self._unheard and not self.is_over:
            due_s = self._unheard[0] + self._socket.patience_s
            if due_s < self._looks_at_s:
                self._looks_at_s = due_s
                self._network.at(due_s, self._look_whether_heard)

    def _look_whether_heard(self) -> None:
        """End it where the other kernel has not answered for too long."""
        self._looks_at_s = float("inf")
        self.pump()
        late_s = self._network.now_s - self._socket.patience_s
        if self._unheard and self._unheard[0] <= late_s + 1e-6 and not self.is_over:
            self.break_by(TimeoutError(errno.ETIMEDOUT, "timed out"))
        self._look_later()

    def _give(self) -> None:
        while self._came and not self._is_paused and self._protocol is not None:
            said = self._came.popleft()
            if self._is_closing:
                continue
            if said is None:
                if not self._protocol.eof_received():
                    self.close()
            else:
                self._protocol.data_received(said)

    def _lost(self, error: OSError | None) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)


class Network:
    """The connections of all processes.

    Attributes:
        listening: who listens, by address.
        cut: from and to which hosts nothing passes.
        random: decides on delays.
    """

    def __init__(self, loop: VirtualLoop, random: random.Random):
        """Connect nobody."""
        self._loop, self.random = loop, random
        self.listening: dict[tuple[str, int], Listening] = {}
        self.cut: set[tuple[int, int]] = set()
        self.slow: dict[tuple[int, int], float] = {}
        self._ends: list[End] = []
        self._healed = asyncio.Event()
        self._port = 10000

    @property
    def now_s(self) -> float:
        """The time."""
        return self._loop.time()

    def at(self, when_s: float, do: Callable[[], Any]) -> None:
        """Do something that belongs to no process."""
        if not self._loop.is_closed():
            self._loop.call_at(when_s, do, context=NO_PROCESS)

    def passes(self, source: Process, target: Process) -> bool:
        """Tell whether anything comes from one host to another."""
        return (source.host, target.host) not in self.cut

    def delay_s(self, source: Process, target: Process) -> float:
        """Draw how long something takes from one host to another."""
        slow_s = self.slow.get((source.host, target.host), 0.0)
        return slow_s + min(SLOWEST_S, self.random.expovariate(1 / TYPICAL_S))

    def free_address(self, host: int) -> FakeSocket:
        """Find an address of a host at which nobody listens."""
        self._port += 1
        return FakeSocket((f"127.0.0.{host + 1}", self._port))

    def listen(self, process: Process, factory: Any, address: tuple[str, int]) -> Listening:
        """Let a process listen at an address."""
        found = self.listening[address] = Listening(self, process, factory, address)
        return found

    async def connect(self, process: Process, factory: Any, address: tuple[str, int]) -> Any:
        """Connect a process with who listens at an address.

        Raises:
            ConnectionRefusedError: if nobody listens there.
        """
        host = int(address[0].rpartition(".")[2]) - 1
        there = Process(self._loop, host)
        while not (self.passes(process, there) and self.passes(there, process)):
            await self._healed.wait()
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
        await asyncio.sleep(self.delay_s(process, there) + self.delay_s(there, process))
        listening = self.listening.get(address)
        if listening is None or listening.process.has_ended:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        near = self.free_address(process.host).address
        one, other = End(self, process, near, address), End(self, listening.process, address, near)
        one.other, other.other = other, one
        self._ends += [one, other]
        protocol = factory()
        one.set_protocol(protocol)
        protocol.connection_made(one)
        listening.process.call(self._accept, listening, other)
        return one, protocol

    def _accept(self, listening: Listening, end: End) -> None:
        protocol = listening.factory()
        end.set_protocol(protocol)
        protocol.connection_made(end)
        end._give()

    def reset(self, end: End) -> None:
        """Tell the other end, once anything passes, that there is no connection."""
        if self.passes(end.process, end.other.process):
            self.at(self.now_s + self.delay_s(end.process, end.other.process), end.other.reset)

    def end(self, process: Process) -> None:
        """End all connections of a process that has ended."""
        for address in [at for at, own in self.listening.items() if own.process is process]:
            del self.listening[address]
        for end in [end for end in self._ends if end.process is process]:
            end.break_by(None)

    def break_all(self, one: int, other: int) -> None:
        """Reset the connections between two hosts."""
        for end in self._ends:
            if {end.process.host, end.other.process.host} == {one, other} and not end.is_over:
                end.break_by(ConnectionResetError(errno.ECONNRESET, "reset"))

    def heal(self) -> None:
        """Let everything pass, with no other delay than usual."""
        self.cut.clear()
        self.slow.clear()
        self.heal_some()

    def heal_some(self) -> None:
        """Let pass what is cut no longer."""
        self._healed.set()
        self._healed = asyncio.Event()
        self._ends = [end for end in self._ends if not end.is_over]
        for end in self._ends:
            end.pump()


class VirtualStorage(Executor):
    """Calls that take a while on a simulated clock, hang or fail as the simulation says.

    Attributes:
        hangs_until_s: no call has an answer before.
        fails: tells whether a call is answered by an error, which may hide that it was done.
    """

    def __init__(self, loop: VirtualLoop):
        """Work as it should."""
        self._loop = loop
        self.hangs_until_s = 0.0
        self.fails: Callable[[], bool] = lambda: False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it, a moment later."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        random, own = self._loop.network.random, OWN.get()

        def answer() -> None:
            if own.has_ended:
                return
            if self._loop.time() < self.hangs_until_s:
                return self._loop.network.at(self._loop.time() + 0.5, answer)
            was_done = not self.fails()
            found = fn(*args, **kwargs) if was_done or random.random() < 0.5 else None
            if was_done:
                future.set_result(found)
            else:
                future.set_exception(TemporaryError("run_dir", "run", "stale file handle", "Wait"))

        self._loop.network.at(self._loop.time() + random.uniform(0.01, 0.3), answer)
        return future
