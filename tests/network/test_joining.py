"""A joiner measures a link as it is, although TCP is slow to use all of a long one."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from experiments.benchmarks.network.delays import Delays
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.asking import JoinClient
from skippipe_jax.connections.hello import Run
from tests.connections.meshes import KEYS, Host
from tests.connections.test_join_server import Run as Offers
from tests.network.test_shaped_network import needs_root

PORT = 61442
TO_BYTES_PER_S, BACK_BYTES_PER_S, LATENCY_S = 2.5e6, 1e6, 0.05
MEASURE_S, PATIENCE_S = 4.0, 60.0


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_a_joiner_measures_latency_and_bandwidths_of_a_long_link():
    has_measured = threading.Event()

    async def offer(address: str) -> None:
        host = Host(0, 2, Run(), keys=KEYS)
        host.join_server.inviting = Offers()
        await host.mesh.listen([address], PORT)
        await asyncio.to_thread(has_measured.wait, PATIENCE_S)

    async def measure(address: str):
        links = {}
        async with asyncio.timeout(PATIENCE_S):
            while not links:  # The host is still starting.
                links = await JoinClient(KEYS).ways({0: join_address(address, PORT)}, MEASURE_S)
        return links[0]

    rates = np.array([[np.inf, BACK_BYTES_PER_S], [TO_BYTES_PER_S, np.inf]])
    with ShapedNetwork(rates) as network, Delays(network) as delays:
        delays.set(np.full((2, 2), LATENCY_S))
        address = network.address(0)
        offering = threading.Thread(
            target=network.call, args=(0, lambda: asyncio.run(offer(address)))
        )
        offering.start()
        try:
            found = network.call(1, lambda: asyncio.run(measure(address)))
        finally:
            has_measured.set()
            offering.join()
    assert found.latency_s == pytest.approx(LATENCY_S, rel=0.2)
    # A rate is of packets, of which TCP carries 95.6% as payload.
    assert found.to == pytest.approx(0.956 * TO_BYTES_PER_S, rel=0.2)
    assert found.back == pytest.approx(0.956 * BACK_BYTES_PER_S, rel=0.2)
