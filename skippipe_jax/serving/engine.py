"""The thread that owns the engine: requests come to it from the event loop, tokens go back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest
from skippipe_jax.serving.errors import failed, too_busy
from skippipe_jax.serving.metrics import Metrics


class Engine(Protocol):
    """What draws tokens, many sequences side by side; one thread calls it."""

    @property
    def slots(self) -> int:
        """How many sequences get tokens at a time."""
        ...

    @property
    def is_busy(self) -> bool:
        """Tell whether there are requests that are not done."""
        ...

    def submit(self, request: DecodeRequest) -> int:
        """Let a request wait for a slot; return its number."""
        ...

    def cancel(self, number: int) -> None:
        """Draw no more tokens of a request; one that is done has none."""
        ...

    def step(self) -> list[Decoded]:
        """Go on with what waits and runs; return what is new."""
        ...


class Sequences:
    """The sequences of one request to the server, as they are decoded; of the event loop."""

    def __init__(self, requests: Sequence[DecodeRequest]):
        """Wait for these."""
        self.requests = requests
        self.began_s = time.monotonic()
        self.open = set(range(len(requests)))
        """Those that are not done, by their places."""
        self._arrived = asyncio.Queue[tuple[int, Decoded] | None]()

    def put(self, place: int, decoded: Decoded | None) -> None:
        """Take what is new of one of them; None tells that the engine has failed."""
        self._arrived.put_nowait(None if decoded is None else (place, decoded))

    async def decoded(self) -> AsyncIterator[tuple[int, Decoded]]:
        """Yield what is new, each with the place of its sequence, until all are done.

        Raises:
            ApiError: if the engine has failed.
        """
        while self.open:
            arrived = await self._arrived.get()
            if arrived is None:
                raise failed()
            place, decoded = arrived
            # One that is cancelled may still have had a token.
            if place in self.open:
                if decoded.is_last:
                    self.open.remove(place)
                yield place, decoded


class EngineThread:
    """Runs an engine in a thread of its own.

    All methods are for the event loop, `Metrics` too; the thread touches the engine alone.

    Attributes:
        error: why the engine has failed; None while it runs.
    """

    def __init__(
        self, engine: Engine, most_waiting: int, metrics: Metrics, on_failure: Callable[[], None]
    ):
        """Let at most so many sequences wait; `on_failure` is called once the engine has failed."""
        self.error: BaseException | None = None
        self._engine, self._metrics, self._on_failure = engine, metrics, on_failure
        self.capacity = engine.slots + most_waiting
        self._known: dict[int, tuple[Sequences, int]] = {}  # By the numbers given here.
        self._submitted = 0
        self._ready = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._ends = False
        # The engine's own numbers and those given here; of the thread.
        self._numbers: dict[int, int] = {}
        self._engines: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="skippipe-engine", daemon=True)

    def start(self) -> None:
        """Begin; call it on the event loop that tokens shall come to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for that."""
        with self._ready:
            self._ends = True
            self._ready.notify()
        self._thread.join()

    def submit(self, requests: Sequence[DecodeRequest]) -> Sequences:
        """Decode sequences.

        Raises:
            ApiError: if too many wait already, or the engine has failed.
        """
        if self.error is not None:
            raise failed()
        if len(self._known) + len(requests) > self.capacity:
            raise too_busy()
        sequences = Sequences(requests)
        for place, request in enumerate(requests):
            number = self._submitted
            self._submitted += 1
            self._known[number] = sequences, place
            self._command(lambda number=number, request=request: self._submit(number, request))
        self._count()
        return sequences

    def cancel(self, sequences: Sequences, place: int | None = None) -> None:
        """Decode no more of the sequence at a place, or of all that are not done."""
        chosen = set(sequences.open) if place is None else {place}
        sequences.open -= chosen
        for number, known in list(self._known.items()):
            if known[0] is sequences and known[1] in chosen:
                del self._known[number]
                self._command(lambda number=number: self._cancel(number))
        self._count()

    def _count(self) -> None:
        self._metrics.count(len(self._known), self._engine.slots)

    def _command(self, command: Callable[[], None]) -> None:
        with self._ready:
            self._commands.append(command)
            self._ready.notify()

    def _deliver(self, decoded: Sequence[tuple[int, Decoded]]) -> None:
        for number, own in decoded:
            found = self._known.get(number)
            if found is None:  # It was cancelled in the meantime.
                continue
            if own.is_last:
                del self._known[number]
            sequences, place = found
            sequences.put(place, own)
        self._count()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        for sequences, place in self._known.values():
            sequences.put(place, None)
        self._on_failure()

    # In the thread.

    def _run(self) -> None:
        try:
            while self._obey():
                decoded = [(self._numbers[own.request], own) for own in self._engine.step()]
                for number, own in decoded:
                    if own.is_last:
                        del self._numbers[own.request], self._engines[number]
                if decoded:
                    self._loop.call_soon_threadsafe(self._deliver, decoded)
        # Whoever waits for a token is told, and then the server ends.
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _obey(self) -> bool:
        """Do what the event loop has asked for; return whether to go on, once there is work."""
        while True:
            with self._ready:
                while not (self._commands or self._ends or self._engine.is_busy):
                    self._ready.wait()
                commands, self._commands = self._commands, []
                if self._ends:
                    return False
            for command in commands:
                command()
            if self._engine.is_busy:
                return True

    def _submit(self, number: int, request: DecodeRequest) -> None:
        own = self._engine.submit(request)
        self._numbers[own], self._engines[number] = number, own

    def _cancel(self, number: int) -> None:
        own = self._engines.pop(number, None)
        if own is not None:  # Or it was done before it heard of that.
            del self._numbers[own]
            self._engine.cancel(own)
