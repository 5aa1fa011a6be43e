"""Several hosts measure each other: every pair, every node, and never left hanging."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from tests.harness.processes import Processes
from tests.harness.training_runs import settings, write_config

PROFILE = ("-m", "skippipe_jax", "measure")
PATIENCE_S = 120.0


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
