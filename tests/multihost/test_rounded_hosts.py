"""Hops in 8 bits: one process and nine come to the same parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from skippipe_jax import Run
from skippipe_jax.config import load_config
from skippipe_jax.models.footprint import hop_bytes
from tests import oracle
from tests.multihost.processes import started_processes
from tests.training_runs import arrays_of_checkpoint, settings, virtual_devices, write_config

TRAIN = ("-m", "skippipe_jax.train")
PATIENCE_S = 180.0
HOSTS, STEPS = 9, 10


@pytest.mark.nightly
def test_nine_processes_equal_one_with_hops_in_8_bits(tmp_path: Path):
    """What is drawn for a gradient's rounding depends on no host, and rounds alike everywhere."""
    quickstart = load_config(Path("experiments/quickstart.yaml"))
    path = write_config(
        tmp_path,
        plan={"case": quickstart.plan.case, "method": quickstart.plan.method},
        train={"steps": STEPS},
        checkpoint={"every": STEPS},
        network={"activation_dtype": "int8", "gradient_rounding": "stochastic"},
    )
    one, nine, otherwise = tmp_path / "one", tmp_path / "nine", tmp_path / "otherwise"
    nearest = settings(run_dir=otherwise, network__gradient_rounding="nearest")
    with started_processes(tmp_path / "outputs") as processes:
        command = (*TRAIN, "--config", path)
        processes.start(*command, *settings(run_dir=one), **virtual_devices(2))
        processes.start(*command, *nearest, **virtual_devices(2))
        processes.start_hosts(HOSTS, *command, *settings(run_dir=nine), **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0] * (2 + HOSTS), processes.outputs()
        # As JAX says of what was given up for nothing.
        assert "donated" not in processes.outputs()

    # Sums over processes differ in their last bits, by which a few gradients are rounded otherwise.
    folders = (nine, otherwise, one)
    for found, other, expected in zip(
        *(arrays_of_checkpoint(folder, STEPS) for folder in folders), strict=True
    ):
        parameters = {name: array for name, array in expected.items() if "parameters" in name}
        error, all_otherwise = (
            oracle.relative_error({name: own[name] for name in parameters}, parameters)
            for own in (found, other)
        )
        assert error < all_otherwise / 10
    lines, others = Run(nine).metrics, Run(one).metrics
    for line, other in zip(lines, others, strict=True):
        assert abs(line["loss"] - other["loss"]) < 1e-3
        assert line["bytes_sent"] == other["bytes_sent"]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    # Two microbatches' worth of a token's 16 channels and one scale, not of 4 bytes for each.
    size = hop_bytes(load_config(path))
    assert size.activation == size.gradient == 2 * 32 * (16 + 2)
