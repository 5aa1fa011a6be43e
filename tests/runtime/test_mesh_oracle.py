"""Training on nodes that are meshes of eight devices equals the oracle, and no array is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes import started_processes
from tests.harness.training_runs import virtual_devices
from tests.runtime.mesh_runs import DEVICES, EXAMPLES

RUNS = Path(__file__).with_name("mesh_runs.py")
PATIENCE_S = 300.0


@pytest.mark.parametrize(
    "example",
    [
        name if name == "collectives" else pytest.param(name, marks=pytest.mark.nightly)
        for name in EXAMPLES
    ],
)
def test_nodes_of_several_devices_equal_the_oracle(tmp_path: Path, example: str):
    with started_processes(tmp_path) as processes:
        # A thread for each device of a collective, and for what waits for one.
        processes.start(RUNS, example, PJRT_NPROC=str(3 * DEVICES), **virtual_devices(DEVICES))
        assert processes.exit_codes(PATIENCE_S) == [0], processes.outputs()
        assert f"{example}: equal" in processes.output(0)
