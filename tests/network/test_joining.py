"""A joiner measures a link as it is, although TCP is slow to use all of a long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks.network.delays import Delays
from experiments.benchmarks.network.shaped_network import ShapedNetwork
from tests.network.test_shaped_network import needs_root

REPOSITORY = Path(__file__).parents[2]
TO_BYTES_PER_S, BACK_BYTES_PER_S, LATENCY_S = 2.5e6, 1e6, 0.05
PATIENCE_S = 60.0


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_a_joiner_measures_latency_and_bandwidths_of_a_long_link():
    rates = np.array([[np.inf, BACK_BYTES_PER_S], [TO_BYTES_PER_S, np.inf]])
    command = [sys.executable, "-m", "tests.network.joining"]
    with ShapedNetwork(rates) as network, Delays(network) as delays:
        delays.set(np.full((2, 2), LATENCY_S))
        address = network.address(0)
        # It is killed with the network.
        subprocess.Popen([*network.command(0), *command, "host", address], cwd=REPOSITORY)
        joiner = [*network.command(1), *command, "joiner", address]
        measured = subprocess.check_output(joiner, cwd=REPOSITORY, timeout=PATIENCE_S)
    found = json.loads(measured)
    assert found["latency_s"] == pytest.approx(LATENCY_S, rel=0.2)
    # A rate is of packets, of which TCP carries 95.6% as payload.
    assert found["to"] == pytest.approx(0.956 * TO_BYTES_PER_S, rel=0.2)
    assert found["back"] == pytest.approx(0.956 * BACK_BYTES_PER_S, rel=0.2)
