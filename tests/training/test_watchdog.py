"""Whose training thread hangs is told of, and who only waits for others is not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.runtime.events import EventLoop
from skippipe_jax.training import session, watchdog
from skippipe_jax.training.trainer import Trainer
from skippipe_jax.training.watchdog import Watchdog
from tests.harness.thread_cluster import Host, Lost, Network, ThreadMembership, train
from tests.training.test_rounds import PATIENCE_S, configured

LOOK_S, LOOKS = 0.01, 10


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[str]:
    monkeypatch.setattr(watchdog, "MIN_LIMIT_S", LOOK_S * LOOKS)
    return queue.SimpleQueue()


@contextmanager
def watched(loop: EventLoop, hangs: Callable[[str], object]) -> Iterator[Watchdog]:
    own = Watchdog(loop, 0.0, 300.0, hangs, LOOK_S)
    with own.iteration():
        pass  # The first one is not watched.
    yield own
    own.close()


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """Work that takes as long as the test; then the threads that wait for it end."""
    is_over = threading.Event()

    def wait(_: float = 0.0) -> None:
        is_over.wait()

    yield wait
    is_over.set()


def run_one(loop: EventLoop) -> None:
    """In another thread, as it may hang."""
    threading.Thread(target=lambda: loop.run_one(lambda: "an event"), daemon=True).start()


def never(hang: Callable[..., None]) -> Any:
    """An array that is not computed while the test runs."""
    return SimpleNamespace(block_until_ready=hang)


@pytest.mark.parametrize("is_event", [True, False], ids=["an event", "a computation"])
def test_a_computation_that_never_ends_hangs(
    is_event: bool, told: queue.SimpleQueue[str], hang: Callable[..., None]
):
    loop = EventLoop(300.0)
    with watched(loop, told.put) as own, own.iteration():
        if is_event:
            loop.post(hang)
        else:
            loop.when_computed(never(hang), lambda _: None)
        run_one(loop)
        assert "made no progress for 0 s" in told.get(timeout=20.0)


def test_who_waits_for_others_or_is_in_its_first_iteration_does_not_hang(
    told: queue.SimpleQueue[str], hang: Callable[..., None]
):
    looks = threading.Semaphore(0)

    class Counted(EventLoop):
        @property
        def is_at_work(self) -> bool:
            looks.release()
            return super().is_at_work

    loop = Counted(300.0)
    with watched(loop, told.put) as own, own.iteration():
        loop.when_ready(never(hang), lambda _: None)
        run_one(loop)
        for _ in range(3 * LOOKS):
            assert looks.acquire(timeout=20.0)
    first = Watchdog(loop, 0.0, 300.0, told.put, LOOK_S)
    with first.iteration():
        assert not first._is_iterating
    first.close()
    assert told.empty()


def test_how_long_an_iteration_may_take():
    own = Watchdog(EventLoop(1.0), 0.5, 300.0, print, 1000.0)
    assert own.limit_s == watchdog.MIN_LIMIT_S
    own._longest_s = 5.0
    assert own.limit_s == 5.0 * watchdog.MAX_SLOWDOWN
    own._longest_s = 50.0
    assert own.limit_s == 300.0 * watchdog.MAX_SHARE, "or the others end before"
    own.close()


@pytest.mark.nightly
def test_the_others_go_on_without_a_host_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    network = Network(3)
    hosts = [Host(configured(tmp_path), index, network, []) for index in range(3)]
    released = threading.Event()
    reads = session.Session._batches

    def read(own: session.Session, iteration: int) -> Any:
        if own._run.membership is hosts[2].membership and iteration == 2:
            assert released.wait(PATIENCE_S)
            raise Lost
        return reads(own, iteration)

    def stop(own: ThreadMembership, reason: str) -> None:
        network.lose(own.index)
        released.set()

    monkeypatch.setattr(watchdog, "MIN_LIMIT_S", 3.0)
    monkeypatch.setattr(session.Session, "_batches", read)
    monkeypatch.setattr(ThreadMembership, "stop", stop)
    train(hosts, PATIENCE_S)
    assert released.is_set()
    trainers: list[Trainer] = [host.trainer for host in hosts[:2]]
    assert [trainer.step for trainer in trainers] == [6, 6]
    network.close()
