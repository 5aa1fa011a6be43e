"""Nodes of several devices on several hosts: equal to the oracle, resumed on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Plan, Predicted
from skippipe_sched.timing.simulate import simulate

from skippipe_jax import Run
from skippipe_jax.config import load_config
from skippipe_jax.data.batches import TrainingBatches
from tests import oracle
from tests.multihost.processes import started_processes
from tests.multihost.test_training_hosts import (
    ORACLE_CASE,
    PATIENCE_S,
    WORKER,
    data_of,
    read_replicas,
)
from tests.training_runs import (
    arrays_of_checkpoint,
    assert_same_bits,
    by_name,
    settings,
    virtual_devices,
    write_config,
)

STAGES = ((0, 1), (2,), (3, 4))
PATHS = ((0, 2, 3), (0, 4, 2), (1, 2))
HOST_OF_NODE = [0, 1, 2, 0, 2]
# Replicas of the data stage have equal meshes on two hosts, those of the last stage others.
MESHES = ((2, 2), (2, 2), (1, 2), (2, 1), (1, 1))
OTHER_MESHES = ((1, 1), (1, 1), (2, 2), (1, 2), (1, 2))
STEPS = 2


def plan_of(meshes: tuple[tuple[int, int], ...]) -> Plan:
    case = parse_case(
        ORACLE_CASE
        | {
            "nodes": [{"mesh": {"fsdp": fsdp, "tensor": tensor}} for fsdp, tensor in meshes],
            "stages": [len(nodes) for nodes in STAGES],
            "path_length": len(STAGES),
            "microbatches_per_data_node": [2, 1],
        }
    )
    order = simulate(case, STAGES, PATHS).order
    return Plan("by hand", STAGES, PATHS, order, Predicted(0, 0, 0, 0), case)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "runtime", ["independent", pytest.param("distributed", marks=pytest.mark.slow)]
)
def test_hosts_of_meshes_equal_the_oracle_and_go_on_under_others(tmp_path: Path, runtime: str):
    plan_of(MESHES).save(tmp_path / "plan.json")
    plan_of(OTHER_MESHES).save(tmp_path / "other.json")
    path = write_config(
        tmp_path,
        run_dir=str(tmp_path / "run"),
        plan={"file": str(tmp_path / "plan.json")},
        model={
            "vocabulary_size": 260,
            "width": 16,
            "heads": 4,
            "kv_heads": 2,
            "ffn_width": 24,
            "context": 32,
            "layers": 3,
        },
        data=data_of(tmp_path, "documents"),
        optimizer={
            "learning_rate": 3e-2,
            "warmup_steps": 1,
            "decay_steps": 10,
            "weight_decay": 0.1,
            "clip_norm": 0.5,
            "epsilon": 1e-2,
        },
        train={"steps": STEPS},
        cluster={"host_of_node": HOST_OF_NODE, "runtime": runtime},
        network={"deadline_s": 60},
    )
    with started_processes(tmp_path / "hosts") as processes:
        command = (WORKER, tmp_path / "replicas", "--config", path)
        processes.start_hosts(3, *command, **virtual_devices(4))
        assert processes.exit_codes(PATIENCE_S) == [0] * 3, processes.outputs()
    for stage, replicas in enumerate(read_replicas(tmp_path / "replicas")):
        for saved in replicas:
            assert_same_bits(saved, arrays_of_checkpoint(tmp_path / "run", STEPS)[stage])
    resumed: dict[str, Any] = {
        "plan__file": tmp_path / "other.json",
        "train__steps": STEPS + 1,
        "cluster__host_of_node": "null",
    }
    with started_processes(tmp_path / "alone") as processes:
        command = (WORKER, tmp_path / "resumed", "--config", path, "--resume")
        processes.start(*command, *settings(**resumed), **virtual_devices(8))
        assert processes.exit_codes(PATIENCE_S) == [0], processes.outputs()
    assert_equals_the_oracle(path, tmp_path / "replicas", STEPS)
    losses = assert_equals_the_oracle(path, tmp_path / "resumed", STEPS + 1)
    found = [line["loss"] for line in Run(tmp_path / "run").metrics]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)


def assert_equals_the_oracle(path: Path, folder: Path, steps: int) -> list[float]:
    config, plan = load_config(path), plan_of(MESHES)
    batches, sent = TrainingBatches(config.data), len(PATHS)
    iterations = [[batches[step * sent + m] for m in range(sent)] for step in range(steps)]
    stage_paths = [[plan.stage_of[node] for node in path] for path in PATHS]
    expected, losses = oracle.train(
        config.model, config.optimizer, stage_paths, len(STAGES), iterations, config.seed
    )
    for stage, replicas in enumerate(read_replicas(folder)):
        truth = by_name({"parameters": expected[stage]})
        for replica in replicas:
            error = oracle.relative_error({name: replica[name] for name in truth}, truth)
            assert error < 2e-5, f"stage {stage}: {error}"
    return losses
