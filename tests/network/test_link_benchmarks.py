"""The benchmarks of links measure what they say; their figures in full are for quiet machines."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.timing.simulate import simulate_plan

from experiments.benchmarks.harness.launching import AllHosts
from experiments.benchmarks.network import loopback, wan
from tests.network.test_shaped_network import needs_root
from tests.sched.examples import TWO_NODES, plan_of
from tests.test_benchmarks import report_of


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_iterations_of_four_hosts_take_as_long_as_planned(tmp_path: Path):
    settings = ["--arms", "skippipe", "--iterations", "2", "--budget", "3"]
    result = report_of(tmp_path, "network.wan", "--hosts", "4", *settings)
    assert result["profiles"]["float32"]["bandwidth_deviation"] < 0.15
    [skippipe] = result["methods"]
    assert skippipe["method"] == "skippipe"
    # A machine that is busy with other things computes slower than it measured, now and then.
    assert skippipe["measured_s"] > 0.85 * skippipe["predicted_s"], skippipe
    assert min(skippipe["measured_each_s"]) < 1.25 * skippipe["predicted_s"], skippipe


class Profiles(AllHosts):
    """Hosts whose `profile` finds these bandwidths between two, one after another."""

    def __init__(self, folder: Path, bandwidths: list[tuple[float, float]]):
        super().__init__(Mock(), folder, 2)
        self.bandwidths = bandwidths

    def run(self, name: str, module: str, *words: str | Path) -> None:
        to, back = (rate / GIBIBYTE for rate in self.bandwidths.pop(0))
        links = [["here", "there", 1, to], ["there", "here", 1, back]]
        (self.folder / "case.yaml").write_text(yaml.safe_dump(TWO_NODES | {"links": links}))


@pytest.mark.parametrize(
    ("bandwidths", "deviation"),
    [
        ([(0.9e6, 1.9e6)], 0.1),
        ([(0.9e6, 0.01e6), (1e6, 1.8e6)], 0.1),
        ([(0.9e6, 0.01e6)] * wan.MOST_PROFILES, 0.995),
    ],
)
def test_the_link_that_is_furthest_from_its_rate_is_named_and_measured_again(
    bandwidths: list[tuple[float, float]],
    deviation: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    hosts = Profiles(tmp_path, [*bandwidths])
    rates = np.array([[np.inf, 1e6], [2e6, np.inf]])
    _, profile = wan.profiled(hosts, tmp_path / "config.yaml", rates)
    assert hosts.bandwidths == []
    assert profile["bandwidth_deviation"] == pytest.approx(deviation)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(bandwidths)
    named = "rate: 99.5%, from host 1 to host 0"
    assert [line.endswith(named) for line in said] == [back == 0.01e6 for _, back in bandwidths]


def test_compute_alone_is_the_plan_without_its_hops():
    plan = plan_of([[0], [1]], [[0, 1]], backward_ratio=2, loss_ratio=0.5, path_length=2)
    compute_s = 0.1 * (1 + 1 + 0.5 + 2 + 2)
    assert simulate_plan(plan).iteration_s > compute_s
    assert loopback.compute_alone_s(plan) == pytest.approx(compute_s)
