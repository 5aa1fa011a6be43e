"""Training on nodes that are meshes of eight devices equals the oracle, and no array is whole."""

from __future__ import annotations

from pathlib import Path

from tests.multihost.processes import started_processes
from tests.runtime.mesh_runs import DEVICES, EXAMPLES
from tests.training_runs import virtual_devices

RUNS = Path(__file__).with_name("mesh_runs.py")
PATIENCE_S = 300.0


def test_nodes_of_several_devices_equal_the_oracle(tmp_path: Path):
    with started_processes(tmp_path) as processes:
        # A thread for each device of a collective, and for what waits for one.
        processes.start(RUNS, PJRT_NPROC=str(3 * DEVICES), **virtual_devices(DEVICES))
        assert processes.exit_codes(PATIENCE_S) == [0], processes.outputs()
        for example in EXAMPLES:
            assert f"{example}: equal" in processes.output(0)
