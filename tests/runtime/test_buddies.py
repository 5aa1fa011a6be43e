"""Copies of stages go to hosts of other stages, part by part, beside what an iteration sends."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from skippipe_jax.config import Config, ModelConfig
from skippipe_jax.config.cluster import BUDDY, RecoveryConfig
from skippipe_jax.models.footprint import buddy_checkpoint_bytes
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime import buddies, state_copy
from skippipe_jax.runtime.buddies import BuddyCheckpoints
from skippipe_jax.runtime.events import EventLoop
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.state_copy import Bytes, Copy, packed
from skippipe_jax.runtime.topology import Topology
from tests.sched.examples import plan_of

PLAN = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 3], [1, 2, 4]])
# Host 0 serves stages 0 and 2, so stage 0 is kept by host 2, and stage 2 by host 1.
HOST_OF = (0, 1, 2, 0, 3)
EVERY = 3
MODEL = ModelConfig(vocabulary_size=11, width=8, layers=6, heads=2, kv_heads=1, ffn_width=12)
CONFIG = Config(model=MODEL, recovery=RecoveryConfig(lost_stage=BUDDY, buddy_every=EVERY))


def topology_of(host: int, config: Config = CONFIG) -> Topology:
    return Topology.of(config, PLAN, host, HOST_OF, [["cpu"]] * 4)


class Pending:
    """An array that another host may yet have to offer."""

    def __init__(self, mail: Mail, name: tuple[int, str, int], like: jax.ShapeDtypeStruct):
        self.mail, self.name, self.like = mail, name, like

    def block_until_ready(self) -> None:
        with self.mail.news:
            assert self.mail.news.wait_for(lambda: self.name in self.mail.offered, 30.0)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        array = np.asarray(self.mail.offered.pop(self.name))
        assert (array.shape, array.dtype) == (self.like.shape, self.like.dtype)
        return array


class Mail:
    """What hosts send each other in one process."""

    def __init__(self):
        self.offered: dict[tuple[int, str, int], jax.Array] = {}
        self.sizes: list[int] = []
        self.news = threading.Condition()

    def link(self, host: int, other: int) -> Any:
        def send(hop: Hop, iteration: int, array: jax.Array) -> None:
            name = other, hop.name, iteration
            with self.news:
                assert name not in self.offered, "each hop is given once"
                self.offered[name] = array
                self.sizes.append(array.size)
                self.news.notify_all()

        def receive(hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> Pending:
            return Pending(self, (host, hop.name, iteration), like)

        return SimpleNamespace(send=send, receive=receive)


class Hosts:
    """Four hosts whose stages are numbers that change with every step."""

    def __init__(self, first: int = 0, kept: dict[int, list[Copy]] | None = None):
        self.mail, self.step = Mail(), first
        self.loops = {host: EventLoop(30.0) for host in range(4)}
        self.of = {host: self.opened(host, first, (kept or {}).get(host, [])) for host in range(4)}

    def opened(self, host: int, first: int, kept: list[Copy]) -> BuddyCheckpoints:
        topology = topology_of(host)
        links = {other: self.mail.link(host, other) for other in range(4) if other != host}
        exchange = Exchange(self.loops[host], topology, links)
        states = {
            node: SimpleNamespace(to_save=lambda stage=PLAN.stage_of[node]: self.state(stage))
            for node in topology.nodes
        }
        replicas: Any = SimpleNamespace(states=states)
        return BuddyCheckpoints(exchange, replicas, topology.copy_routes, EVERY, first, kept)

    def state(self, stage: int) -> jax.Array:
        size = buddy_checkpoint_bytes(CONFIG, 3)[stage]
        return jax.device_put(np.full(size, 10 * stage + self.step, np.uint8))

    def iterate(self) -> dict[int, Any]:
        """An iteration, at the end of which all tell what they keep."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        for own in self.of.values():
            own.begin(self.step)

    def end(self) -> dict[int, Any]:
        told: dict[int, Any] = {}
        for host, own in self.of.items():
            own.when_complete(lambda copies, host=host: told.update({host: copies}))
        until_s = time.monotonic() + 30.0
        while len(told) < len(self.of):
            assert time.monotonic() < until_s
            for loop in self.loops.values():
                while not loop._happened.empty():
                    loop.run_one(lambda: None)
            time.sleep(0.001)
        self.step += 1
        return told


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "COPY_CHUNK_BYTES", 1000)


def test_the_buddy_is_the_first_host_after_it_that_does_not_serve_the_stage():
    for host in range(4):
        routes = topology_of(host).copy_routes
        assert [(route.stage, route.source, route.target) for route in routes] == [
            (0, 0, 2), (1, 2, 3), (2, 3, 1),
        ]  # fmt: skip
        hops = [hop.name for route in routes for hop in route.hops]
        assert len({*hops}) == len(hops)
    assert not topology_of(0, replace(CONFIG, recovery=RecoveryConfig())).copy_routes


def test_a_copy_comes_part_by_part_and_is_of_one_step():
    hosts = Hosts()
    assert hosts.iterate() == {0: (), 1: (), 2: (), 3: ()}
    hosts.iterate()
    told = hosts.iterate()
    assert told == {0: ((1, 0),), 1: ((2, 0),), 2: ((0, 0),), 3: ()}
    [copy] = hosts.of[1].copies
    assert copy.state.tolist() == [20] * buddy_checkpoint_bytes(CONFIG, 3)[2], (
        "as it was after step 0"
    )
    assert max(hosts.mail.sizes) == 1000
    assert not hosts.mail.offered, "all of it was taken"
    for _ in range(2):
        assert hosts.iterate() == told
    assert hosts.iterate()[1] == ((2, 3),)
    assert [copy.name for copy in hosts.of[1].copies] == [(2, 0), (2, 3)], "until the step counts"
    hosts.iterate()
    assert [copy.name for copy in hosts.of[1].copies] == [(2, 3)]


def test_copies_of_other_generations_are_kept_until_all_have_theirs():
    def copy(stage: int, step: int) -> Copy:
        return Copy(stage, step, np.zeros(buddy_checkpoint_bytes(CONFIG, 3)[stage], np.uint8))

    hosts = Hosts(5, {1: [copy(1, 4), copy(2, 2)]})
    for _ in range(2):
        assert hosts.iterate()[1] == ((1, 4), (2, 2))
    assert hosts.iterate()[1] == ((1, 4), (2, 5)), "others may not have told theirs yet"
    assert [one.name for one in hosts.of[1].copies] == [(1, 4), (2, 2), (2, 5)]
    assert hosts.iterate()[1] == ((2, 5),)
    assert [one.name for one in hosts.of[1].copies] == [(1, 4), (2, 5)]
    hosts.iterate()
    assert [one.name for one in hosts.of[1].copies] == [(2, 5)]


def test_hosts_go_on_while_states_are_packed(
    monkeypatch: pytest.MonkeyPatch,
):
    goes_on = threading.Event()

    def late(state: Any) -> Bytes:
        assert goes_on.wait(30.0)
        return packed(state)

    monkeypatch.setattr(buddies, "packed", late)
    hosts = Hosts()
    hosts.begin()
    assert not hosts.mail.sizes
    goes_on.set()
    hosts.end()
    assert hosts.mail.sizes


def test_nothing_of_a_packed_state_stays_in_the_memory_of_the_host():
    for device in jax.local_devices()[:2]:
        state = {"one": jax.device_put(np.arange(6.0), device), "count": jax.device_put(3, device)}
        assert packed(state).size == sum(leaf.nbytes for leaf in state.values())
        assert all(leaf._npy_value is None for leaf in state.values())
