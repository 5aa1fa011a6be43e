"""Experts side by side on the nodes of one case, each lane on its own: when is each done?

    python -m experiments.benchmarks.side_by_side --json FILE

Six processes train the three experts of experiments/experts/side_by_side.yaml at the same time, as
`skippipe experts` divides the nodes: the lane with most steps has most nodes. Network and speed are
emulated, so that two cores stand for six nodes. What is compared is the seconds of all iterations
but the first of each expert, in which programs are compiled, measured against the division's plan,
and between lanes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skippipe_sched.figures.tables import aligned

from experiments.benchmarks.harness import reporting
from skippipe_jax import Run
from skippipe_jax.experts import work
from skippipe_jax.experts.config import load_experts
from skippipe_jax.experts.tasks import Workspace
from skippipe_jax.storage.run_dir import RunDir

CONFIG = Path(__file__).parents[1] / "experts" / "side_by_side.yaml"


def measured() -> dict[str, dict[str, float]]:
    """Train what is missing; returns when each lane was done, as planned and as measured [s]."""
    config = load_experts(CONFIG)
    place = Workspace(config, Path(config.folder).absolute())
    work.train(place)
    [arm] = work.arms_of(place, None)
    lanes = {}
    for lane, domains in arm.lanes.items():
        planned_s = measured_s = 0.0
        for domain in domains:
            run = place.run_dir(arm.members[domain])
            seconds = [line["seconds_per_iteration"] for line in Run(run).metrics]
            iteration_s = RunDir(run).plan().predicted.iteration_s
            planned_s += iteration_s * (len(seconds) - 1)
            measured_s += sum(seconds[1:])
        lanes[lane] = {
            "nodes": arm.members[domains[0]].hosts,
            "steps": sum(arm.members[domain].steps for domain in domains),
            "planned_s": round(planned_s, 2),
            "measured_s": round(measured_s, 2),
        }
    return lanes


def figures_of(lanes: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What is written of the lanes: each, and by which share the last is done after the first."""
    ends = [own["measured_s"] for own in lanes.values()]
    return {"lanes": dict(lanes), "apart": round(max(ends) / min(ends) - 1, 4)}


def table(figures: Mapping[str, Any]) -> str:
    """A line for each lane."""
    rows = [["lane", "nodes", "steps", "planned, s", "measured, s", "ratio"]]
    for lane, own in figures["lanes"].items():
        planned_s, measured_s = own["planned_s"], own["measured_s"]
        figures_of_lane = f"{planned_s:.1f}", f"{measured_s:.1f}", f"{measured_s / planned_s:.3f}"
        rows.append([lane, str(own["nodes"]), str(own["steps"]), *figures_of_lane])
    return f"{aligned(rows, [0])}\nthe last lane ends {figures['apart']:.1%} after the first"


def measure(_: argparse.Namespace, report: dict[str, Any]) -> str:
    """Train, and compare the lanes."""
    report |= figures_of(measured())
    return table(report)


if __name__ == "__main__":
    sys.exit(reporting.run("side_by_side", __doc__, measure))
