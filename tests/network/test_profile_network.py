"""Links that are as slow as they are told to be are measured to be as slow."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from skippipe_sched.problem.links import GIBIBYTE

from experiments.benchmarks.network.shaped_network import ShapedNetwork
from tests.harness.processes import started_processes
from tests.harness.training_runs import write_config
from tests.network.test_shaped_network import needs_root

HOSTS = 4
# From the host of the row to that of the column; no pair has the same rate both ways.
MEGABYTES_PER_S = [[0, 0.3, 1, 4], [8, 0, 0.3, 1], [4, 8, 0, 0.3], [0.3, 4, 8, 0]]
PORT = 61441
PATIENCE_S = 150.0


def measure(network: ShapedNetwork, tmp_path: Path) -> Path:
    """Measure all hosts of a network, and return the file of the case."""
    config = write_config(tmp_path, plan="auto", cluster={"insecure": True})
    output = tmp_path / "case.yaml"
    with network, started_processes(tmp_path / "hosts") as processes:
        processes.start_hosts(
            HOSTS,
            *("-m", "skippipe_jax", "measure", "--config", config, "-o", output),
            coordinator=f"{network.address(0)}:{PORT}",
            namespaces=[*map(network.namespace, range(HOSTS))],
        )
        assert processes.exit_codes(PATIENCE_S) == [0] * HOSTS, processes.outputs()
    return output


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_every_bandwidth_is_within_a_tenth_of_its_rate(tmp_path: Path):
    rates = 1e6 * np.array(MEGABYTES_PER_S) + np.diag([np.inf] * HOSTS)
    case = measure(ShapedNetwork(rates), tmp_path)
    measured = json.loads(case.with_suffix(".measured.json").read_text())
    links = {(a["source"], a["target"]): a for host in measured["hosts"] for a in host["links"]}
    assert set(links) == set(itertools.permutations(range(HOSTS), 2))
    # They share the cores of this machine, which are timed once.
    assert [bool(host["timings"]) for host in measured["hosts"]] == [True, *[False] * (HOSTS - 1)]
    for pair, link in links.items():
        # A rate is of packets, of which TCP carries 95.6% as payload.
        assert link["bandwidth"] / (0.956 * rates[pair]) == pytest.approx(1.0, abs=0.1), pair
        # Nothing adds latency here: a request and its answer pass at once.
        assert 0 < link["latency_s"] < 0.1, (pair, link)
    # Each link has its own rate, whatever the others carry.
    assert yaml.safe_load(case.read_text())["contention"] == "link"


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_links_that_share_a_connection_are_found(tmp_path: Path):
    # Hosts 0 and 1 are at home; hosts 2 and 3 receive and send as much as their links carry.
    connections = np.array([[1e6, 3e6], [2e6, np.inf], [np.inf, np.inf], [np.inf, np.inf]])
    rates = np.full((HOSTS, HOSTS), 2e6)
    case = yaml.safe_load(measure(ShapedNetwork(rates, connections), tmp_path).read_text())
    assert case["contention"] == "node"
    keys = "uplink_GiB_per_s", "downlink_GiB_per_s"
    for node, shaped in zip(case["nodes"], connections, strict=True):
        for key, rate in zip(keys, shaped, strict=True):
            found = node.get(key, np.inf) * GIBIBYTE / 0.956
            assert found == rate or found == pytest.approx(rate, rel=0.1), (node, key)
