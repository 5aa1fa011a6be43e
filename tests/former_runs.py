"""Runs that an earlier version of the project has made, to be resumed and evaluated by this one.

python -m tests.former_runs FOLDER [NAME ...]

trains the runs of these names (default: all) in a folder by the source of commit `COMMIT`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.multihost.processes import Processes, started_processes
from tests.ports import free_port
from tests.training_runs import settings, steps_done, virtual_devices, write_config

ROOT = Path(__file__).parents[1]
COMMIT = "3e4586e01019d804d706739604d247c0582a1b2d"
STEPS, LONGER = 24, 36
"""After how many steps a former run ends, and to how many it is resumed."""
PATIENCE_S = 300.0
HELD_OUT = 8

CASE = {
    "nodes": 4,
    "locations": ["here"],
    "links": [],
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "stages": [2, 2],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}


@dataclass(frozen=True)
class FormerRun:
    """How a run is made.

    Attributes:
        sections: of its configuration, beside those that all have in common.
        hosts: how many train it.
        lost_host: the one that is killed while it trains.
        is_copied: whether its checkpoints are copied to another folder.
        is_exact: whether this version trains the same bits. In outer mode it does not: the choice
            whether an update is made has moved into the program of the update, which XLA rounds
            otherwise since.
    """

    sections: Mapping[str, Any] = field(default_factory=dict)
    hosts: int = 1
    lost_host: int | None = None
    is_copied: bool = False
    is_exact: bool = True

    def settings(self, run_dir: Path) -> list[str]:
        """Return the arguments for a run in this folder."""
        copied = {"checkpoint__copy_to": copy_of(run_dir).as_uri()} if self.is_copied else {}
        return settings(run_dir=run_dir, **copied)


RUNS = {
    "copied": FormerRun(is_copied=True),
    "outer": FormerRun(
        {
            "averaging": {
                "mode": "outer",
                "every": 5,
                "fragments": 2,
                "delay": 2,
                "dtype": "float32",
            },
        },
        is_exact=False,
    ),
    "recipe": FormerRun(
        {
            "model": {"layers": 3, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 24},
            "plan": {"case": CASE | {"stages": [2, 1, 1]}, "method": "balanced"},
            "recipe": {
                "full_every": 4,
                "phases": [{"from_step": 16, "max_swaps": 1}],
                "redraws": 2,
                "redraw_every": 3,
                "longest_redraw": None,
            },
        }
    ),
    "lost_host": FormerRun(hosts=4, lost_host=3),
}


def former_tree(folder: Path) -> Path | None:
    """Write the source of the former version into a new folder; None if Git does not have it."""
    # An archive, as a worktree would stay registered when a test is killed.
    found = subprocess.run(
        ["git", "archive", COMMIT, "skippipe_jax", "sched"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if found.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def copy_of(run_dir: Path) -> Path:
    """Return where the checkpoints of a run are copied to."""
    return run_dir.with_name(f"{run_dir.name}_copy")


def configure(folder: Path, run: FormerRun) -> Path:
    """Write the configuration of a run, and its text, into a folder."""
    common = {
        "plan": {"case": CASE, "method": "balanced"},
        "checkpoint": {"every": 8, "keep": 2},
        "validation": {"every": 6, "sequences": HELD_OUT},
        "cluster": {"heartbeat_timeout_s": 12.0, "connect_timeout_s": 120},
        "replan": {"budget_s": 0},
        # As in training in earnest: a difference does not grow a thousandfold in a few steps.
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5},
    }
    return write_config(folder, **common | dict(run.sections))


def environment(tree: Path) -> dict[str, str]:
    """Return the variables by which a process runs the code of a tree."""
    paths = os.pathsep.join([str(tree), str(tree / "sched")])
    return virtual_devices(1) | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}


def train(tree: Path, config: Path, run_dir: Path, run: FormerRun, *more: str) -> None:
    """Train by the code of a tree, and lose a host on the way unless the run is resumed."""
    number = len([*config.parent.glob("outputs*")])
    with started_processes(config.parent / f"outputs{number}", really=True) as processes:
        command = ["-m", "skippipe_jax.train", "--config", config, *run.settings(run_dir), *more]
        if run.hosts == 1:
            processes.start(*command, **environment(tree))
        else:
            command += ["--coordinator", f"127.0.0.1:{free_port()}", "--hosts", str(run.hosts)]
        for host in range(run.hosts if run.hosts > 1 else 0):
            processes.start(*command, "--host-id", str(host), **environment(tree))
        lost = None if "--resume" in more else run.lost_host
        if lost is not None:
            lose(processes, lost, run_dir)
        for host in range(run.hosts):
            if host != lost:
                assert processes.exit_code(host, PATIENCE_S) == 0, processes.outputs()


def lose(processes: Processes, host: int, run_dir: Path) -> None:
    """Kill a host when a few steps are done."""
    processes.wait_until(lambda: steps_done(run_dir) >= 2, PATIENCE_S)
    processes.processes[host].send_signal(signal.SIGKILL)


def make(tree: Path, folder: Path, run: FormerRun) -> Path:
    """Train a run by the code of a tree; returns its configuration, beside which lies `run`."""
    folder.mkdir(parents=True)
    config = configure(folder, run)
    train(tree, config, folder / "run", run, *settings(train__steps=STEPS))
    return config


def resume(tree: Path, config: Path, run_dir: Path, run: FormerRun) -> None:
    """Resume a run in this folder by the code of a tree."""
    train(tree, config, run_dir, run, "--resume", *settings(train__steps=LONGER))


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


def main() -> None:
    """Make the runs that were asked for."""
    parser = argparse.ArgumentParser(description="Make runs with an earlier version.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], metavar="NAME")
    arguments = parser.parse_args()
    tree = former_tree(arguments.folder / "tree")
    if tree is None:
        raise SystemExit(f"the history of this repository lacks the commit {COMMIT}")
    for name in arguments.names or RUNS:
        make(tree, arguments.folder / name, RUNS[name])


if __name__ == "__main__":
    main()
