"""The shaped network does what the tests and benchmarks on it take for granted."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from skippipe_sched.errors import InputError

from experiments.benchmarks.network import shaped_network
from experiments.benchmarks.network.shaped_network import ShapedNetwork

THREADS = ThreadPoolExecutor(16)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ, reason="only root may make a shaped network"
)


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    rates = np.full((4, 4), 1e6)
    rates[0, 1], rates[1, 0] = 0.25e6, 8e6
    with ShapedNetwork(rates) as network:
        yield network


def listen(network: ShapedNetwork, host: int) -> socket.socket:
    """A server on a host, which waits for a connection a minute at most."""
    server = network.call(host, lambda: socket.create_server((network.address(host), 0)))
    server.settimeout(60.0)
    return server


def connect(network: ShapedNetwork, host: int, server: socket.socket) -> socket.socket:
    """Connect a host with a server."""
    return network.call(host, lambda: socket.create_connection(server.getsockname(), 60.0))


def transfer(network: ShapedNetwork, source: int, target: int, size: int) -> Future[float]:
    """Send so many bytes from host to host; the result is how many arrive in a second."""
    server = listen(network, target)

    def receive() -> float:
        connection, _ = server.accept()
        began_s, received = time.monotonic(), 0
        while arrived := connection.recv(1 << 20):
            received += len(arrived)
        return received / (time.monotonic() - began_s)

    def send() -> None:
        with connect(network, source, server) as connection:
            connection.sendall(bytes(size))

    received = THREADS.submit(receive)
    THREADS.submit(send)
    return received


def traces(network: ShapedNetwork) -> list[str]:
    """What there is of a network on this machine: namespaces and files."""
    name = network.command(0)[-1].rpartition("-")[0]
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    folders = map(str, Path("/etc/netns").glob(f"{name}-*"))
    return [line for line in (*listed.stdout.splitlines(), *folders) if name in line]


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_every_directed_link_has_its_own_rate(network: ShapedNetwork):
    network.set_rate(0, 1, 4e6)
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 3), (3, 0)]
    sent = {pair: transfer(network, *pair, int(3 * network.rates[pair])) for pair in pairs}
    shares = [rate.result(60) / network.rates[pair] for pair, rate in sent.items()]
    # The rates differ by factors of 4 and more, so a pause of a busy machine may take its share.
    assert shares == pytest.approx([1.0] * len(pairs), abs=0.2)


@needs_root
def test_the_link_between_two_hosts_is_cut_and_no_other(network: ShapedNetwork):
    network.set_paths([(0, 2), (2, 0)], up=False)
    received = transfer(network, 0, 2, 1000)
    for pair in [(0, 1), (1, 0), (3, 2), (2, 1)]:
        assert transfer(network, *pair, 1000).result(60) > 0
    assert not received.done()
    network.set_paths([(0, 2), (2, 0)], up=True)
    assert received.result(60) > 0


@needs_root
def test_a_connection_is_silenced_and_no_other(network: ShapedNetwork):
    server = listen(network, 2)
    ends = [(connect(network, host, server), server.accept()[0]) for host in (0, 1)]
    for own, there in ends:
        own.sendall(b"a")
        assert there.recv(1) == b"a"
        there.settimeout(1.0)
    network.silence(0, 2, (ends[0][0].getsockname()[1], server.getsockname()[1]))
    for own, _ in ends:
        own.sendall(b"b")
    assert ends[1][1].recv(1) == b"b"
    with pytest.raises(TimeoutError):
        ends[0][1].recv(1)


@needs_root
def test_a_host_finds_its_own_address_by_its_name(network: ShapedNetwork):
    command = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    done = subprocess.run(
        [*network.command(2), sys.executable, "-c", command], capture_output=True, text=True
    )
    assert done.stdout.strip() == network.address(2)


@needs_root
def test_nothing_is_left_after_an_exception():
    network = ShapedNetwork(np.full((2, 2), 1e6))
    sleepers: list[psutil.Process] = []

    def fail_inside() -> None:
        with network:
            sleepers.append(psutil.Popen([*network.command(1), "sleep", "600"]))
            while sleepers[0].name() != "sleep":
                time.sleep(0.01)
            assert len(traces(network)) == 5  # two hosts and a switch; the files of two hosts
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert traces(network) == []
    assert sleepers[0].wait(timeout=5) != 0


@needs_root
def test_what_a_killed_process_left_is_removed_by_the_next_network():
    dying = "\n".join(
        [
            "import os, numpy, signal",
            "from experiments.benchmarks.network.shaped_network import ShapedNetwork",
            "network = ShapedNetwork(numpy.ones((2, 2))).__enter__()",
            "print(os.getpid(), flush=True)",
            "os.kill(os.getpid(), signal.SIGKILL)",
        ]
    )
    root = Path(shaped_network.__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", dying], cwd=root, capture_output=True, text=True)

    def left() -> bool:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        return f"shaped-{killed.stdout.strip()}-" in listed.stdout

    assert left()
    with ShapedNetwork(np.ones((1, 1))) as first, ShapedNetwork(np.ones((1, 1))) as second:
        assert traces(first)
        assert traces(second)
        assert not left()


@pytest.mark.parametrize("rates", [np.ones((2, 3)), np.zeros((2, 2)), np.full((2, 2), np.nan)])
def test_refuses_what_are_no_rates(rates: np.ndarray):
    with pytest.raises(InputError, match="rates"):
        ShapedNetwork(rates)


def test_says_that_it_needs_root_and_tools(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="root"):
        shaped_network.require_root_and_tools()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="Install iproute2"):
        shaped_network.require_root_and_tools()
