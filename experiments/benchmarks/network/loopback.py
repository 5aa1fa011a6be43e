"""How much longer an iteration takes than its compute alone, where the network costs nothing.

    python -m experiments.benchmarks.network.loopback --json FILE      (needs Linux and taskset)

Two hosts on 127.0.0.1, each with a core of its own, serve one of two stages each. They measure
themselves, plan a full pipeline for what they found, and train along it. The shortest that an
iteration could take is that plan with hops that cost nothing, and then an update: what operations
take is what `skippipe measure` measured while nothing else ran. Recorded iterations tell where
the rest of the time goes:

    operations  how many times as long as in the profile, by kind
    runtime     how many times as long an iteration took as its compute alone, by what its own
                operations took: what remains when they are no longer than in the profile
    dispatch    from when an operation could start (its node free, its input there) until it did
    hop         from the end of an operation until the next one's input is on the other node
    between     from the last operation of an iteration to the first of the next: summing totals,
                the update, and fetching batches

The machine must be quiet: both cores are busy all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from skippipe_sched import fields
from skippipe_sched.problem.links import Link, LinkTable
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Run, TimeFactors, Timeline

import skippipe_jax as sp
from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.launching import AllHosts, OwnCores, write_config
from skippipe_jax.storage.recording import measured_timeline, recorded_steps
from skippipe_jax.storage.run_dir import CASE, RunDir

# The first iteration compiles, and the second may still load what others compiled.
WARMUP_ITERATIONS = 2
TRACE_EVERY = 5


@dataclass(frozen=True)
class Workload:
    """What is trained: two stages of `layers` blocks each, whose forward takes some 60 ms."""

    width: int = 256
    layers: int = 2
    microbatch_size: int = 4
    sequence_length: int = 256
    microbatches: int = 8
    memory: int = 3


def main() -> int:
    """Parse the command line, measure, and print where an iteration's time goes."""
    parser = reporting.parser("network.loopback", __doc__)
    timed = f"timed iterations, after {WARMUP_ITERATIONS} others"
    reporting.add_numbers(parser, {"iterations": (20, timed)})
    return reporting.run(parser, _run)


def _run(arguments: argparse.Namespace) -> int:
    fields.integer(arguments.iterations, "--iterations", TRACE_EVERY)
    network, workload = OwnCores(), Workload()
    report = reporting.begun("network.loopback")
    with tempfile.TemporaryDirectory(prefix="loopback-") as name:
        folder = Path(name)
        config = config_of(folder, workload, arguments.iterations)
        AllHosts(network, folder, 2).run("train", "skippipe_jax.train", "--config", config)
        figures = figures_of(folder / "run")
    report |= {"workload": dataclasses.asdict(workload), **figures}
    return reporting.finish(report, table(figures), arguments.json)


def config_of(folder: Path, workload: Workload, iterations: int) -> Path:
    """Write the configuration of a run that measures its hosts, plans for them, and trains."""
    config = {
        "run_dir": str(folder / "run"),
        "compilation_cache": str(folder / "compiled"),
        "trace": f"every {TRACE_EVERY}",
        "model": {
            "width": workload.width,
            "layers": 2 * workload.layers,
            "ffn_width": 3 * workload.width,
            "context": workload.sequence_length,
        },
        "plan": {
            "measure": True,
            "method": "full",
            "case": {
                "stages": [1, 1],
                "path_length": 2,
                "microbatches": workload.microbatches,
                "memory": workload.memory,
            },
        },
        "data": {
            "sequence_length": workload.sequence_length,
            "microbatch_size": workload.microbatch_size,
        },
        "train": {"steps": WARMUP_ITERATIONS + iterations},
        "checkpoint": {"every": WARMUP_ITERATIONS + iterations},
    }
    return write_config(folder / "config.yaml", config)


def figures_of(run_dir: Path) -> dict[str, Any]:
    """Seconds of iterations and of their compute alone, and where the difference comes from."""
    plan = RunDir(run_dir).plan()
    profile = json.loads((run_dir / CASE).with_suffix(".measured.json").read_text())
    each_s = [line["seconds_per_iteration"] for line in sp.Run(run_dir).metrics]
    timed_s = each_s[WARMUP_ITERATIONS:]
    compute_s = compute_alone_s(plan) + update_s(profile)
    steps = [step for step in recorded_steps(run_dir) if step > WARMUP_ITERATIONS]
    recorded_s = [each_s[step - 1] for step in steps]
    timelines = [measured_timeline(run_dir, plan, step) for step in steps]
    slowdown = [slowdowns(plan, timeline) for timeline in timelines]
    own_compute_s = [compute_alone_s(plan, stretch_of(plan, of)) for of in slowdown]
    return {
        "ratio": statistics.median(timed_s) / compute_s,
        "median_s": statistics.median(timed_s),
        "least_s": min(timed_s),
        "compute_s": compute_s,
        "each_s": each_s,
        "largest_error_of_costs": profile["largest_error_of_costs"],
        "operations": by_kind(entry for of in slowdown for entry in of.items()),
        "runtime": statistics.median(
            seconds / (own_s + update_s(profile))
            for seconds, own_s in zip(recorded_s, own_compute_s, strict=True)
        ),
        "dispatch_s": statistics.median(d for t in timelines for d in dispatches_s(t)),
        "hop_s": statistics.median(h.end_s - h.ready_s for t in timelines for h in t.transfers),
        "between_s": statistics.median(
            seconds - last_end_s(timeline)
            for seconds, timeline in zip(recorded_s, timelines, strict=True)
        ),
    }


def compute_alone_s(plan: Plan, stretch: TimeFactors | None = None) -> float:
    """Seconds of the plan's operations in the plan's order, when hops cost nothing."""
    table = plan.case.link_table
    free = LinkTable({pair: Link(0.0, math.inf) for pair in table.links}, Link(0.0, math.inf))
    case = dataclasses.replace(plan.case, link_table=free, hop_overhead_s=0.0)
    return last_end_s(simulate_plan(dataclasses.replace(plan, case=case), stretch))


def update_s(profile: dict[str, Any]) -> float:
    """Seconds of the update, which the hosts do at the same time: of the slowest stage."""
    timings = [stages for host in profile["hosts"] for stages in host["timings"].values()]
    return max(stage["update"]["median_s"] for stages in timings for stage in stages)


def last_end_s(timeline: Timeline) -> float:
    return max(run.end_s for run in timeline.runs)


def slowdowns(plan: Plan, timeline: Timeline) -> dict[Operation, float]:
    """How many times as long each operation took as the case of the profile says."""
    return {
        run.operation: (run.end_s - run.start_s)
        / plan.case.duration(
            run.operation.kind, run.operation.node, plan.stage_of[run.operation.node]
        )
        for run in timeline.runs
    }


def by_kind(slowdown: Iterable[tuple[Operation, float]]) -> dict[str, float]:
    """The median of each kind of operation."""
    of_kinds: dict[str, list[float]] = defaultdict(list)
    for operation, times in slowdown:
        of_kinds[operation.kind].append(times)
    return {kind: statistics.median(values) for kind, values in of_kinds.items()}


def stretch_of(plan: Plan, slowdown: Mapping[Operation, float]) -> TimeFactors:
    """For the simulator; all paths are full, and so their chains are equally long."""
    chains = [microbatch_chain(number, path) for number, path in enumerate(plan.microbatches)]
    operations = np.array([[slowdown[operation] for operation in chain] for chain in chains])
    return TimeFactors(operations, np.ones_like(operations), np.ones(len(plan.stages)))


def dispatches_s(timeline: Timeline) -> list[float]:
    """Seconds from when operations could start until they did, but for the first of each node."""
    of_nodes: dict[int, list[Run]] = defaultdict(list)
    for run in timeline.runs:
        of_nodes[run.operation.node].append(run)
    return [
        run.start_s - max(before.end_s, run.arrived_s)
        for runs in of_nodes.values()
        for before, run in pairwise(runs)
    ]


def table(figures: dict[str, Any]) -> str:
    """All figures that matter, as lines of text."""
    operations = ", ".join(f"{kind} {times:.3f}" for kind, times in figures["operations"].items())
    return "\n".join(
        [
            f"iteration {figures['median_s']:.3f} s (least {figures['least_s']:.3f}), "
            f"its compute alone {figures['compute_s']:.3f} s: {figures['ratio']:.3f} times",
            f"operations, times as long as in the profile: {operations}",
            f"runtime {figures['runtime']:.3f} times, "
            f"dispatch {1e3 * figures['dispatch_s']:.1f} ms, hop {1e3 * figures['hop_s']:.1f} ms, "
            f"between iterations {1e3 * figures['between_s']:.1f} ms",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
