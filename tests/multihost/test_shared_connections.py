"""Hosts offer hops when the connection of a node has taken those before them, as planned."""

from pathlib import Path

import pytest

from skippipe_jax.storage.recording import measured_timeline
from skippipe_jax.storage.run_dir import RunDir
from tests.harness.processes import Processes
from tests.harness.training_runs import SMALL_CASE, settings, virtual_devices, write_config

STEPS = 3
# What an activation takes the connection of a node; the network of this machine takes next to none.
HOP_S = 0.3
BYTES = 1e5
# By so much the clocks of two hosts may differ, as far as they know.
CLOCKS_S = 0.02


@pytest.mark.nightly
def test_hops_to_two_hosts_leave_one_after_another(processes: Processes, tmp_path: Path):
    case = {
        **SMALL_CASE,
        "locations": ["Belgium", "Iowa", "Oregon"],
        "contention": "node",
        "uplink_Mbit_per_s": 8 * BYTES / HOP_S / 1e6,
        "activation_bytes": BYTES,
        "stage_bytes": 1e5,
    }
    config = write_config(
        tmp_path,
        plan={"case": case, "method": "balanced"},
        train={"steps": STEPS},
        trace="every 1",
    )
    run_dir = tmp_path / "run"
    command = ("-m", "skippipe_jax.train", "--config", config, *settings(run_dir=run_dir))
    processes.start_hosts(3, *command, **virtual_devices(1))
    assert processes.exit_codes(180) == [0] * 3, processes.outputs()
    plan = RunDir(run_dir).plan()
    for step in range(1, STEPS + 1):
        transfers = measured_timeline(run_dir, plan, step).transfers
        for node in range(3):
            free_s, waited_s = 0.0, 0.0
            sent = [transfer for transfer in transfers if transfer.source == node]
            for transfer in sorted(sent, key=lambda transfer: transfer.ready_s):
                begin_s = max(transfer.ready_s, free_s)
                assert transfer.end_s >= begin_s - CLOCKS_S
                waited_s += begin_s - transfer.ready_s
                free_s = begin_s + HOP_S
            if node == 0:
                assert waited_s > HOP_S / 2, "the second forward ends while the first leaves"
