"""Replicas that go apart: hosts come to what one process does, and go on without those lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import skippipe_jax as sp
from skippipe_jax.runtime.state import MOMENTUM
from skippipe_jax.storage.checkpoint import open_checkpoint, replica_name
from tests.harness.partial_models import evaluate_run
from tests.harness.processes import Processes
from tests.harness.training_hosts import CASE, PACED, PATIENCE_S, TRAIN, TrainingHosts
from tests.harness.training_runs import (
    arrays_in,
    arrays_of_checkpoint,
    settings,
    virtual_devices,
    write_config,
)

STEPS, RESUMED_AT, EVERY = 26, 9, 4
LONGER = 80
HELD_OUT = 8
AVERAGING = {"mode": "outer", "every": EVERY, "fragments": 2, "delay": 2, "dtype": "int8"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("outer"),
        plan={"case": CASE, "method": "balanced"},
        averaging=AVERAGING,
        train={"steps": STEPS},
        checkpoint={"every": RESUMED_AT, "keep": 9},
        validation={"every": 13, "sequences": HELD_OUT},
        cluster={"heartbeat_timeout_s": 12.0, "connect_timeout_s": 120},
        replan={"budget_s": 0},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 5, "decay_steps": 100},
    )


@pytest.mark.nightly
def test_hosts_that_resume_in_the_middle_of_averaging_equal_one_process(
    begin: Callable[..., TrainingHosts], processes: Processes, config: Path, tmp_path: Path
):
    """After step 9 what was sent after step 8 is under way. One process has begun."""
    one, hosts = tmp_path / "one", tmp_path / "run"
    for run_dir, steps in ((one, STEPS), (hosts, RESUMED_AT)):
        given = settings(run_dir=run_dir, train__steps=steps)
        processes.start(*TRAIN, "--config", config, *given, **virtual_devices(1))
    assert processes.exit_codes(PATIENCE_S) == [0, 0], processes.outputs()
    begin("--resume", *settings(cluster__host_of_node="[0,1,0,1]"), hosts=2).ends_well(0, 1)
    assert "outer parameters" not in processes.outputs()

    for found, expected in zip(
        arrays_of_checkpoint(hosts, STEPS), arrays_of_checkpoint(one, STEPS), strict=True
    ):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    lines, others = sp.Run(hosts).metrics, sp.Run(one).metrics
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line, other in zip(lines, others, strict=True):
        assert abs(line["loss"] - other["loss"]) < 1e-5
        # These hosts ended once after step 9, and validated there, too.
        if line["step"] != RESUMED_AT:
            assert line["validation_loss"] == other["validation_loss"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    # Validated is what is saved: the outer parameters.
    outer_loss = evaluate_run(hosts, STEPS, HELD_OUT).loss
    assert lines[-1]["validation_loss"] == pytest.approx(outer_loss, rel=1e-6)


def assert_replicas_have_one_outer_state(run_dir: Path, step: int) -> None:
    """Of the outer state, momentum is saved by each: the same bits, though inner states differ."""
    own = open_checkpoint(run_dir, step).record.replica_states
    assert own is not None
    assert own.counts == (2, 2)
    checkpoint = open_checkpoint(run_dir, step).folder
    for stage in range(2):
        first, second = (arrays_in(checkpoint / replica_name(stage, place)) for place in range(2))
        assert any(not np.array_equal(first[name], second[name]) for name in first)
        momenta = [name for name in first if name.startswith(MOMENTUM)]
        assert momenta
        for name in momenta:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.nightly
def test_hosts_are_lost_and_come_back_in_the_middle_of_averaging(
    begin: Callable[..., TrainingHosts],
):
    """First one is lost, and comes back; then the leader. All replicas apply the same."""
    run = begin(*PACED, *settings(train__steps=LONGER, validation__every=20))
    run.wait_until_step(EVERY + 1)
    run.signal(3, signal.SIGKILL)
    run.wait_until_members(0, 1, 2)
    run.start(3, "--resume")
    run.wait_until_members(0, 1, 2, 3)
    run.wait_for_steps(EVERY)
    run.signal(0, signal.SIGKILL)
    run.wait_until_members(1, 2, 3)
    run.start(0, "--resume")
    run.wait_until_members(0, 1, 2, 3)
    run.ends_well(0, 1, 2, 3)
    lines = sp.Run(run.run_dir).metrics
    assert [line["step"] for line in lines] == [*range(1, LONGER + 1)]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert_replicas_have_one_outer_state(run.run_dir, LONGER)
