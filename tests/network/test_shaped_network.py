"""The shaped network does what the tests and benchmarks on it take for granted."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from skippipe_sched.errors import InputError

from experiments.benchmarks.network import shaped_network
from experiments.benchmarks.network.shaped_network import ShapedNetwork

# Of this address and port, whose host may still be starting.
CONNECT = """
import socket, sys, time
def connect(*address, timeout=60.0):
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address, timeout=timeout)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
"""
SEND = f"{CONNECT}connect(sys.argv[1], int(sys.argv[2])).sendall(bytes(int(sys.argv[3])))"
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    connection, _ = server.accept()
began_s, received = time.monotonic(), 0
while arrived := connection.recv(1 << 20):
    received += len(arrived)
print(received / (time.monotonic() - began_s))
"""
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ, reason="only root may make a shaped network"
)


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    rates = np.full((4, 4), 1e6)
    rates[0, 1], rates[1, 0] = 0.25e6, 8e6
    with ShapedNetwork(rates) as network:
        yield network


def transfer(
    network: ShapedNetwork, source: int, target: int, size: int
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start a receiver and a sender; the receiver prints the bytes per second that arrived."""
    address = [network.address(target), str(5000 + source)]
    python = [sys.executable, "-I", "-S", "-c"]
    receive = [*network.command(target), *python, RECEIVE, *address]
    send = [*network.command(source), *python, SEND, *address, str(size)]
    receiver = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
    return receiver, subprocess.Popen(send, text=True)


def goodput(receiver: subprocess.Popen[str]) -> float:
    return float(receiver.communicate(timeout=60)[0])


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
    receivers = [transfer(network, *pair, int(3 * network.rates[pair]))[0] for pair in pairs]
    shares = [goodput(r) / network.rates[pair] for r, pair in zip(receivers, pairs, strict=True)]
    # The rates differ by factors of 4 and more, so a pause of a busy machine may take its share.
    assert shares == pytest.approx([1.0] * len(pairs), abs=0.2)


@needs_root
def test_the_link_between_two_hosts_is_cut_and_no_other(network: ShapedNetwork):
    network.set_paths([(0, 2), (2, 0)], up=False)
    receiver, _ = transfer(network, 0, 2, 1000)
    for pair in [(0, 1), (1, 0), (3, 2), (2, 1)]:
        assert goodput(transfer(network, *pair, 1000)[0]) > 0
    assert receiver.poll() is None
    network.set_paths([(0, 2), (2, 0)], up=True)
    assert goodput(receiver) > 0


ECHO = """
import select, socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    ends = [server.accept()[0] for _ in range(2)]
    while True:
        for end in select.select(ends, [], [])[0]:
            end.sendall(end.recv(1))
"""
SPEAK = f"""{CONNECT}
first = connect(sys.argv[1], 5000, timeout=1.0)
first.sendall(b"a")
print(first.recv(1), first.getsockname()[1], flush=True)
input()
first.sendall(b"b")
try:
    print(first.recv(1))
except TimeoutError:
    print("silence")
first.close()
"""


@needs_root
def test_a_connection_is_silenced_and_no_other(network: ShapedNetwork):
    there = network.address(2)
    python = [sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen([*network.command(2), *python, ECHO, there]) as server:
        speakers = [
            subprocess.Popen(
                [*network.command(host), *python, SPEAK, there],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in (0, 1)
        ]
        try:
            told = [speaker.stdout.readline().split() for speaker in speakers]  # pyright: ignore
            assert [word for word, _ in told] == ["b'a'", "b'a'"]
            network.silence(0, 2, (int(told[0][1]), 5000))
            outputs = [speaker.communicate("\n", timeout=30)[0] for speaker in speakers]
        finally:
            for process in (server, *speakers):
                process.kill()
    assert outputs == ["silence\n", "b'b'\n"]


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
