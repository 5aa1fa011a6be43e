"""Every way to compute attention on this machine's device, against all scores at once.

    python -m experiments.benchmarks.attention --json experiments/results/attention_MACHINE.json

Attention and its gradient, of one sequence with random queries, keys and values, for each length.
Each way takes turns with `xla`, so that both see the same machine, and what is told is the median
of the ratios: of processor time where the device is a processor, all its threads, else of seconds.
Beside it the temporary memory that each compiled program takes, and how far its results are from
those of `xla`: the norm of the difference over that of the result, of attention or of one of its
gradients, whichever is farthest off.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.benchmarks.harness import reporting
from experiments.benchmarks.harness.turns import Taken, ratio
from skippipe_jax.config import ModelConfig
from skippipe_jax.config.model import BLOCKWISE, PLATFORM_OF, XLA
from skippipe_jax.models.attention import attend

MODEL = ModelConfig(width=512, heads=8, kv_heads=4)
DOCUMENT = 300


def inputs(model: ModelConfig, length: int) -> list[Array]:
    """Queries, keys, values, and the gradient of what comes out."""
    random = np.random.default_rng(0)
    shapes = [
        (1, length, heads, model.head_width) for heads in (model.heads, *[model.kv_heads] * 2)
    ]
    return [
        jnp.asarray(random.normal(size=shape), model.compute_dtype)
        for shape in (*shapes, (1, length, model.width))
    ]


def compiled(way: str, arrays: list[Array], is_packed: bool) -> Any:
    """Attention and its gradient, compiled."""
    length = arrays[0].shape[1]
    documents = jnp.arange(length)[None] // DOCUMENT * DOCUMENT if is_packed else None

    @jax.jit
    def both(query: Array, key: Array, value: Array, cotangent: Array) -> Any:
        own = functools.partial(attend, documents=documents, implementation=way)
        attended, vjp = jax.vjp(own, query, key, value)
        return attended, vjp(cotangent)

    return both.lower(*arrays).compile()


def seconds_of(program: Any, arrays: list[Array]) -> float:
    """Of processor time on a processor, else by the clock."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    start = clock()
    jax.block_until_ready(program(*arrays))
    return clock() - start


def measured(model: ModelConfig, length: int, is_packed: bool, turns: int) -> dict[str, Any]:
    """Compare all ways that the device has, each as `compared` says."""
    arrays = inputs(model, length)
    kernels = [kernel for kernel, own in PLATFORM_OF.items() if own == jax.default_backend()]
    ways = [XLA, BLOCKWISE, *(way for way in kernels if not model.unsupported_reason(way, length))]
    programs = {way: compiled(way, arrays, is_packed) for way in ways}
    return compared(programs, arrays, turns, XLA)


def compared(
    programs: dict[str, Any], arrays: list[Array], turns: int, against: str
) -> dict[str, dict[str, Any]]:
    """Of compiled programs that compute the same and take turns, beside the one called `against`.

    Seconds, their ratio to those of that one, temporary memory in bytes, and how far the
    results are from its own, as a share of them.
    """
    results = jax.block_until_ready(programs[against](*arrays))
    far = {name: distance(program(*arrays), results) for name, program in programs.items()}
    del results
    taken = {name: Taken() for name in programs}
    for _ in range(turns):
        for name, program in programs.items():
            taken[name].seconds.append(seconds_of(program, arrays))
    return {
        name: {
            "seconds": round(taken[name].median, 6),
            f"of_{against}": round(ratio(taken[name].seconds, taken[against].seconds), 3),
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            "difference": round(far[name], 6),
        }
        for name, program in programs.items()
    }


def distance(results: Any, others: Any) -> float:
    """The norm of the difference over that of the others, of the array where it is greatest."""

    def of_array(result: Array, other: Array) -> float:
        wide, other_wide = (x.astype(jnp.float32).ravel() for x in (result, other))
        return float(jnp.linalg.norm(wide - other_wide) / jnp.linalg.norm(other_wide))

    return float(np.max(jax.tree.leaves(jax.tree.map(of_array, results, others))))


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Measure each length, of one document and packed."""
    report["results"] = []
    for length in arguments.lengths:
        for is_packed in (False, True):
            own = measured(MODEL, length, is_packed, arguments.turns)
            report["results"].append({"length": length, "packed": is_packed, "ways": own})
            ratios = ", ".join(f"{way} {of['of_xla']}" for way, of in own.items() if way != XLA)
            kind = "packed documents" if is_packed else "one document"
            print(f"{length} tokens, {kind}, of the time of xla: {ratios}", flush=True)


def main() -> int:
    """Parse the command line, measure, print; returns the exit code."""
    numbers = {"turns": (7, 1, "counted turns")}
    lengths = {"type": int, "nargs": "+", "default": [256, 1024, 2048, 4096]}
    options = {"--lengths": lengths}
    return reporting.run("attention", __doc__, measure, numbers=numbers, options=options)


if __name__ == "__main__":
    sys.exit(main())
