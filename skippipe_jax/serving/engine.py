"""Engine threads: they take requests from the event loop and return tokens to it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest
from skippipe_jax.inference.decoding import Generator
from skippipe_jax.serving.errors import ApiError, Unavailable, failed, queue_full, unavailable
from skippipe_jax.serving.metrics import Metrics


class Sequences:
    """Sequences of one HTTP request during decoding; used on the event loop only."""

    def __init__(self, requests: Sequence[DecodeRequest]):
        """Start with all sequences unfinished."""
        self.requests = requests
        self.began_s = time.monotonic()
        self.open = set(range(len(requests)))
        """Indices of the sequences that are not done."""
        self._arrived = asyncio.Queue[tuple[int, Decoded] | ApiError]()

    def put(self, place: int, decoded: Decoded) -> None:
        """Queue a decoded token of the sequence at `place`."""
        self._arrived.put_nowait((place, decoded))

    def fail(self, error: ApiError) -> None:
        """Answer the request with an error."""
        self._arrived.put_nowait(error)

    async def decoded(self) -> AsyncIterator[tuple[int, Decoded]]:
        """Yield decoded tokens, each with the index of its sequence, until all are done.

        Raises:
            ApiError: if the engine has failed, or cannot continue these sequences.
        """
        while self.open:
            arrived = await self._arrived.get()
            if isinstance(arrived, ApiError):
                raise arrived
            place, decoded = arrived
            # A token of a cancelled sequence may still arrive.
            if place in self.open:
                if decoded.is_last:
                    self.open.remove(place)
                yield place, decoded


class Runner:
    """Thread that runs one engine; no other thread calls it, except for `Generator.close`.

    Attributes:
        slots: number of sequences that the engine decodes at a time.
    """

    def __init__(
        self,
        engine: Generator,
        deliver: Callable[[Sequence[Decoded]], None],
        fail: Callable[[BaseException, Collection[int] | None], None],
    ):
        """Prepare the thread; `deliver` and `fail` are called on the event loop.

        `deliver` gets new tokens; `fail` gets an error and the sequences that it ends, or None if
        the engine has failed.
        """
        self.slots = engine.slots
        self._engine, self._deliver, self._fail = engine, deliver, fail
        # None ends the thread.
        self._commands = queue.SimpleQueue[Callable[[], None] | None]()
        # Sequences that the engine has and that are not done.
        self._open = set[int]()
        self._undelivered: list[Decoded] = []
        self._thread = threading.Thread(target=self._run, name="skippipe-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call it on the event loop that is to receive tokens."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._commands.put(None)
        self._engine.close()
        self._thread.join()

    def submit(self, number: int, request: DecodeRequest) -> None:
        """Decode a sequence, which the caller identifies by `number`."""
        self._commands.put(lambda: self._submit(number, request))

    def cancel(self, number: int) -> None:
        """Stop decoding a sequence."""
        self._commands.put(lambda: self._cancel(number))

    # In the engine thread.

    def _run(self) -> None:
        try:
            while True:
                try:
                    command = self._commands.get(block=not self._engine.is_busy)
                except queue.Empty:
                    self._step()
                    continue
                if command is None:
                    break
                command()
                if not self._engine.is_busy:
                    self._flush()  # If the last running sequence was cancelled, no step does so.
            self._flush()
        # All waiting requests are answered with an error, and the server ends.
        except BaseException as error:
            self._flush()
            self._loop.call_soon_threadsafe(self._fail, error, None)

    def _step(self) -> None:
        try:
            decoded = self._engine.step(self._flush)
        except Unavailable as error:
            self._engine.clear()
            self._flush()
            self._loop.call_soon_threadsafe(self._fail, error, [*self._open])
            self._open.clear()
            return
        self._open -= {result.request for result in decoded if result.is_last}
        self._flush()
        self._undelivered = decoded
        if not self._engine.is_busy:
            self._flush()

    def _flush(self) -> None:
        """Deliver the tokens of the previous step.

        The event loop's thread needs the interpreter for them. If it had it between two steps, the
        next one would start later; while a step waits for the device, nobody else needs it.
        """
        if self._undelivered:
            self._loop.call_soon_threadsafe(self._deliver, self._undelivered)
            self._undelivered = []

    def _submit(self, number: int, request: DecodeRequest) -> None:
        self._engine.submit(request, number)
        self._open.add(number)

    def _cancel(self, number: int) -> None:
        self._engine.cancel(number)
        self._open.discard(number)


class Engines:
    """Several engines and the sequences that they decode; used on the event loop only.

    Attributes:
        error: why an engine has failed; None while all run.
        capacity: most sequences that may run and wait.
    """

    def __init__(
        self,
        engines: Sequence[Generator],
        most_waiting: int,
        metrics: Metrics,
        on_failure: Callable[[], None],
    ):
        """Allow `most_waiting` waiting sequences; call `on_failure` when an engine has failed."""
        self.error: BaseException | None = None
        self._metrics, self._on_failure = metrics, on_failure
        self._runners = [Runner(engine, self._deliver, self._fail) for engine in engines]
        self._slots = sum(runner.slots for runner in self._runners)
        self.capacity = self._slots + most_waiting
        self._active: dict[int, tuple[Runner, Sequences, int]] = {}
        self._submitted = 0

    def start(self) -> None:
        """Start all threads; tokens arrive on the event loop that calls this."""
        for runner in self._runners:
            runner.start()

    def stop(self) -> None:
        """Stop all threads and wait until they have ended."""
        for runner in self._runners:
            runner.stop()

    def submit(self, requests: Sequence[DecodeRequest]) -> Sequences:
        """Decode sequences, each on the engine with the lowest load per slot.

        Raises:
            ApiError: if the capacity is exceeded, or an engine has failed.
        """
        if self.error is not None:
            raise failed()
        if len(self._active) + len(requests) > self.capacity:
            raise queue_full()
        sequences = Sequences(requests)
        load = Counter(runner for runner, *_ in self._active.values())
        for place, request in enumerate(requests):
            number = self._submitted
            self._submitted += 1
            runner = min(self._runners, key=lambda own: load[own] / own.slots)
            load[runner] += 1
            self._active[number] = runner, sequences, place
            runner.submit(number, request)
        self._count()
        return sequences

    def cancel(self, sequences: Sequences, place: int | None = None) -> None:
        """Stop decoding the sequence at an index, or all unfinished ones."""
        chosen = set(sequences.open) if place is None else {place}
        sequences.open -= chosen
        for number, (runner, owner, index) in list(self._active.items()):
            if owner is sequences and index in chosen:
                del self._active[number]
                runner.cancel(number)
        self._count()

    def load(self) -> dict[str, int]:
        """Return the numbers of running sequences, waiting sequences and slots."""
        running = min(len(self._active), self._slots)
        waiting = len(self._active) - running
        return {"running": running, "waiting": waiting, "slots": self._slots}

    def _count(self) -> None:
        self._metrics.count(len(self._active), self._slots)

    def _deliver(self, decoded: Sequence[Decoded]) -> None:
        for result in decoded:
            entry = self._active.get(result.request)
            if entry is None:  # Cancelled in the meantime.
                continue
            if result.is_last:
                del self._active[result.request]
            _, sequences, place = entry
            sequences.put(place, result)
        self._count()

    def _fail(self, error: BaseException, numbers: Collection[int] | None) -> None:
        """Answer these sequences with an error, or all (None) as an engine has failed."""
        api_error = failed() if numbers is None else unavailable(str(error))
        for number in [*self._active] if numbers is None else numbers:
            if (entry := self._active.pop(number, None)) is not None:
                entry[1].fail(api_error)
        self._count()
        if numbers is None:
            self.error = error
            self._on_failure()
