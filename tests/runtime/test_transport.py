"""Transfer servers of a generation of hosts: what they carry, and that nothing of them stays."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.connections.addresses import parse_address, require_free
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.transport import (
    SERVER_COPY_BYTES,
    HostLink,
    Transfers,
    fitting_copy_bytes,
    locked_bytes,
)
from tests.harness.ports import free_port
from tests.harness.thread_hosts import ThreadHost, on_hosts

HOSTS = 2
LARGE = 1 << 23
LARGE_BYTES = 4 * LARGE
LIKE = jax.ShapeDtypeStruct((8,), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
HOP = Hop("sent", 0, 1)


def open_both(*ports: int, first: int = 0) -> list[tuple[Transfers, HostLink]]:
    """The transfers of two hosts in this process, on these ports, and the link of each.

    They begin with iteration `first`.
    """
    device = jax.local_devices()[0]

    def opened(host: ThreadHost) -> tuple[Transfers, HostLink]:
        other = 1 - host.index
        requests = {other: f"127.0.0.1:{ports[host.index]}"}
        transfers = Transfers(host.index, device.client, requests, "127.0.0.1")
        told = gather(host, "endpoints", lambda: transfers.endpoint, 30.0)
        transfers.connect([told[index] for index in range(HOSTS)])
        return transfers, transfers.links(first)[other]

    both: list[tuple[Transfers, HostLink]] = []
    for outcome in on_hosts(HOSTS, opened):
        assert not isinstance(outcome, Exception), outcome
        both.append(outcome)
    return both


def what_came(array: jax.Array) -> np.ndarray:
    """The array, once it is there; fails if that takes too long."""
    __tracebackhide__ = True  # To print an argument, pytest would wait for its value.
    came: queue.SimpleQueue[np.ndarray | Exception] = queue.SimpleQueue()

    def wait() -> None:
        try:
            came.put(np.asarray(array))
        except Exception as error:
            came.put(error)

    threading.Thread(target=wait, daemon=True).start()
    try:
        outcome = came.get(timeout=20.0)
    except queue.Empty:
        pytest.fail("the array has neither arrived nor failed in 20 s")
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Held:
    """What this process holds after generations, which is to be no more than after the first."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._first: tuple[int, int] | None = None
        self._sizes: list[int] = []

    def look(self) -> None:
        """After a generation: wait until threads and descriptors are as few as after the first."""
        gc.collect()
        if self._first is None:
            time.sleep(0.5)  # What JAX keeps for the next server it keeps once.
            self._first = self._counts()
        wait_until(lambda: self._counts() <= (self._first or (0, 0)))
        self._sizes.append(self._process.memory_info().rss)
        # The allocator may keep an array of the first round; a leak keeps one of every round.
        assert max(self._sizes) < self._sizes[:2][-1] + LARGE_BYTES

    def _counts(self) -> tuple[int, int]:
        return self._process.num_threads(), self._process.num_fds()


def test_a_generation_gives_all_back_whatever_is_under_way():
    """Of one after another on the same ports: threads, descriptors, memory, and the ports."""
    ports, held = (free_port(), free_port()), Held()
    offered = jnp.ones(LARGE).block_until_ready()
    for generation in range(4):
        (transfers, link), (transfers_there, there) = open_both(*ports)
        sent = jnp.full(8, generation, jnp.float32), jnp.int32(generation)
        link.send(HOP, 3, sent)
        both = there.receive(HOP, 3, (LIKE, COUNT))
        jax.tree.map(np.testing.assert_array_equal, (*map(what_came, both),), sent)
        # The host there is an iteration ahead: it has asked for what nobody will offer.
        asked, _ = there.receive(HOP, 4, (LIKE, COUNT))
        link.send(Hop("offered", 0, 1), 3, (offered * generation).block_until_ready())
        transfers.close()
        with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
            what_came(asked)
        transfers_there.close()
        for port in ports:
            require_free("port", "127.0.0.1", port)
        del asked, both, link, there, transfers, transfers_there
        held.look()


@pytest.mark.nightly
@pytest.mark.parametrize("asked_in", [8, 9])
def test_nothing_stays_pinned_by_what_was_asked_for_and_never_offered(asked_in: int):
    """A generation ends in its first iterations, before one host has come to what another has."""
    offered, held = jnp.ones(LARGE).block_until_ready(), Held()
    for generation in range(4):
        (transfers, link), (transfers_there, there) = open_both(free_port(), free_port(), first=8)
        hop = Hop("asked", 0, 1)
        link.expect(hop)
        asked, _ = there.receive(hop, asked_in, (LIKE, COUNT))
        # A state is offered, and training goes on before it is taken.
        link.send(Hop("offered", 0, 1), 0, (offered * generation).block_until_ready())
        if asked_in != 8:
            link.send(HOP, 8, jnp.ones(8))
            np.testing.assert_array_equal(what_came(there.receive(HOP, 8, LIKE)), np.ones(8))
        time.sleep(0.05)  # What is asked for comes there.
        transfers_there.close()
        transfers.close()
        with pytest.raises(jax.errors.JaxRuntimeError):
            what_came(asked)
        del asked, link, there, transfers, transfers_there
        held.look()


def open_one(port: int) -> Transfers:
    """The transfers of a host, with a server for another on this port."""
    requests = {1: f"127.0.0.1:{port}"}
    return Transfers(0, jax.local_devices()[0].client, requests, "127.0.0.1")


@contextlib.contextmanager
def stalled_event_loop() -> Iterator[None]:
    """Keep JAX's event loop waiting for the first bytes of a connection."""
    before = listening_ports()
    transfers = open_one(0)
    (reached,) = transfers.endpoint["reached"].values()
    (port,) = listening_ports() - before - {parse_address("address", reached)[1]}
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(0.2)  # Until it is accepted.
        yield
    transfers.close()


def listening_ports() -> set[int]:
    """The ports on which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return {own.laddr.port for own in sockets if own.status == psutil.CONN_LISTEN}


def test_a_generation_that_ends_at_once_gives_its_port_back():
    """JAX's event loop hears of the end of a server together with its start."""
    port = free_port()
    with stalled_event_loop():
        transfers = open_one(port)
        closing = threading.Thread(target=transfers.close)
        closing.start()
        time.sleep(0.2)  # Until it waits for the port.
    closing.join()
    require_free("port", "127.0.0.1", port)


def test_a_large_array_locks_no_more_memory_than_is_counted():
    """In a process that may lock no more, as one that is not root's."""
    program = (
        "import jax, jax.numpy as jnp\n"
        "from tests.runtime.test_transport import HOP, LARGE, open_both, what_came\n"
        "(_, link), (_, there) = open_both(0, 0)\n"
        "link.send(HOP, 3, jnp.ones(LARGE))\n"
        "like = jax.ShapeDtypeStruct((LARGE,), jnp.float32)\n"
        "assert (what_came(there.receive(HOP, 3, like)) == 1).all()\n"
    )
    as_user = "setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock" if os.geteuid() == 0 else ""
    limited = [*as_user.split(), "prlimit", f"--memlock={locked_bytes(SERVER_COPY_BYTES)}"]
    subprocess.run([*limited, sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("servers", "processes", "size", "warns"),
    [
        (2, 1, SERVER_COPY_BYTES, False),
        (3, 1, SERVER_COPY_BYTES, True),
        (1, 2, SERVER_COPY_BYTES, False),
        (2, 3, SERVER_COPY_BYTES // 4, False),
        (31, 32, SERVER_COPY_BYTES // 64, True),
    ],
)
def test_copies_fit_the_limit_of_locked_memory_where_all_hosts_have_the_same(
    servers: int,
    processes: int,
    size: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    limits = [1 << 16, 2 * locked_bytes(SERVER_COPY_BYTES)]

    def set_limits(_: int, to: tuple[int, int]) -> None:
        if to[1] == resource.RLIM_INFINITY:
            raise ValueError("not allowed to raise maximum limit")
        limits[:] = to

    monkeypatch.setattr(resource, "getrlimit", lambda _: (*limits,))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert fitting_copy_bytes.__wrapped__(servers, processes) == size
    assert ("ulimit -l unlimited" in "".join(capsys.readouterr())) == warns


def test_what_one_generation_asks_for_the_next_does_not_answer():
    """A host that is still about the last one asks at the port on which the next listens."""
    port = free_port()
    (transfers, _), (transfers_there, late) = open_both(port, free_port())
    transfers.close()
    (transfers, link), (next_there, there) = open_both(port, free_port())
    stale = late.receive(HOP, 3, LIKE)
    link.send(HOP, 3, jnp.ones(8))
    np.testing.assert_array_equal(what_came(there.receive(HOP, 3, LIKE)), np.ones(8))
    transfers_there.close()
    with pytest.raises(jax.errors.JaxRuntimeError):
        what_came(stale)
    for opened in (transfers, next_there):
        opened.close()
