"""Tokens per second and model FLOPs utilisation of one stage on one accelerator.

    python -m experiments.benchmarks.gpu --json experiments/results/gpu_MACHINE.json

Trains an inner stage through the functions that a run uses: forwards and backwards of an
iteration's microbatches in the order of 1F1B, with `--in-flight` of them held at once, then the
update. Inputs are random; the gradient of a microbatch's outputs is the outputs themselves, which
is that of half their squared sum.

FLOPs of the model are counted once, whatever is computed again, as `skippipe_jax.models.flops`
says. The utilisation is these FLOPs per second over those of the product of two large random
matrices in bfloat16, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from skippipe_sched.errors import run_command

from experiments.benchmarks import machine, reporting
from skippipe_jax.config import PRESETS, ModelConfig, OptimizerConfig
from skippipe_jax.config.attention import ATTENTION
from skippipe_jax.config.choices import DTYPES
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.models.flops import flops_per_token
from skippipe_jax.models.llama import parameter_count
from skippipe_jax.runtime.stage_functions import TOKENS, TOTALS, stage_functions

STEPS = 1000
PRODUCTS_AT_ONCE, PRODUCT_TIMINGS = 10, 20


@dataclass(frozen=True)
class Workload:
    """An iteration of one stage; `model.layers` are those of the stage."""

    model: ModelConfig
    microbatches: int
    in_flight: int
    microbatch_size: int
    sequence_length: int

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.microbatch_size * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.microbatches * self.microbatch_tokens

    def flops(self, parameters: Any) -> int:
        """FLOPs of the model in an iteration of a stage with these parameters."""
        return self.tokens * flops_per_token(
            parameters,
            layers=self.model.layers,
            width=self.model.width,
            sequence_length=self.sequence_length,
        )


def train(workload: Workload, iterations: int) -> tuple[Any, list[float]]:
    """The stage's parameters at last, and the seconds of one iteration after another."""
    model = workload.model
    functions = stage_functions(
        model, OptimizerConfig(), STEPS, False, model.layers, workload.microbatch_tokens
    )
    parameters, optimizer_state, gradients = functions.create(jax.random.key(0), 0)
    gauge = jnp.zeros(2, jnp.int32)
    counted = jnp.zeros(TOTALS).at[TOKENS].set(workload.tokens)
    shape = (workload.microbatch_size, workload.sequence_length, model.width)
    inputs = [
        jax.random.normal(key, shape, model.compute_dtype)
        for key in jax.random.split(jax.random.key(1), workload.microbatches)
    ]
    jax.block_until_ready((parameters, optimizer_state, gradients, inputs))

    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        forwards = deque(inputs)
        held: deque[tuple[Any, jax.Array]] = deque()
        while forwards or held:
            if forwards and len(held) < workload.in_flight:
                outputs, saved, gauge = functions.forward(parameters, gauge, forwards.popleft())
                held.append((saved, outputs))
            else:
                _, gradients, gauge = functions.backward(
                    parameters, gradients, gauge, *held.popleft()
                )
        totals = functions.squared_norm(gradients) + counted
        parameters, optimizer_state, gradients = functions.update(
            parameters, optimizer_state, gradients, totals
        )
        jax.block_until_ready((parameters, optimizer_state, gradients))
        seconds.append(time.perf_counter() - start)
    return parameters, seconds


def product_flops_per_second(size: int) -> float:
    """FLOPs per second of the product of two random square matrices in bfloat16."""
    left, right = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(2))
    )
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(left, right))
    seconds = []
    for _ in range(PRODUCT_TIMINGS):
        start = time.perf_counter()
        jax.block_until_ready([multiply(left, right) for _ in range(PRODUCTS_AT_ONCE)])
        seconds.append((time.perf_counter() - start) / PRODUCTS_AT_ONCE)
    return 2 * size**3 / statistics.median(seconds)


def measure(workload: Workload, iterations: int, product: int) -> dict[str, Any]:
    """All results, of `iterations` iterations after a first one that compiles."""
    parameters, (first, *seconds) = train(workload, iterations + 1)
    # Before the product, whose matrices are not part of training.
    peak = machine.peak_memory_bytes(jax.devices()[0])
    median = statistics.median(seconds)
    reached = workload.flops(parameters) / median
    possible = product_flops_per_second(product)
    return {
        "parameters": parameter_count(parameters),
        "seconds_per_iteration": round(median, 6),
        "tokens_per_second": round(workload.tokens / median, 1),
        "model_flops_per_second": round(reached),
        "product_flops_per_second": round(possible),
        "utilisation": round(reached / possible, 4),
        "peak_memory_bytes": peak,
        "compile_seconds": round(first - median, 3),
        "seconds": [round(value, 6) for value in seconds],
    }


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    parser = _parser()
    if parser.parse_args().small:
        parser.set_defaults(**SMALL)
    arguments = parser.parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    model = ModelConfig(
        **PRESETS[arguments.preset] | {"layers": arguments.layers},
        parameter_dtype=arguments.parameter_dtype,
        compute_dtype=arguments.compute_dtype,
        recompute=arguments.recompute,
        attention=arguments.attention,
    )
    workload = Workload(
        model,
        arguments.microbatches,
        arguments.in_flight,
        arguments.microbatch_size,
        arguments.sequence_length,
    )
    results = measure(workload, arguments.iterations, arguments.product)
    summary = (
        f"{results['tokens_per_second']:.0f} tokens/s, utilisation {results['utilisation']:.1%} of "
        f"{results['product_flops_per_second'] / 1e12:.1f} TFLOP/s, peak memory "
        f"{results['peak_memory_bytes'] / 1e9:.2f} GB, compiled in "
        f"{results['compile_seconds']:.1f} s"
    )
    report = {**reporting.begun("gpu"), "workload": asdict(workload), "results": results}
    return reporting.finish(report, summary, arguments.json)


SIZES = {
    "layers": (4, "layers of the stage"),
    "microbatches": (8, "microbatches of an iteration"),
    "in_flight": (3, "microbatches in flight"),
    "microbatch_size": (2, "sequences of a microbatch"),
    "sequence_length": (4096, "tokens of a sequence"),
    "iterations": (10, "iterations that are timed, after one that compiles"),
    "product": (8192, "rows of the matrices whose product is the measure"),
}
SMALL = {
    "preset": "tiny",
    "layers": 1,
    "microbatches": 3,
    "in_flight": 2,
    "microbatch_size": 1,
    "sequence_length": 32,
    "iterations": 2,
    "product": 128,
    "attention": "xla",
}


def _parser() -> argparse.ArgumentParser:
    parser = reporting.parser("gpu", __doc__)
    parser.add_argument("--preset", choices=PRESETS, default="1.5b")
    for name, (default, text) in SIZES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} ({default})"
        )
    parser.add_argument("--parameter-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--compute-dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--attention", choices=ATTENTION, default="cudnn")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU does in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
