"""Marks of packed documents reach the stages of another process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from skippipe_jax import run_folder
from skippipe_jax.config import load_config
from tests import oracle
from tests.multihost.packing_worker import PackedBatches
from tests.multihost.processes import started_processes
from tests.multihost.test_training_hosts import (
    ORACLE_MODEL,
    ORACLE_STEPS,
    PATIENCE_S,
    UNEVEN,
    plan_of,
    read_replicas,
)
from tests.training_runs import by_name, virtual_devices, write_config

WORKER = Path(__file__).with_name("packing_worker.py")


def test_training_over_two_processes_equals_that_on_documents_one_by_one(tmp_path: Path):
    stages, microbatches = UNEVEN
    plan = plan_of(stages, microbatches)
    plan.save(tmp_path / "plan.json")
    path = write_config(
        tmp_path,
        run_dir=str(tmp_path / "run"),
        plan={"file": str(tmp_path / "plan.json")},
        model=ORACLE_MODEL | {"layers": 3, "recompute": "block"},
        optimizer={"learning_rate": 3e-2, "warmup_steps": 1, "clip_norm": 0.5, "epsilon": 1e-2},
        train={"steps": ORACLE_STEPS},
        # The data nodes, and all others: no activation stays in a process.
        cluster={"host_of_node": [0, 0, 1, 1, 1]},
        execution="ready-first",
    )
    packing = ("--set", "data.packing=documents")
    with started_processes(tmp_path / "hosts") as processes:
        command = (WORKER, tmp_path / "replicas", "--config", path, *packing)
        processes.start_hosts(2, *command, **virtual_devices(1))
        assert processes.exit_codes(PATIENCE_S) == [0, 0], processes.outputs()

    config = load_config(path, packing[1:])
    batches, sent = PackedBatches(config.data), len(microbatches)
    expected, losses = oracle.train(
        config.model,
        config.optimizer,
        [[plan.stage_of[node] for node in path] for path in microbatches],
        len(stages),
        [[batches[step * sent + m] for m in range(sent)] for step in range(ORACLE_STEPS)],
        config.seed,
    )
    for stage, replicas in enumerate(read_replicas(tmp_path / "replicas")):
        truth = by_name({"parameters": expected[stage]})
        for replica in replicas:
            error = oracle.relative_error({name: replica[name] for name in truth}, truth)
            assert error < 2e-5, f"stage {stage}: {error}"
    found = [line["loss"] for line in run_folder.read_metrics(tmp_path / "run")]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)
