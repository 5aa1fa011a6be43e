"""Tokens per second and model FLOPs utilisation of one stage, trained as the runtime trains it.

    python -m experiments.benchmarks.gpu --json experiments/results/gpu_MACHINE.json

One inner stage of the 1.5B model (4 blocks of width 2048, sequences of 4096 tokens) runs forward
and backward over the microbatches of an iteration and then the update, through the same jitted
functions that the executor calls. Utilisation is against the peak of a matrix product measured in
the same run, on random data in the compute dtype.

Model FLOPs count what training needs and not what is recomputed: 6 for each parameter and token,
and for causal attention 6 * sequence * width for each block and token (two products of
sequence/2 keys on average, each forward once and backward twice).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from skippipe_sched.errors import run_command

from experiments.benchmarks import machine
from skippipe_jax.model import ATTENTION, DTYPES, PRESETS, RECOMPUTE, ModelConfig, parameter_count
from skippipe_jax.optimizer import OptimizerConfig
from skippipe_jax.stages import TOKENS, StageFunctions, stage_functions

STEPS = 1000


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    model = ModelConfig(
        **PRESETS["1.5b"],
        compute_dtype=arguments.compute_dtype,
        parameter_dtype=arguments.parameter_dtype,
        recompute=arguments.recompute,
        attention=arguments.attention,
    )
    layers, time_, product = arguments.layers, model.context, arguments.product
    if arguments.small:
        model = dataclasses.replace(model, width=64, heads=4, kv_heads=4, ffn_width=128, context=32)
        layers, time_, product = 2, 32, 128
    before = machine.describe()
    trained = train_stage(
        model,
        layers,
        batch=arguments.microbatch_size,
        sequence=time_,
        microbatches=arguments.microbatches,
        iterations=arguments.iterations,
    )
    peak = matrix_product_flops(product, model.compute_dtype, arguments.iterations)
    report = {
        "benchmark": "gpu",
        "command": f"python -m experiments.benchmarks.gpu {' '.join(sys.argv[1:])}".strip(),
        "machine": before,
        "model": dataclasses.asdict(model),
        "layers": layers,
        "microbatch_size": arguments.microbatch_size,
        "microbatches": arguments.microbatches,
        "matrix_product_flops_per_second": peak,
        "model_flops_utilisation": trained["model_flops_per_second"] / peak,
        **trained,
    }
    print(
        f"{before['device']}: {report['tokens_per_second']:,.0f} tokens/s through {layers} blocks, "
        f"{report['model_flops_per_second'] / 1e12:.2f} model TFLOP/s, "
        f"{report['model_flops_utilisation']:.1%} of the {peak / 1e12:.2f} TFLOP/s of a "
        f"{product}^3 {model.compute_dtype} product; peak memory "
        f"{report['peak_memory_bytes'] / 1e9:.2f} GB, compiled in {report['compile_s']:.1f} s"
    )
    print(json.dumps(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def train_stage(
    model: ModelConfig,
    layers: int,
    *,
    batch: int,
    sequence: int,
    microbatches: int,
    iterations: int,
) -> dict[str, Any]:
    """Train one inner stage of `layers` blocks; speed is the median over the iterations."""
    functions = stage_functions(model, OptimizerConfig(), STEPS, False, layers, batch * sequence)
    key = jax.random.key(0)
    shape = (batch, sequence, model.width)
    inputs = jax.random.normal(jax.random.fold_in(key, 1), shape, model.compute_dtype)
    cotangents = jax.random.normal(jax.random.fold_in(key, 2), shape, model.compute_dtype) * 1e-3
    run, parameters = _iteration(functions, key, inputs, cotangents, microbatches)
    start = time.perf_counter()
    run()
    compile_s = time.perf_counter() - start
    seconds = []
    for _ in range(iterations):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    tokens = microbatches * batch * sequence
    flops_per_token = 6 * parameters + 6 * layers * sequence * model.width
    median = statistics.median(seconds)
    return {
        "parameters": parameters,
        "seconds_per_iteration": median,
        "tokens_per_second": tokens / median,
        "model_flops_per_second": tokens * flops_per_token / median,
        "compile_s": compile_s,
        "peak_memory_bytes": machine.peak_memory_bytes(jax.devices()[0]),
    }


def _iteration(
    functions: StageFunctions,
    key: jax.Array,
    inputs: jax.Array,
    cotangents: jax.Array,
    microbatches: int,
) -> tuple[Callable[[], None], int]:
    """One iteration of the stage, to its end, and how many parameters the stage has."""
    state = list(functions.create(key, 0))
    gauge = jnp.zeros(2, jnp.int32)
    tokens = jnp.zeros(4).at[TOKENS].set(microbatches * inputs.shape[0] * inputs.shape[1])

    def run() -> None:
        nonlocal gauge
        for _ in range(microbatches):
            _, saved, gauge = functions.forward(state[0], gauge, inputs)
            # The backward pass gives its cotangent up.
            _, state[2], gauge = functions.backward(
                state[0], state[2], gauge, saved, jnp.copy(cotangents)
            )
        totals = tokens + functions.squared_norm(state[2])
        state[:] = functions.update(*state, totals)
        jax.block_until_ready(state)

    return run, parameter_count(state[0])


def matrix_product_flops(size: int, dtype: str, repeats: int) -> float:
    """FLOP/s of a product of two random matrices of `size` x `size`, median of the repeats."""
    left, right = (
        jax.random.normal(jax.random.key(number), (size, size), dtype) for number in (3, 4)
    )
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(left, right))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        # Ten in a row, so that what it takes to start one does not count.
        jax.block_until_ready([product(left, right) for _ in range(10)])
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * size**3 / statistics.median(seconds)


def _parser() -> argparse.ArgumentParser:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.gpu",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=4, help="blocks of the stage (4)")
    parser.add_argument("--microbatch-size", type=int, default=4, help="sequences (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="of an iteration (8)")
    parser.add_argument("--iterations", type=int, default=10, help="that are timed (10)")
    parser.add_argument("--product", type=int, default=8192, help="size of the product (8192)")
    parser.add_argument("--compute-dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--parameter-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="block")
    parser.add_argument(
        "--attention", choices=ATTENTION, default="cudnn", help="cudnn needs a GPU (cudnn)"
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny stage, to try the program on any machine"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
