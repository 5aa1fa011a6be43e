"""How much longer an iteration takes through a pipeline than in a plain one-device program.

    python -m experiments.benchmarks.overhead --json FILE
    python -m experiments.benchmarks.overhead --causes --json FILE

The pipeline is what training runs: a `Runtime` in one process, all nodes on one device, and full
paths, so that both sides do the same work. Against it run one-device programs as one would write
them without a pipeline: one jitted step with donated state for forward, backward, clipping and
AdamW, from the same first parameters, on the same batches, with the same recomputation. A plain
step takes all microbatches of the iteration as one batch; an accumulating one adds up the gradients
of one microbatch after another, in a scan. Either goes through the layers in the way that suits it:
`scanned`, all layers in one scan, or `in turn`, stage after stage as the pipeline does.

All programs take turns, iteration by iteration, so that a busy machine slows all of them. "Times"
is the median of (seconds of the pipeline / seconds of that program) over the turns; the ratio of
the last line is the one to the quickest plain step. Peak memory comes from two iterations of each
program in a process of its own, which finds it compiled: the device's own count, or on a CPU the
resident memory, less that of a process which only starts JAX.

With --causes the pipeline and the accumulating step, stage after stage in both, run on one thread
of a processor, where operations run one after another and their seconds add up. First they take
turns, which gives the ratio. Then JAX's profiler records an iteration of each, and the seconds of
XLA's operations are added up by kind: the products of matrices, arrays that are only copied or
transposed, and all that is computed number by number or summed up. What is left of an iteration
passes between the programs: dispatch, and arrays that are made and given back.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import Iteration, in_turns, ratio, require_alike
from experiments.benchmarks.one_process import SEED, Workload, one_device, pipeline
from skippipe_jax.campaign.running import ONE_THREAD
from skippipe_jax.config import PRESETS, ModelConfig
from skippipe_jax.config.model import RECOMPUTE

TIMES, NOTHING = "times", "nothing"
PIPELINE = "pipeline"
PLAIN = ("plain, scanned", "plain, in turn")
ACCUMULATING = "accumulating, in turn"
PROGRAMS: dict[str, Callable[[Workload], Iteration]] = {
    PIPELINE: pipeline,
    PLAIN[0]: functools.partial(one_device, scanned=True, accumulating=False),
    PLAIN[1]: functools.partial(one_device, scanned=False, accumulating=False),
    "accumulating, scanned": functools.partial(one_device, scanned=True, accumulating=True),
    ACCUMULATING: functools.partial(one_device, scanned=False, accumulating=True),
}
PRODUCTS, COPIES, NUMBERS = "products", "copies", "number by number"
KINDS: Sequence[str] = (PRODUCTS, COPIES, NUMBERS)
BETWEEN = "between programs"
MOVING = {"copy", "transpose", "bitcast", "wrapped", "fusion", "slice", "dynamic-slice"}
"""What the name of an operation is made of that moves numbers and computes none."""
HOLDS_OTHERS = ("while", "call", "conditional")


def time_in_turns(workload: Workload, warmup: int, turns: int) -> dict[str, list[float]]:
    """Seconds of every iteration of every program.

    Raises:
        RuntimeError: if the programs' losses differ, so that they did not do the same work.
    """
    iterations = {name: create(workload) for name, create in PROGRAMS.items()}
    random = np.random.default_rng(SEED)
    batches = [workload.random_batches(random) for _ in range(warmup + turns)]
    taken = in_turns(iterations, batches, warmup)
    require_alike(taken, workload.model.compute_dtype)
    return {name: own.seconds for name, own in taken.items()}


def summary(workload: Workload, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and how the pipeline compares with each program and with the quickest plain step."""
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    times = {name: ratio(seconds[PIPELINE], own) for name, own in seconds.items()}
    quickest = min(PLAIN, key=lambda name: medians[name])
    return {
        "recompute": workload.model.recompute,
        "workload": asdict(workload),
        "ratio": round(times[quickest], 4),
        "ratio_to": quickest,
        "programs": {
            name: {
                "seconds_per_iteration": round(medians[name], 5),
                "tokens_per_second": round(workload.tokens / medians[name], 1),
                "pipeline_takes_times": round(times[name], 4),
                "seconds": [round(value, 5) for value in own],
            }
            for name, own in seconds.items()
        },
    }


def peak_memory_of(name: str, workload: Workload) -> int:
    """Peak bytes of this process after two iterations of the program, or after none."""
    device = jax.devices()[0]
    if name != NOTHING:
        iteration, random = PROGRAMS[name](workload), np.random.default_rng(SEED)
        for _ in range(2):
            iteration(workload.random_batches(random))
    return reporting.peak_memory_bytes(device)


def table(result: dict[str, Any]) -> str:
    """The result of one recomputation mode, a line for each program."""
    lines = [
        f"recompute {result['recompute']:<15}{'s/iteration':>12}{'tokens/s':>11}{'peak MB':>9}"
        f"{'times':>7}"
    ]
    for name, own in result["programs"].items():
        lines.append(
            f"  {name:<23}{own['seconds_per_iteration']:>12.4f}{own['tokens_per_second']:>11.0f}"
            f"{own['peak_memory_bytes'] / 1e6:>9.0f}{own['pipeline_takes_times']:>7.3f}"
        )
    ratio = f"  the pipeline takes {result['ratio']:.3f} times as long as the fastest plain step"
    return "\n".join([*lines, f"{ratio} ({result['ratio_to']})"])


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


def causes_of(workload: Workload, warmup: int, turns: int, records: int) -> dict[str, Any]:
    """The ratio, and the seconds of both by kind: the medians of so many `records`."""
    programs = {name: PROGRAMS[name](workload) for name in (PIPELINE, ACCUMULATING)}
    random = np.random.default_rng(SEED)
    batches = [workload.random_batches(random) for _ in range(warmup + turns + records)]
    taken = in_turns(programs, batches[: warmup + turns], warmup)
    require_alike(taken, workload.model.compute_dtype)
    recorded: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for own in batches[warmup + turns :]:
        for name, iteration in programs.items():
            recorded[name].append(seconds_by_kind(iteration, own))
    return {
        "ratio": round(ratio(taken[PIPELINE].seconds, taken[ACCUMULATING].seconds), 4),
        "seconds_per_iteration": {name: round(own.median, 4) for name, own in taken.items()},
        "seconds_by_kind": {
            name: {
                kind: round(statistics.median(record[kind] for record in own), 4) for kind in own[0]
            }
            for name, own in recorded.items()
        },
    }


def table_of_causes(results: Mapping[str, Any]) -> str:
    """A line for each kind: the seconds of both, and the difference as a share of the plain one."""
    by_kind = results["seconds_by_kind"]
    plain = by_kind[ACCUMULATING]
    whole = sum(plain.values())
    lines = [f"{'seconds of an iteration':<24}{PIPELINE:>9}{'plain':>9}  more, of the plain step"]
    for kind, seconds in by_kind[PIPELINE].items():
        more = (seconds - plain[kind]) / whole
        lines.append(f"{kind:<24}{seconds:>9.3f}{plain[kind]:>9.3f}{more:>+9.3f}")
    lines.append(f"in turns, not recorded, the pipeline takes {results['ratio']:.3f} times as long")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> str | None:
    """Measure in this process what it is asked for as a part, or why, or how much longer."""
    if arguments.part is not None:
        report["found"] = _part(arguments)
        return None
    if arguments.causes:
        report["machine"] = reporting.describe_machine()
        workload = _workload(arguments, ModelConfig(**PRESETS["tiny"]))
        given = arguments.warmup, arguments.turns, arguments.records
        report["results"] = causes_of(workload, *given)
        return table_of_causes(report["results"])
    report["results"] = []
    with tempfile.TemporaryDirectory() as cache:
        for recompute in arguments.recompute:
            run_part = functools.partial(_in_own_process, arguments, recompute, cache)
            result = run_part(TIMES)
            report["machine"] = result.pop("machine")
            nothing = run_part(NOTHING)
            for name, own in result["programs"].items():
                own["peak_memory_bytes"] = run_part(name) - nothing
            print(table(result), flush=True)
            report["results"].append(result)
    return None


def _in_own_process(arguments: argparse.Namespace, recompute: str, cache: str, part: str) -> Any:
    """What a process of its own finds for one part; the parts share their compiled programs."""
    own = ["--recompute", recompute, "--part", part]
    for name in (*WORKLOAD, *TURNS):
        own += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    caching = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = {name: os.environ.get(name, value) for name, value in caching.items()}
    module = "-m", "experiments.benchmarks.overhead"
    return reporting.found_by(*module, *own, **environment)["found"]


def _part(arguments: argparse.Namespace) -> Any:
    [recompute] = arguments.recompute
    model = ModelConfig(**PRESETS["tiny"], recompute=recompute)
    workload = _workload(arguments, model)
    if arguments.part != TIMES:
        return peak_memory_of(arguments.part, workload)
    before = reporting.describe_machine()
    seconds = time_in_turns(workload, **{name: getattr(arguments, name) for name in TURNS})
    return summary(workload, seconds) | {"machine": before}


def _workload(arguments: argparse.Namespace, model: ModelConfig) -> Workload:
    return Workload(model, **{name: getattr(arguments, name) for name in WORKLOAD})


WORKLOAD = {
    "stages": (4, 1, "stages of the pipeline"),
    "replicas": (2, 1, "replicas of each stage"),
    "microbatches_per_data_node": (6, 1, "microbatches of each data node in an iteration"),
    "microbatch_size": (4, 1, "sequences of a microbatch"),
    "sequence_length": (256, 1, "tokens of a sequence"),
}
TURNS = {
    "warmup": (2, 0, "warm-up turns"),
    "turns": (10, 1, "counted turns"),
}


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    has_one_thread = all(os.environ.get(name) == value for name, value in ONE_THREAD.items())
    if "--causes" in sys.argv and not has_one_thread:
        # XLA reads them once, before anything else.
        command = [sys.executable, "-m", "experiments.benchmarks.overhead", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ONE_THREAD)
    numbers = WORKLOAD | TURNS | {"records": (3, 1, "records of --causes by the profiler")}
    modes = {"choices": RECOMPUTE, "nargs": "+", "default": RECOMPUTE}
    options = {
        "--recompute": modes | {"help": "modes to measure (all)"},
        "--causes": {"action": "store_true", "help": "what XLA spends on what"},
        # What one of this program's own processes measures.
        "--part": {"choices": (TIMES, NOTHING, *PROGRAMS), "help": argparse.SUPPRESS},
    }
    return reporting.run(
        "overhead", __doc__, measure, numbers=numbers, options=options, takes_device=False
    )


if __name__ == "__main__":
    sys.exit(main())
