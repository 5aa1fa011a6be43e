"""The threads of engines: requests come to them from the event loop, tokens go back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Protocol

from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest
from skippipe_jax.serving.errors import ApiError, Unavailable, failed, too_busy, unavailable
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
        """Go on with what waits and runs; return what is new.

        Raises:
            Unavailable: if none of it can be decoded at the moment.
        """
        ...

    def clear(self) -> None:
        """Drop all requests."""
        ...

    def close(self) -> None:
        """Wait for nothing any more; another thread than that of `step` calls this."""
        ...


class Sequences:
    """The sequences of one request to the server, as they are decoded; of the event loop."""

    def __init__(self, requests: Sequence[DecodeRequest]):
        """Wait for these."""
        self.requests = requests
        self.began_s = time.monotonic()
        self.open = set(range(len(requests)))
        """Those that are not done, by their places."""
        self._arrived = asyncio.Queue[tuple[int, Decoded] | ApiError]()

    def put(self, place: int, decoded: Decoded) -> None:
        """Take what is new of one of them."""
        self._arrived.put_nowait((place, decoded))

    def fail(self, error: ApiError) -> None:
        """Answer the request by an error."""
        self._arrived.put_nowait(error)

    async def decoded(self) -> AsyncIterator[tuple[int, Decoded]]:
        """Yield what is new, each with the place of its sequence, until all are done.

        Raises:
            ApiError: if the engine has failed, or cannot go on with them.
        """
        while self.open:
            arrived = await self._arrived.get()
            if isinstance(arrived, ApiError):
                raise arrived
            place, decoded = arrived
            # One that is cancelled may still have had a token.
            if place in self.open:
                if decoded.is_last:
                    self.open.remove(place)
                yield place, decoded


class Runner:
    """Runs one engine in a thread of its own, which alone touches it.

    Attributes:
        slots: how many sequences of the engine get tokens at a time.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Sequence[tuple[int, Decoded]]], None],
        fail: Callable[[BaseException, Collection[int] | None], None],
    ):
        """Call on the event loop `deliver` with what is new, and `fail` with why nothing will be.

        `fail` gets the sequences of which nothing will be; None if the engine decodes no more.
        """
        self.slots = engine.slots
        self._engine, self._deliver, self._fail = engine, deliver, fail
        self._ready = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._ends = False
        # The engine's own numbers, and those by which requests are known outside.
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
        self._engine.close()
        self._thread.join()

    def submit(self, number: int, request: DecodeRequest) -> None:
        """Decode a sequence, from now on known by this number."""
        self._command(lambda: self._submit(number, request))

    def cancel(self, number: int) -> None:
        """Decode no more of a sequence."""
        self._command(lambda: self._cancel(number))

    def _command(self, command: Callable[[], None]) -> None:
        with self._ready:
            self._commands.append(command)
            self._ready.notify()

    # In the thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        # Whoever waits for a token is told, and then the server ends.
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, error, None)

    def _step(self) -> None:
        try:
            decoded = [(self._numbers[own.request], own) for own in self._engine.step()]
        except Unavailable as error:
            self._engine.clear()
            self._loop.call_soon_threadsafe(self._fail, error, [*self._engines])
            self._numbers.clear()
            self._engines.clear()
            return
        for number, own in decoded:
            if own.is_last:
                del self._numbers[own.request], self._engines[number]
        if decoded:
            self._loop.call_soon_threadsafe(self._deliver, decoded)

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


class Engines:
    """Decodes by several engines at once; all is for the event loop, `Metrics` too.

    Attributes:
        error: why an engine has failed; None while all run.
        capacity: how many sequences may be there.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        most_waiting: int,
        metrics: Metrics,
        on_failure: Callable[[], None],
    ):
        """Let at most so many sequences wait; `on_failure` is called once an engine has failed."""
        self.error: BaseException | None = None
        self._metrics, self._on_failure = metrics, on_failure
        self._runners = [Runner(engine, self._deliver, self._fail) for engine in engines]
        self._slots = sum(runner.slots for runner in self._runners)
        self.capacity = self._slots + most_waiting
        self._known: dict[int, tuple[Runner, Sequences, int]] = {}
        self._submitted = 0

    def start(self) -> None:
        """Begin; tokens come to the event loop that calls this."""
        for runner in self._runners:
            runner.start()

    def stop(self) -> None:
        """End all threads, and wait for that."""
        for runner in self._runners:
            runner.stop()

    def submit(self, requests: Sequence[DecodeRequest]) -> Sequences:
        """Decode sequences, each by the engine that has the fewest for its slots.

        Raises:
            ApiError: if too many wait already, or an engine has failed.
        """
        if self.error is not None:
            raise failed()
        if len(self._known) + len(requests) > self.capacity:
            raise too_busy()
        sequences = Sequences(requests)
        load = Counter(runner for runner, *_ in self._known.values())
        for place, request in enumerate(requests):
            number = self._submitted
            self._submitted += 1
            runner = min(self._runners, key=lambda own: load[own] / own.slots)
            load[runner] += 1
            self._known[number] = runner, sequences, place
            runner.submit(number, request)
        self._count()
        return sequences

    def cancel(self, sequences: Sequences, place: int | None = None) -> None:
        """Decode no more of the sequence at a place, or of all that are not done."""
        chosen = set(sequences.open) if place is None else {place}
        sequences.open -= chosen
        for number, (runner, known, at) in list(self._known.items()):
            if known is sequences and at in chosen:
                del self._known[number]
                runner.cancel(number)
        self._count()

    def load(self) -> dict[str, int]:
        """Return how many sequences get tokens, wait, and could get tokens at a time."""
        running = min(len(self._known), self._slots)
        waiting = len(self._known) - running
        return {"running": running, "waiting": waiting, "slots": self._slots}

    def _count(self) -> None:
        self._metrics.count(len(self._known), self._slots)

    def _deliver(self, decoded: Sequence[tuple[int, Decoded]]) -> None:
        for number, own in decoded:
            found = self._known.get(number)
            if found is None:  # It was cancelled in the meantime.
                continue
            if own.is_last:
                del self._known[number]
            _, sequences, place = found
            sequences.put(place, own)
        self._count()

    def _fail(self, error: BaseException, numbers: Collection[int] | None) -> None:
        """Answer these sequences by an error, or all, as an engine decodes no more."""
        told = failed() if numbers is None else unavailable(str(error))
        for number in [*self._known] if numbers is None else numbers:
            if (found := self._known.pop(number, None)) is not None:
                found[1].fail(told)
        self._count()
        if numbers is None:
            self.error = error
            self._on_failure()
