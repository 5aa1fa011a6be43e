"""What is sent over a shaped network arrives after the latency of its link, and whole."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from experiments.benchmarks.network.delays import Delays
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from tests.network.test_shaped_network import connect, listen, needs_root, transfer


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    with ShapedNetwork(np.full((3, 3), np.inf)) as network:
        yield network


def round_trips_s(network: ShapedNetwork, source: int, target: int) -> list[float]:
    """How long a byte takes there and back, again and again."""
    server = listen(network, target)
    own, (there, _) = connect(network, source, server), server.accept()
    found = []
    for _ in range(9):
        began_s = time.monotonic()
        own.sendall(b"a")
        there.sendall(there.recv(1))
        own.recv(1)
        found.append(time.monotonic() - began_s)
    return found


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
        rates = [transfer(network, *pair, 3_000_000) for pair in ((0, 1), (1, 0), (2, 0))]
        assert all(rate.result(60) > 1e5 for rate in rates)
