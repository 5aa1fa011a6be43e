"""What an earlier version has trained, this one resumes and evaluates as that version does."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippipe_jax import Run
from skippipe_jax.storage.checkpoint import open_checkpoint, step_folder
from tests.harness.processes import started_processes
from tests.harness.training_hosts import CASE, TRAIN
from tests.harness.training_runs import (
    Arrays,
    arrays_in,
    assert_same_bits,
    settings,
    steps_done,
    virtual_devices,
    write_config,
)

ROOT = Path(__file__).parents[2]
COMMIT = "3e4586e01019d804d706739604d247c0582a1b2d"
STEPS, LONGER = 24, 36
"""After how many steps a former run is resumed, and when it ends."""
PATIENCE_S = 300.0
HELD_OUT = 8
TOLERANCE = 1e-6
"""Relative; of arrays, to their largest element."""


CLUSTER = {"heartbeat_timeout_s": 12.0, "connect_timeout_s": 120}
# Sections of the configuration, beside those that all have in common.
RUNS: dict[str, dict[str, Any]] = {
    "outer": {
        "averaging": {"mode": "outer", "every": 5, "fragments": 2, "delay": 2, "dtype": "float32"},
    },
    "recipe": {
        "model": {"layers": 3, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 24},
        "plan": {"case": CASE | {"stages": [2, 1, 1]}, "method": "balanced"},
        "recipe": {
            "full_every": 4,
            "phases": [{"from_step": 16, "max_swaps": 1}],
            "redraws": 2,
            "redraw_every": 3,
            "longest_redraw": None,
        },
    },
    "three hosts": {"cluster": CLUSTER | {"host_of_node": [0, 1, 2, 0]}},
}
"""Runs by kind; those of three hosts lose one, and checkpoints are copied to another folder.

They train the same bits as before, and the others do not. In outer mode the choice whether an
update is made has moved into the program of the update, which XLA rounds otherwise since. One host
adds the norms of gradients of stages in their order now, as several do, and not in the program's.
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the earlier version."""
    # An archive, as a worktree would stay registered when a test is killed.
    command = ["git", "archive", COMMIT, "skippipe_jax", "sched"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the history of this repository lacks the commit {COMMIT}")
    tree = tmp_path_factory.mktemp("former")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def copy_of(run_dir: Path) -> Path:
    """Where the checkpoints of a run are copied to."""
    return run_dir.with_name(f"{run_dir.name}_copy")


def environment(tree: Path) -> dict[str, str]:
    """The variables by which a process runs the code of a tree."""
    paths = os.pathsep.join([str(tree), str(tree / "sched")])
    return virtual_devices(1) | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}


def train(tree: Path, config: Path, run_dir: Path, hosts: int, steps: int, *more: str) -> None:
    """Train by the code of a tree, and lose a host on the way unless the run is resumed."""
    copied = {"checkpoint__copy_to": copy_of(run_dir).as_uri()} if hosts > 1 else {}
    given = settings(run_dir=run_dir, train__steps=steps, **copied)
    command = (*TRAIN, "--config", config, *given, *more)
    number = len([*config.parent.glob("outputs*")])
    with started_processes(config.parent / f"outputs{number}", really=True) as processes:
        if hosts == 1:
            processes.start(*command, **environment(tree))
        else:
            processes.start_hosts(hosts, *command, **environment(tree))
        staying = range(hosts)
        if hosts > 1 and "--resume" not in more:
            *staying, lost = staying
            processes.wait_until(lambda: steps_done(run_dir) >= 2, PATIENCE_S)
            processes.processes[lost].send_signal(signal.SIGKILL)
        for host in staying:
            assert processes.exit_code(host, PATIENCE_S) == 0, processes.outputs()


def evaluate(tree: Path, run_dir: Path) -> dict[str, Any]:
    """Evaluate the last checkpoint of a run by the command of a tree."""
    command = ["evaluate", "--run", str(run_dir), "--sequences", str(HELD_OUT), "--json"]
    done = subprocess.run(
        ["python", "-m", "skippipe_jax", *command],
        env=os.environ | environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def arrays_saved(run_dir: Path, step: int) -> Arrays:
    """All arrays of a checkpoint, those of single replicas among them."""
    return {
        f"{folder.name}/{name}": array
        for folder in sorted(open_checkpoint(run_dir, step).folder.iterdir())
        if folder.is_dir()
        for name, array in arrays_in(folder).items()
    }


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_is_resumed_and_evaluated(
    name: str, former: Path, tmp_path: Path
):
    hosts = 3 if name == "three hosts" else 1
    config = write_config(
        tmp_path,
        **{
            "plan": {"case": CASE, "method": "balanced"},
            "checkpoint": {"every": 8, "keep": 9},
            "validation": {"every": 6, "sequences": HELD_OUT},
            "cluster": CLUSTER,
            "replan": {"budget_s": 0},
            # As in training in earnest: a difference does not grow a thousandfold in a few steps.
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5},
        }
        | RUNS[name],
    )
    by_former, by_this = tmp_path / "by_former", tmp_path / "by_this"
    if hosts > 1:
        train(former, config, by_former, hosts, STEPS)
        # What is lost is fetched from the copy.
        shutil.copytree(copy_of(by_former), copy_of(by_this))
        train(former, config, by_former, hosts, LONGER, "--resume")
    else:  # It trains the same steps, whether it is resumed or not.
        train(former, config, by_former, hosts, LONGER)
        shutil.copytree(by_former, by_this)
        for step in range(STEPS + 1, LONGER + 1):
            shutil.rmtree(step_folder(by_this, step), ignore_errors=True)
    assert evaluate(ROOT, by_former) == evaluate(former, by_former)
    train(ROOT, config, by_this, hosts, LONGER, "--resume")

    found, expected = arrays_saved(by_this, LONGER), arrays_saved(by_former, LONGER)
    lines, others = Run(by_this).metrics, Run(by_former).metrics
    assert [line["step"] for line in lines] == list(range(1, LONGER + 1))
    if hosts > 1:
        assert_same_bits(found, expected)
        assert [figures(line) for line in lines] == [figures(line) for line in others]
        return
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        scale = np.max(np.abs(array), initial=0)
        np.testing.assert_allclose(found[key], array, rtol=0, atol=TOLERANCE * scale, err_msg=key)
    for line, other in zip(lines, others, strict=True):
        assert figures(line) == pytest.approx(figures(other), rel=TOLERANCE)


def figures(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of the metrics says of training, without times."""
    keys = ("loss", "tokens", "gradient_norm", "validation_loss")
    return {key: line[key] for key in keys if line[key] is not None}
