"""Hosts that are threads of one process and train together, over no network that could be slow.

All that they tell each other goes through one event loop. Whoever hears something counts how many
messages had to come one after another for it: times the latency of a link, that is how long it
takes over links that do nothing else.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from skippipe_jax.cluster.inbox import Inbox
from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import ClusterConfig, load_config
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.trainer import Trainer


class Lost(Exception):
    """Ends the thread of a host that is lost."""


class Network:
    """Carries messages between hosts until they are lost."""

    def __init__(self, hosts: int):
        self.hosts = hosts
        self.members: dict[int, ThreadMembership] = {}
        self.lost: set[int] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def send(self, source: int, target: int, message: Sequence[Any]) -> None:
        text = json.dumps(message, default=msgspec.to_builtins)

        def deliver() -> None:
            if target in self.members and not self.lost & {source, target}:
                assert self.members[target]._received(source, json.loads(text)), text

        self.loop.call_soon_threadsafe(deliver)

    def lose(self, host: int) -> None:
        """All others notice at once."""

        def notice() -> None:
            self.lost.add(host)
            for other in self.members.keys() - self.lost:
                self.members[other]._report_lost(host, "its process has ended")

        self.loop.call_soon_threadsafe(notice)

    def close(self) -> None:
        def stop() -> None:
            for task in asyncio.all_tasks():
                task.cancel()
            self.loop.call_soon(self.loop.stop)

        self.loop.call_soon_threadsafe(stop)
        self._thread.join()
        self.loop.close()


class ThreadMesh:
    """The connections of one host."""

    address = "127.0.0.1"

    def __init__(self, network: Network, host: int):
        self.network, self.host = network, host
        self.directory = SimpleNamespace(
            outlives=False,
            hello=SimpleNamespace(address=f"127.0.0.1:{host + 1}", places=network.hosts),
        )

    @property
    def missed(self) -> frozenset[int]:
        return frozenset(self.network.lost)

    def send(self, host: int, *message: Any) -> None:
        self.network.send(self.host, host, message)

    def broadcast(self, *message: Any) -> None:
        for host in set(range(self.network.hosts)) - {self.host}:
            self.send(host, *message)


class ThreadMembership(Membership):
    """A host without connections of its own.

    It counts messages that come one after another, since the last generation began.

    Attributes:
        depth: so many had to come for what this host knows.
        puts: what it has told since.
    """

    def __init__(self, config: ClusterConfig, host: int, network: Network):
        super().__init__(config, host, network.hosts)
        self._loop = network.loop
        self.mesh = ThreadMesh(network, host)  # pyright: ignore[reportAttributeAccessIssue]
        network.members[host] = self
        self.inbox = CountingInbox(self)
        self.depth, self.puts = 0, list[str]()

    def part(self, patience_s: float) -> None:
        """There is nothing to part from."""

    def next_group(self, after: int, timeout_s: float) -> Group | None:
        group = super().next_group(after, timeout_s)
        self.depth, self.puts = 0, []
        return group

    def post(self, generation: int, key: str, value: str) -> None:
        self.puts.append(key)
        super().post(generation, key, f"{self.depth + 1} {value}")


class CountingInbox(Inbox):
    """The inbox of such a host, which counts for it."""

    def __init__(self, own: ThreadMembership):
        super().__init__()
        self._own = own

    def take(self, key: str, timeout_s: float, source: int, generation: int) -> str:
        value = super().take(key, timeout_s, source, generation)
        if key.startswith("clock/"):
            if isinstance(threading.current_thread(), Host):  # Else nothing waits for it.
                self._own.depth += 2
            return value
        depth, _, value = value.partition(" ")
        if source != self._own.index:
            self._own.depth = max(self._own.depth, int(depth))
        return value


class Host(threading.Thread):
    """Trains until the end, or until an error."""

    def __init__(
        self,
        config: Path,
        index: int,
        network: Network,
        overrides: Sequence[str],
        *,
        resume: bool = False,
    ):
        super().__init__(name=f"host {index}", daemon=True)
        loaded = load_config(config, overrides)
        self.membership = ThreadMembership(loaded.cluster, index, network)
        self.error: BaseException | None = None
        self.ended: queue.SimpleQueue[Host]
        self.after_step: Callable[[Trainer, int], None] = lambda *_: None
        self.trainer = Trainer(loaded, [Watching(self)], host=self.membership, resume=resume)

    def run(self) -> None:
        try:
            with self.trainer:
                while not self.trainer.finished:
                    self.trainer.train_step()
        except BaseException as error:
            self.error = error
        self.ended.put(self)


def train(hosts: Sequence[Host], patience_s: float) -> None:
    """Train on all hosts to the end; raise the first error but of those that are lost."""
    ended: queue.SimpleQueue[Host] = queue.SimpleQueue()
    for host in hosts:
        host.ended = ended
        host.start()
    for _ in hosts:
        error = ended.get(timeout=patience_s).error
        if error is not None and not isinstance(error, Lost):
            raise error


class Watching(Callback):
    def __init__(self, host: Host):
        self.host = host

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        self.host.after_step(self.host.trainer, metrics.step)
