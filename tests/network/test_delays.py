"""What is sent over a shaped network arrives after the latency of its link, and whole."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from experiments.benchmarks.network.delays import Delays
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from tests.network.test_shaped_network import goodput, needs_root, transfer

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listens", flush=True)
    end = server.accept()[0]
    while come := end.recv(1):
        end.sendall(come)
"""
SPEAK = """
import socket, sys, time
end = socket.create_connection((sys.argv[1], 5000))
for _ in range(9):
    began_s = time.monotonic()
    end.sendall(b"a")
    end.recv(1)
    print(time.monotonic() - began_s)
"""


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    with ShapedNetwork(np.full((3, 3), np.inf)) as network:
        yield network


def round_trips_s(network: ShapedNetwork, source: int, target: int) -> list[float]:
    """How long a byte takes there and back, again and again."""
    python, there = [sys.executable, "-I", "-S", "-c"], network.address(target)
    with subprocess.Popen(
        [*network.command(target), *python, ECHO, there], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        speak = [*network.command(source), *python, SPEAK, there]
        done = subprocess.run(speak, capture_output=True, text=True, check=True, timeout=60)
        server.kill()
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_every_directed_link_has_its_own_latency(network: ShapedNetwork):
    with Delays(network) as delays:
        assert min(round_trips_s(network, 0, 1)) < 0.01
        delays.set(np.array([[0, 0.05, 0], [0.1, 0, 0.02], [0, 0.01, 0]]))
        for pair, expected_s in (((0, 1), 0.15), ((1, 2), 0.03), ((0, 2), 0.0)):
            taken_s = round_trips_s(network, *pair)
            assert min(taken_s) >= expected_s
            # A machine that is busy with other things is late now and then.
            assert min(taken_s) < expected_s + 0.01
    assert min(round_trips_s(network, 0, 1)) < 0.01


@needs_root
def test_large_amounts_arrive_whole(network: ShapedNetwork):
    with Delays(network) as delays:
        delays.set(np.full((3, 3), 0.005))
        receivers = [transfer(network, *pair, 3_000_000)[0] for pair in ((0, 1), (1, 0), (2, 0))]
        assert all(goodput(receiver) > 1e5 for receiver in receivers)
