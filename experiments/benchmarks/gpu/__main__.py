"""Training on one accelerator against a plain jitted step, and what training is made of.

    python -m experiments.benchmarks.gpu --json experiments/results/gpu_MACHINE.json

Each part is a line of the summary and a section of the JSON, and --parts chooses among them:

- `stage`: an inner stage of the recipe of 1.5B parameters (`experiments/paper/configs/1.5b.yaml`)
  with its settings, through the functions that a run uses: forwards and backwards of an iteration's
  microbatches in the order of 1F1B, with as many of them held at once as the recipe has, then the
  update. Inputs are random, and the loss of a microbatch is half the squared sum of the outputs, so
  that their gradient is the outputs themselves.
- `model`: all stages of a whole model, as one process runs them.
- `attention`: with its gradient, over a sequence of the recipe, in each way that the device has,
  against `xla`.
- `cross_entropy`: with its gradient, over a microbatch of the recipe, against the logits of all
  tokens at once.
- `dispatch`: how long a host takes to hand an operation over, of stages too small to matter.

The plain step of `stage` and `model` is one jitted function with donated state that goes through
the microbatches in a scan, accumulates their gradients in float32, clips them and updates by AdamW.
It trains the same, or the program ends with an error: their losses are held against each other.
Both take turns, iteration by iteration, and "times" is the median of (seconds of the pipeline /
seconds of the plain step) over the turns; where both do not fit into memory at once, one runs after
the other, and it is the ratio of the medians. What does not fit at all says so, and the rest goes
on.

FLOPs of the model are counted once, whatever is computed again, as `skippipe_jax.models.flops`
says. The utilisation is these FLOPs per second over the most that the product of two random
matrices in bfloat16 reaches, of a few sizes, in the same run. Peak memory is what the pipeline
takes before the plain step is there; there is none to tell where an earlier part took more. Of
attention and cross-entropy, temporary memory is what the compiled program allocates besides its
arguments and results, and the ratios are paired too: on a CPU, of processor time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.benchmarks import attention
from experiments.benchmarks.gpu import parts, training
from experiments.benchmarks.gpu.parts import ALL, PLAIN
from experiments.benchmarks.gpu.training import StageWorkload
from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import OutOfMemory, within_memory
from experiments.benchmarks.one_process import Workload
from skippipe_jax.config import PRESETS, ModelConfig
from skippipe_jax.config.model import XLA

# 8 forwards, 4 losses and 8 backwards: few enough for a device's queue to hold all of them.
DISPATCHED = {
    "stages": 2,
    "replicas": 1,
    "microbatches_per_data_node": 4,
    "microbatch_size": 1,
    "sequence_length": 32,
}
DISPATCHED_SHAPE = {"width": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_width": 128}
KINDS_OF_OPERATION = {"F": "forward", "L": "loss", "B": "backward"}
DOES_NOT_FIT = "out_of_memory"

Found = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured; the stage is a replica of an inner one of the recipe.

    Attributes:
        preset: model of the stage and of attention.
        layers, microbatches, in_flight, microbatch_size, sequence_length: of the stage.
        model: the whole model; what is called `model_...` is its own.
        heads_of: models with the widths and vocabularies for cross-entropy.
        products: sizes of square matrices; their fastest product is the reference.
        iterations: timed ones, after one that is not timed.
        turns: of attention, cross-entropy and dispatch.
    """

    preset: str = "1.5b"
    layers: int = 4
    microbatches: int = 6
    in_flight: int = 3
    microbatch_size: int = 1
    sequence_length: int = 4096
    model: str = "500m"
    model_stages: int = 6
    model_microbatches: int = 8
    model_microbatch_size: int = 8
    model_sequence_length: int = 1024
    heads_of: tuple[str, ...] = ("1.5b", "8b")
    products: tuple[int, ...] = (4096, 8192, 16384)
    iterations: int = 10
    turns: int = 20
    compute_dtype: str = "bfloat16"

    def model_of(self, shape: Mapping[str, Any]) -> ModelConfig:
        """Return a model of a shape, which computes and recomputes as the recipe does."""
        return ModelConfig(**shape, compute_dtype=self.compute_dtype, recompute="block")


SMALL = Sizes(
    preset="tiny",
    layers=1,
    microbatches=3,
    in_flight=2,
    sequence_length=32,
    model="tiny",
    model_stages=2,
    model_microbatches=2,
    model_microbatch_size=1,
    model_sequence_length=32,
    heads_of=("tiny",),
    products=(128, 256),
    iterations=2,
    turns=3,
    # In which programs that train the same have losses that differ by little.
    compute_dtype="float32",
)


def stage(sizes: Sizes) -> Found:
    """The stage of the recipe, against a plain step."""
    workload = StageWorkload(
        sizes.model_of(PRESETS[sizes.preset] | {"layers": sizes.layers}),
        sizes.microbatches,
        sizes.in_flight,
        sizes.microbatch_size,
        sizes.sequence_length,
    )
    return training.of_stage(workload, sizes.iterations, sizes.products)


def whole_model(sizes: Sizes) -> Found:
    """A whole model, against a plain step."""
    workload = Workload(
        sizes.model_of(PRESETS[sizes.model]),
        stages=sizes.model_stages,
        replicas=1,
        microbatches_per_data_node=sizes.model_microbatches,
        microbatch_size=sizes.model_microbatch_size,
        sequence_length=sizes.model_sequence_length,
    )
    return training.of_model(workload, sizes.iterations, sizes.products)


def training_lines(found: Found) -> Iterator[str]:
    """What is printed of either."""
    possible = max(found["product_flops_per_second"].values()) / 1e12
    times, peak = found["pipeline_takes_times"], found["peak_memory_bytes"]
    how = "in turns" if found["is_paired"] else "one after the other: both do not fit together"
    yield (
        f"{found['parameters'] / 1e6:.1f} million parameters: the pipeline takes "
        f"{reporting.figure(times, '.3f')} times as long as the plain step ({how})"
    )
    for name, own in found["programs"].items():
        yield _misfit(own, name) or (
            f"{name}: {own['tokens_per_second']:.0f} tokens/s, utilisation "
            f"{own['utilisation']:.1%} of {possible:.2f} TFLOP/s"
        )
    yield (
        f"pipeline: peak memory {reporting.figure(peak and peak / 1e9, '.2f')} GB, compiled in "
        f"{reporting.figure(found['compile_seconds'], '.1f')} s"
    )


def attention_each_way(sizes: Sizes) -> Found:
    """Attention over one document and over packed ones, by each way, against all scores at once."""
    model, length = sizes.model_of(PRESETS[sizes.preset]), sizes.sequence_length

    def measured(is_packed: bool) -> Found:
        ways = attention.measured(model, length, is_packed, sizes.turns)
        shape = {"tokens": length, "heads": model.heads, "head_width": model.head_width}
        return shape | {"ways": ways}

    return {
        kind: _fitting(functools.partial(measured, is_packed))
        for kind, is_packed in (("one document", False), ("packed documents", True))
    }


def cross_entropies(sizes: Sizes) -> Found:
    """Cross-entropy of a microbatch's tokens by the heads of some models, against a plain one."""
    tokens = sizes.microbatch_size * sizes.sequence_length
    models = {preset: sizes.model_of(PRESETS[preset]) for preset in sizes.heads_of}
    return {
        preset: _fitting(functools.partial(parts.of_cross_entropy, model, tokens, sizes.turns))
        for preset, model in models.items()
    }


def lines_of_ways(against: str, found: Found) -> Iterator[str]:
    """What is printed of several ways to compute the same, beside one of them."""
    for kind, own in found.items():
        if line := _misfit(own, kind):
            yield line
            continue
        for way, of_way in own["ways"].items():
            line = (
                f"{own['tokens']} tokens, {kind}, {way}: {1e3 * of_way['seconds']:.3f} ms, "
                f"{of_way['temporary_bytes'] / 1e6:.1f} MB of temporary memory"
            )
            if way != against:
                line += (
                    f", {of_way[f'of_{against}']:.3f} of the time of {against}, off by "
                    f"{of_way['difference']:.2%}"
                )
            yield line


def dispatch(sizes: Sizes) -> Found:
    """What it takes to hand operations over to the device."""
    workload = Workload(sizes.model_of(DISPATCHED_SHAPE), **DISPATCHED)
    return parts.of_dispatch(workload, sizes.turns)


def dispatch_lines(found: Found) -> Iterator[str]:
    """What is printed of it."""
    taken = found["microseconds"]
    kinds = (f"{word} {taken[kind]:.0f}" for kind, word in KINDS_OF_OPERATION.items())
    yield (
        f"{taken[ALL]:.0f} microseconds for an operation with its hops; the calls alone: "
        f"{', '.join(kinds)}"
    )


PARTS: dict[str, tuple[Callable[[Sizes], Found], Callable[[Found], Iterator[str]]]] = {
    "stage": (stage, training_lines),
    "model": (whole_model, training_lines),
    "attention": (attention_each_way, functools.partial(lines_of_ways, XLA)),
    "cross_entropy": (cross_entropies, functools.partial(lines_of_ways, PLAIN)),
    "dispatch": (dispatch, dispatch_lines),
}


def _fitting(measure: Callable[[], Found]) -> Found:
    found = within_memory(measure)
    # Runtimes hold themselves, and what they have on the device, until they are collected.
    gc.collect()
    return {DOES_NOT_FIT: found.told} if isinstance(found, OutOfMemory) else found


def _misfit(found: Found, name: str) -> str | None:
    """What is printed of something for which there was too little memory."""
    told = found.get(DOES_NOT_FIT)
    return None if told is None else f"{name} does not fit on this device: {told}"


def measure_parts(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Measure the parts that are asked for."""
    results = report["results"] = {}
    sizes = SMALL if arguments.small else Sizes()
    for name in arguments.parts:
        measure, lines = PARTS[name]
        results[name] = _fitting(functools.partial(measure, sizes))
        misfit = _misfit(results[name], "the program")
        for line in [misfit] if misfit else lines(results[name]):
            print(f"{name}: {line}", flush=True)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    options = {
        "--parts": {
            "choices": PARTS, "nargs": "+", "default": [*PARTS], "help": "what to measure (all)",
        },
        "--small": {"action": "store_true", "help": "small sizes, seconds on a CPU"},
    }  # fmt: skip
    return reporting.run("gpu", __doc__, measure_parts, options=options)


if __name__ == "__main__":
    sys.exit(main())
