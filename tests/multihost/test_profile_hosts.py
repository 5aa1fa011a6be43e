"""Several hosts measure each other: every pair, every node, and never left hanging."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
from skippipe_sched.problem.open_case import load_cases

from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from tests.harness.processes import Processes
from tests.harness.training_runs import settings, write_config

PROFILE = ("-m", "skippipe_jax", "measure")
PATIENCE_S = 120.0


@pytest.mark.nightly
def test_three_hosts_measure_a_case_that_is_planned(processes: Processes, tmp_path: Path):
    output = tmp_path / "case.yaml"
    config = write_config(tmp_path, plan="auto")
    processes.start_hosts(3, *PROFILE, "--config", config, "-o", output)
    assert processes.exit_codes(PATIENCE_S) == [0, 0, 0], processes.outputs()
    for case in load_cases(output):
        assert all(node.forward_s > 0 for node in case.nodes)
        assert set(case.link_table.links) == set(permutations(["host 0", "host 1", "host 2"], 2))
    measured = json.loads((tmp_path / "case.measured.json").read_text())
    links = [link for host in measured["hosts"] for link in host["links"]]
    assert {(link["source"], link["target"]) for link in links} == set(permutations(range(3), 2))
    assert all(len(link["round_trips_s"]) > 1 and len(link["transfers"]) > 1 for link in links)
    # They share the cores of this machine, which are timed once.
    assert [bool(host["timings"]) for host in measured["hosts"]] == [True, False, False]
    planned = subprocess.run(
        [
            *(sys.executable, "-m", "skippipe_sched", "plan", output),
            *("--method", "balanced", "-o", tmp_path / "plan.json"),
        ],
        capture_output=True,
        text=True,
    )
    assert planned.returncode == 0, planned.stderr


@pytest.mark.nightly
def test_a_host_that_answers_no_more_is_named(processes: Processes, tmp_path: Path):
    config, output = write_config(tmp_path, plan="auto"), tmp_path / "case.yaml"
    # Silence would be noticed late.
    impatient = settings(network__deadline_s=3, cluster__heartbeat_timeout_s=PATIENCE_S)
    processes.start_hosts(2, *PROFILE, "--config", config, "-o", output, *impatient)
    # Before, JAX itself waits for the devices of all hosts.
    processes.wait_until(lambda: "links opened" in processes.output(0), PATIENCE_S)
    processes.processes[1].send_signal(signal.SIGSTOP)
    assert processes.exit_code(0, PATIENCE_S / 2) == LOST_HOST_EXIT_CODE, processes.outputs()
    # Where it waits is by chance: for a message, or for a transfer.
    late = r"timed out (after 3 s )?waiting for .* from host 1 \((network\.deadline_s = 3 s|since )"
    assert re.search(late, processes.output(0)), processes.output(0)
    assert "Traceback" not in processes.output(0)
    assert not output.exists()
