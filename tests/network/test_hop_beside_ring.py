"""A hop that is offered while a ring has the link goes before what is left of the ring."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks.network.shaped_network import ShapedNetwork
from tests.harness.processes import started_processes
from tests.harness.training_runs import virtual_devices
from tests.network.hop_beside_ring import HOP_BYTES, RATE_BYTES_PER_S
from tests.network.test_shaped_network import needs_root

HOSTS = 2
# Two chunks that are under way, of 20 ms each, and what a busy machine makes of it.
BEHIND_CHUNKS_S, SLACK_S = 0.04, 0.3
PATIENCE_S = 60.0


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_a_hop_waits_for_the_chunks_that_are_under_way_and_not_for_the_ring(tmp_path: Path):
    rates = np.full((HOSTS, HOSTS), RATE_BYTES_PER_S)
    with ShapedNetwork(rates) as network, started_processes(tmp_path / "hosts") as processes:
        for host in range(HOSTS):
            words = str(host), network.address(host), tmp_path
            module = "-m", "tests.network.hop_beside_ring"
            namespace = network.namespace(host)
            processes.start(*module, *words, namespace=namespace, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * HOSTS, processes.outputs()
        sent, came = (json.loads(processes.output(h).splitlines()[-1]) for h in range(HOSTS))
    took_s = came["arrived_s"] - sent["offered_s"]
    own_s = HOP_BYTES / RATE_BYTES_PER_S
    assert took_s < own_s + BEHIND_CHUNKS_S + SLACK_S
    # Most of the ring came after it.
    assert came["averaged_s"] - came["arrived_s"] > 1.0
