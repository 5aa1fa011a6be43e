"""Why a pipeline in one process takes longer than a plain step: what XLA spends on what.

    python -m experiments.benchmarks.overhead_causes --json causes.json

The pipeline and the accumulating step of `experiments.benchmarks.overhead`, stage after stage in
both, on one thread of a processor, where operations run one after another and their seconds add
up. First they take turns, which gives the ratio. Then JAX's profiler records an iteration of each,
and the seconds of XLA's operations are added up by kind: the products of matrices, arrays that are
only copied or transposed, and all that is computed number by number or summed up. What is left of
an iteration passes between the programs: dispatch, and arrays that are made and given back.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import Iteration, in_turns, ratio, require_alike
from experiments.benchmarks.one_process import SEED, Workload, one_device, pipeline
from skippipe_jax.config import PRESETS, ModelConfig

PIPELINE, PLAIN = "pipeline", "plain"
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
PRODUCTS, COPIES, NUMBERS = "products", "copies", "number by number"
KINDS: Sequence[str] = (PRODUCTS, COPIES, NUMBERS)
BETWEEN = "between programs"
MOVING = {"copy", "transpose", "bitcast", "wrapped", "fusion", "slice", "dynamic-slice"}
"""What the name of an operation is made of that moves numbers and computes none."""
HOLDS_OTHERS = ("while", "call", "conditional")


def kind_of(operation: str) -> str | None:
    """Of an operation, by the name that XLA gives it; None if it is made of others."""
    name = operation.split(".")[0]
    if name.startswith(HOLDS_OTHERS):
        return None
    if name.startswith(("dot", "ynn", "custom-call")):
        # XLA's library for products also has the sums of some fusions.
        return PRODUCTS
    return COPIES if MOVING.issuperset(name.split("_")) else NUMBERS


def seconds_by_kind(iteration: Iteration, batches: Any) -> dict[str, float]:
    """Of one iteration, as JAX's profiler records it."""
    options = jax.profiler.ProfileOptions()
    # Every operation of a processor, and no line of Python.
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            start = time.perf_counter()
            iteration(batches)
            whole = time.perf_counter() - start
        [path] = Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
    spent = dict.fromkeys(KINDS, 0.0)
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            kind = kind_of(event["args"]["hlo_op"])
            if kind is not None:
                spent[kind] += event["dur"] / 1e6
    return {**spent, BETWEEN: whole - sum(spent.values())}


def measured(workload: Workload, warmup: int, turns: int, records: int) -> dict[str, Any]:
    """The ratio, and the seconds of both by kind: the medians of so many `records`."""
    programs: Mapping[str, Iteration] = {
        PIPELINE: pipeline(workload),
        PLAIN: one_device(workload, scanned=False, accumulating=True),
    }
    random = np.random.default_rng(SEED)
    batches = [workload.random_batches(random) for _ in range(warmup + turns + records)]
    taken = in_turns(programs, batches[: warmup + turns], warmup)
    require_alike(taken, workload.model.compute_dtype)
    recorded: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for own in batches[warmup + turns :]:
        for name, iteration in programs.items():
            recorded[name].append(seconds_by_kind(iteration, own))
    return {
        "ratio": round(ratio(taken[PIPELINE].seconds, taken[PLAIN].seconds), 4),
        "seconds_per_iteration": {name: round(own.median, 4) for name, own in taken.items()},
        "seconds_by_kind": {name: _medians(own) for name, own in recorded.items()},
    }


def _medians(recorded: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = recorded[0]
    return {kind: round(statistics.median(own[kind] for own in recorded), 4) for kind in kinds}


def table(results: Mapping[str, Any]) -> str:
    """A line for each kind: the seconds of both, and the difference as a share of the plain one."""
    by_kind = results["seconds_by_kind"]
    whole = sum(by_kind[PLAIN].values())
    lines = [f"{'seconds of an iteration':<24}{PIPELINE:>9}{PLAIN:>9}  more, of the plain step"]
    for kind, seconds in by_kind[PIPELINE].items():
        other = by_kind[PLAIN][kind]
        lines.append(f"{kind:<24}{seconds:>9.3f}{other:>9.3f}{(seconds - other) / whole:>+9.3f}")
    lines.append(f"in turns, not recorded, the pipeline takes {results['ratio']:.3f} times as long")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    parser = reporting.parser("overhead_causes", __doc__)
    numbers = {
        "replicas": (2, "replicas of each stage"),
        "sequence_length": (256, "tokens of a sequence"),
        "turns": (10, "timed turns"),
        "records": (3, "records by the profiler"),
    }
    reporting.add_numbers(parser, numbers)
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        # XLA reads them once, before anything else.
        command = [sys.executable, "-m", "experiments.benchmarks.overhead_causes", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ONE_THREAD)
    return reporting.run(parser, _run)


def _run(arguments: argparse.Namespace) -> int:
    report = reporting.begun("overhead_causes")
    model = ModelConfig(**PRESETS["tiny"])
    workload = Workload(
        model, 4, arguments.replicas, 12 // arguments.replicas, 4, arguments.sequence_length
    )
    results = measured(workload, 2, arguments.turns, arguments.records)
    return reporting.finish(report | {"results": results}, table(results), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
