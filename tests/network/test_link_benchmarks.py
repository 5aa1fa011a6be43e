"""The benchmarks of links measure what they say; their figures in full are for quiet machines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Run, Timeline

from experiments.benchmarks import loopback
from tests.fork_server import fork_server
from tests.network.test_shaped_network import needs_root
from tests.sched.examples import plan_of

REPOSITORY = Path(__file__).parents[2]


def result_of(module: str, folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "result.json"
    command = [fork_server().programs / "python", "-m", f"experiments.benchmarks.{module}", *words]
    finished = subprocess.run(
        [*command, "--json", str(file)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(file.read_text())


@pytest.mark.nightly
@needs_root
@pytest.mark.alone
def test_transfers_and_rings_use_most_of_a_link(tmp_path: Path):
    result = result_of("links", tmp_path, "--small")
    assert [(row["source"], row["target"], row["rate"]) for row in result["transfers"]] == [
        (0, 1, 4e6),
        (0, 1, 4e6),
        (1, 0, 2e6),
    ]
    [ring] = result["rings"]
    assert ring["slowest_rate"] == 2e6
    # Of two replicas, each sends all of its gradients once.
    assert ring["bound_s"] == pytest.approx(ring["bytes"] / 2e6)
    for row in (*result["transfers"], ring):
        assert 0.7 < row["share"] < 1, row


def test_compute_alone_is_the_plan_without_its_hops():
    plan = plan_of([[0], [1]], [[0, 1]], backward_ratio=2, loss_ratio=0.5, path_length=2)
    compute_s = 0.1 * (1 + 1 + 0.5 + 2 + 2)
    assert loopback.last_end_s(simulate_plan(plan)) > compute_s
    assert loopback.compute_alone_s(plan) == pytest.approx(compute_s)


def test_what_operations_took_is_told_from_what_lies_between_them():
    plan = plan_of([[0], [1]], [[0, 1], [0, 1]], path_length=2)
    planned = simulate_plan(plan)
    runs = tuple(
        Run(run.operation, 3 * run.arrived_s, 3 * run.start_s, 3 * run.start_s + 2 * took_s)
        for run in planned.runs
        if (took_s := run.end_s - run.start_s)
    )
    slowdown = loopback.slowdowns(plan, Timeline(2, runs, planned.transfers, ()))
    assert list(slowdown.values()) == pytest.approx([2] * len(runs))
    slower_s = loopback.compute_alone_s(plan, loopback.stretch_of(plan, slowdown))
    assert slower_s == pytest.approx(2 * loopback.compute_alone_s(plan))
    assert loopback.by_kind(slowdown.items()) == pytest.approx({"F": 2, "L": 2, "B": 2})
    # Both nodes go from one operation to the next at once, unless the input is not there yet.
    assert loopback.dispatches_s(planned) == pytest.approx([0] * (len(planned.runs) - 2))
