"""The benchmark of services on three hosts: a token takes about as long as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.test_link_benchmarks import result_of
from tests.network.test_shaped_network import needs_root


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_token_takes_as_long_as_predicted_and_is_that_of_one_device(tmp_path: Path):
    # It refuses answers that are not those of one device.
    sizes = ["--hosts", "3", "--sequences", "4", "--tokens", "16", "--turns", "1"]
    report = result_of("serve_wan", tmp_path, *sizes)
    over_hosts, one_host = report["wan"], report["one_host"]
    assert 1 / 1.5 < over_hosts["seconds_per_token_to_predicted"] < 1.5
    assert 1 / 1.5 < over_hosts["tokens_per_second_to_predicted"] < 1.5
    assert over_hosts["times_as_many_as_one_slot"] > 2
    # A service measures its links while they are shaped.
    assert all(0.7 < ratio < 1.3 for ratio in over_hosts["bandwidths_to_shaped"])
    assert one_host["one_slot_to_generate"] > 0
    assert one_host["times_as_many_together"] > 0
