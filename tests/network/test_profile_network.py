"""Links that are as slow as they are told to be are measured to be as slow."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmarks.shaped_network import ShapedNetwork
from tests.multihost.processes import started_processes
from tests.network.test_shaped_network import needs_root
from tests.training_runs import write_config

HOSTS = 4
# From the host of the row to that of the column; no pair has the same rate both ways.
MEGABYTES_PER_S = [[0, 0.3, 1, 4], [8, 0, 0.3, 1], [4, 8, 0, 0.3], [0.3, 4, 8, 0]]
PORT = 61441
PATIENCE_S = 150.0


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_every_bandwidth_is_within_a_tenth_of_its_rate(tmp_path: Path):
    config = write_config(tmp_path, plan="auto", cluster={"insecure": True})
    output = tmp_path / "case.yaml"
    rates = 1e6 * np.array(MEGABYTES_PER_S) + np.diag([np.inf] * HOSTS)
    with ShapedNetwork(rates) as network, started_processes(tmp_path / "hosts") as processes:
        processes.start_hosts(
            HOSTS,
            *("-m", "skippipe_jax", "measure", "--config", config, "-o", output),
            coordinator=f"{network.address(0)}:{PORT}",
            namespaces=[*map(network.namespace, range(HOSTS))],
        )
        assert processes.exit_codes(PATIENCE_S) == [0] * HOSTS, processes.outputs()
    measured = json.loads((tmp_path / "case.measured.json").read_text())
    links = {(a["source"], a["target"]): a for host in measured["hosts"] for a in host["links"]}
    assert set(links) == set(itertools.permutations(range(HOSTS), 2))
    for pair, link in links.items():
        # A rate is of packets, of which TCP carries 95.6% as payload.
        assert link["bandwidth"] / (0.956 * rates[pair]) == pytest.approx(1.0, abs=0.1), pair
        # Nothing adds latency here: a request and its answer pass at once.
        assert 0 < link["latency_s"] < 0.1, (pair, link)
