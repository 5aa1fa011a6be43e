"""How much longer an iteration takes through a pipeline than in a plain one-device program.

    python -m experiments.benchmarks.overhead --json experiments/results/overhead_MACHINE.json

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
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import Iteration, in_turns, ratio, require_alike
from experiments.benchmarks.one_process import SEED, Workload, one_device, pipeline
from skippipe_jax.config import PRESETS, ModelConfig
from skippipe_jax.config.model import RECOMPUTE

TIMES, NOTHING = "times", "nothing"
PIPELINE = "pipeline"
PLAIN = ("plain, scanned", "plain, in turn")
PROGRAMS: dict[str, Callable[[Workload], Iteration]] = {
    PIPELINE: pipeline,
    PLAIN[0]: functools.partial(one_device, scanned=True, accumulating=False),
    PLAIN[1]: functools.partial(one_device, scanned=False, accumulating=False),
    "accumulating, scanned": functools.partial(one_device, scanned=True, accumulating=True),
    "accumulating, in turn": functools.partial(one_device, scanned=False, accumulating=True),
}


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


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    return reporting.run(_parser(), _run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.part is not None:
        print(json.dumps(_part(arguments)))
        return 0
    described, results = {}, []
    with tempfile.TemporaryDirectory() as cache:
        for recompute in arguments.recompute:
            run_part = functools.partial(_in_own_process, arguments, recompute, cache)
            result = run_part(TIMES)
            described = result.pop("machine")
            nothing = run_part(NOTHING)
            for name, own in result["programs"].items():
                own["peak_memory_bytes"] = run_part(name) - nothing
            print(table(result), flush=True)
            results.append(result)
    report = reporting.begun("overhead", described) | {"results": results}
    return reporting.finish(report, None, arguments.json)


def _in_own_process(arguments: argparse.Namespace, recompute: str, cache: str, part: str) -> Any:
    """What a process of its own finds for one part; the parts share their compiled programs."""
    own = ["--recompute", recompute, "--part", part]
    for name in (*WORKLOAD, *TURNS):
        own += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    finished = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.overhead", *own],
        env={
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        | os.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout)


def _part(arguments: argparse.Namespace) -> Any:
    [recompute] = arguments.recompute
    model = ModelConfig(**PRESETS["tiny"], recompute=recompute)
    workload = Workload(model, **{name: getattr(arguments, name) for name in WORKLOAD})
    if arguments.part != TIMES:
        return peak_memory_of(arguments.part, workload)
    before = reporting.describe_machine()
    seconds = time_in_turns(workload, **{name: getattr(arguments, name) for name in TURNS})
    return summary(workload, seconds) | {"machine": before}


WORKLOAD = {
    "stages": (4, "stages of the pipeline"),
    "replicas": (2, "replicas of each stage"),
    "microbatches_per_data_node": (6, "microbatches of each data node in an iteration"),
    "microbatch_size": (4, "sequences of a microbatch"),
    "sequence_length": (256, "tokens of a sequence"),
}
TURNS = {
    "warmup": (2, "warm-up turns"),
    "turns": (10, "counted turns"),
}


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("overhead", __doc__)
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        nargs="+",
        default=RECOMPUTE,
        help="modes to measure (all)",
    )
    reporting.add_numbers(parser, WORKLOAD | TURNS)
    # What one of this program's own processes measures.
    parser.add_argument("--part", choices=(TIMES, NOTHING, *PROGRAMS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
