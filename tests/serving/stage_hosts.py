"""The hosts of a service in threads of one process, which a test may end at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from skippipe_sched.problem.plan import DATA_STAGE

from skippipe_jax.connections.keys import Keys
from skippipe_jax.inference.decoding import PREFILL_TOKENS, Generator
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.models.branch_scales import ScaleTable
from skippipe_jax.serving.hosts import LossRules, StageHosts
from skippipe_jax.serving.local_stages import Slots
from skippipe_jax.serving.routed import RoutedExecutor
from skippipe_jax.serving.stage_host import StageHost
from skippipe_jax.serving.wire import Wire
from tests.serving.scripted_engine import PATIENCE_S, eventually

SILENT_S = 3.0
ONE_ON_THE_FRONT = LossRules(most_stages=1)
CONNECT_S = 5.0


class HostThread:
    """A host in a thread."""

    def __init__(self, address: str, source: ModelSource | None, keys: Keys, most_stages: int):
        given = {"most_stages": most_stages, "patience_s": CONNECT_S}
        self.host = StageHost(address, keys, source, **given)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await self.host.serve()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._serve())
        except Exception as error:
            self.error = error

    @property
    def neighbours(self) -> int:
        """How many other hosts it is connected to."""
        session = self.host._session
        return 0 if session is None else len(session._wires)

    def kill(self) -> None:
        """End it at once: its connections close without a word."""
        assert self._task is not None
        with suppress(RuntimeError):  # It may have ended.
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()

    def part_from(self, others: Sequence[HostThread]) -> None:
        """Let no other host reach this one, though the front does."""
        self._loop.call_soon_threadsafe(self.host._listening.close)
        for other in others:
            other._loop.call_soon_threadsafe(other._drop)

    def connect_twice(self, host: int) -> set[Wire | None]:
        """Let it connect to another host twice at once; return the connections that it has then."""
        session = self.host._session
        assert session is not None

        async def connect() -> set[Wire | None]:
            session._wires.pop(host)
            return {*await asyncio.gather(session._connect(host), session._connect(host))}

        return asyncio.run_coroutine_threadsafe(connect(), self._loop).result(PATIENCE_S)

    def forget_others(self) -> None:
        """Let it know no other host, as if the front had not told of them yet."""
        session = self.host._session
        assert session is not None
        for known in (session._addresses, session._wires):
            self._loop.call_soon_threadsafe(known.clear)

    def _drop(self) -> None:
        assert self.host._session is not None
        for wire in self.host._session._wires.values():
            wire.close()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Service:
    """The front of a service, and its hosts."""

    def __init__(
        self,
        source: ModelSource,
        slots: Slots,
        rules: LossRules,
        keys: Keys,
        most_stages: int,
        scales: ScaleTable | None,
    ):
        self.source, self.keys, self.most_stages = source, keys, most_stages
        self.inner = range(1, source.stages)
        self.hosts = StageHosts(source, slots, rules, keys, SILENT_S, scales)
        self.address = self.hosts.listen("127.0.0.1", 0)
        self.threads: list[HostThread] = []

    def start(self, count: int, *, has_weights: bool = True) -> list[HostThread]:
        """Start more hosts."""
        source = self.source if has_weights else None
        given = self.address, source, self.keys, self.most_stages
        started = [HostThread(*given) for _ in range(count)]
        self.threads += started
        return started

    def generator(self, group: int = 0) -> Generator:
        """What decodes the sequences of a group."""
        model = self.source.model(self.hosts.own_stages)
        return Generator(RoutedExecutor(model, self.hosts, group), PREFILL_TOKENS)

    def holding(self, stage: int) -> list[HostThread]:
        """The hosts that have a stage."""
        ports = {own.get("address") for own in self.hosts.status() if stage in own["stages"]}
        return [thread for thread in self.threads if thread.host.address in ports]

    def in_use(self, stage: int) -> HostThread:
        """The host on which a group runs a stage."""
        [used] = [
            own for own in self.hosts.status() if own.get("groups") and stage in own["stages"]
        ]
        [thread] = [own for own in self.threads if own.host.address == used["address"]]
        return thread

    def lose(self, stage: int) -> None:
        """Kill the host that alone has a stage, and wait until the front has noticed."""
        [thread] = self.holding(stage)
        thread.kill()
        self.await_stages(*({*self.inner} - {stage}))

    def restore(self) -> None:
        """Start another host, and wait until all stages are there."""
        self.start(1)
        self.await_stages(*self.inner)

    def await_stages(self, *stages: int) -> None:
        """Wait until somebody holds these stages, and nobody others."""
        eventually(
            lambda: (
                {stage for own in self.hosts.status() for stage in own["stages"]}
                == {DATA_STAGE, *stages}
            )
        )


@contextlib.contextmanager
def service(
    source: ModelSource,
    count: int,
    *,
    slots: Slots = Slots(1, 2, 64),  # noqa: B008 (it is frozen)
    rules: LossRules = ONE_ON_THE_FRONT,
    keys: Keys | None = None,
    has_weights: bool = True,
    scales: ScaleTable | None = None,
) -> Iterator[Service]:
    """Gather so many hosts beside the front, with few stages each, and end them at last."""
    inner = source.stages - (rules.most_stages or 1)
    most = -(-inner // count)
    own = Service(source, slots, rules, Keys() if keys is None else keys, most, scales)
    try:
        own.start(count, has_weights=has_weights)
        own.hosts.gather(count, PATIENCE_S)
        yield own
    finally:
        own.hosts.close()
        for thread in own.threads:
            thread.join()
            if thread.error is not None:
                raise thread.error
