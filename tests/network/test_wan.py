"""The benchmark of distant hosts on four of them: iterations take about as long as planned."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.fork_server import fork_server


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_iterations_of_four_hosts_take_as_long_as_planned(tmp_path: Path):
    found = tmp_path / "wan.json"
    command = [
        fork_server().programs / "python",
        "-m",
        "experiments.benchmarks.wan",
        "--hosts",
        "4",
    ]
    settings = ["--methods", "skippipe", "--iterations", "2", "--budget", "3"]
    ended = subprocess.run(
        [*command, *settings, "--json", found], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(found.read_text())
    assert result["profiles"]["float32"]["bandwidth_deviation"] < 0.15
    [skippipe] = result["methods"]
    assert skippipe["method"] == "skippipe"
    # A machine that is busy with other things computes slower than it measured, now and then.
    assert skippipe["measured_s"] > 0.85 * skippipe["predicted_s"], skippipe
    assert min(skippipe["measured_each_s"]) < 1.25 * skippipe["predicted_s"], skippipe


def test_a_table_of_links_that_is_not_there_is_refused(tmp_path: Path):
    command = [
        fork_server().programs / "python",
        "-m",
        "experiments.benchmarks.wan",
        "--hosts",
        "4",
    ]
    ended = subprocess.run(
        [*command, "--links", tmp_path / "none.csv"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "none.csv" in ended.stderr
